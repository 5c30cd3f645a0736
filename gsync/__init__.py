"""Gradient synchronisation for data-parallel training: gradients in, their mean over all ranks out."""

from . import _native as _native
from .config import SyncConfig
from .errors import GsyncError, GsyncWarning, InternalError, SyncError, SyncTimeoutError

__version__ = "0.1.0"

__all__ = ["GsyncError", "GsyncWarning", "InternalError", "SyncConfig", "SyncError", "SyncTimeoutError", "__version__"]

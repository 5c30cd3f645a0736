"""Gradient synchronisation for data-parallel training: gradients in, their mean over all ranks out."""

from . import _native as _native
from . import ops
from .config import SyncConfig
from .errors import GsyncError, GsyncWarning, InternalError, SyncError, SyncTimeoutError
from .hook import hook, register
from .norm import clip_grad_norm_
from .reducer import GradReducer
from .state import SyncState
from .stats import SyncStats

__version__ = "0.1.0"

__all__ = [
    "GradReducer",
    "GsyncError",
    "GsyncWarning",
    "InternalError",
    "SyncConfig",
    "SyncError",
    "SyncState",
    "SyncStats",
    "SyncTimeoutError",
    "__version__",
    "clip_grad_norm_",
    "hook",
    "ops",
    "register",
]

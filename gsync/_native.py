"""Loads gsync's compiled extension and, where that does not go, says why and what to do.

    from gsync import _native

    if _native.C is not None: ...          # the extension
    _native.require('backend="native"')    # the extension, or GsyncError with the cause and the remedy

A missing extension is no error: gsync then computes in plain PyTorch and Triton. One that was built for another torch is left
alone with a warning, since loading it could crash instead of failing.
"""

from __future__ import annotations

import importlib
import re
import warnings
from types import ModuleType

import torch  # before the extension, which needs the libraries that torch brings

from .env import ENV
from .errors import GsyncError, GsyncWarning

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 14)
INSTALL = "in gsync's source tree, pip install --no-build-isolation ."
REINSTALL = "in gsync's source tree, pip install --force-reinstall --no-deps --no-build-isolation ."


def check_torch(version: str) -> None:
    """Refuse a torch that is too old, and warn about one that is newer than what gsync was tested with.

    Raises:
        ImportError: torch is older than 2.11.
    """
    span = "{}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)
    found = _minor(version)
    if found < OLDEST_TORCH:
        raise ImportError(
            f"gsync needs torch {span} and found {version}: pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"
        )
    if found > NEWEST_TORCH:
        warnings.warn(f"gsync is tested with torch {span} and found {version}", GsyncWarning, stacklevel=2)


def explain_mismatch(built_for: str, built_for_cuda: str | None, found: str, found_cuda: str | None) -> str:
    """Return what is wrong with an extension built for one torch under another one, or "" if nothing is.

    Args:
        built_for, found: versions of torch. Releases of one minor version share their C++ interface; development versions do not.
        built_for_cuda, found_cuda: the CUDA each was built with, None for a CPU build.
    """
    released = all(re.fullmatch(r"\d+\.\d+\.\d+(\+.*)?", version) for version in (built_for, found))
    same = _minor(built_for) == _minor(found) if released else built_for == found
    if same and built_for_cuda == found_cuda:
        return ""
    return (
        f"gsync's extension was built for torch {built_for} (CUDA {built_for_cuda or 'none'}), "
        f"but this is torch {found} (CUDA {found_cuda or 'none'}). "
        f"Build it again for this torch: {REINSTALL}"
    )


def load() -> tuple[ModuleType | None, str]:
    """Return the extension and "", or None and the reason. Warns when there is an extension that cannot be used."""
    if ENV.native == "off":
        return None, "GSYNC_NATIVE=off"
    info = build_info()
    if info is None or info.KIND == "python":
        why = info.REASON if info is not None else "this is a source tree that has not been built"
        return None, f"gsync was installed without its compiled extension ({why}). Build it: {INSTALL}"
    reason = explain_mismatch(info.TORCH, info.TORCH_CUDA, str(torch.__version__), torch.version.cuda)
    if not reason:
        try:
            return importlib.import_module("gsync._C"), ""
        except ModuleNotFoundError as error:
            if error.name != "gsync._C":
                raise
            reason = f"gsync's extension is missing, perhaps built for another Python. Build it again: {REINSTALL}"
        except (ImportError, OSError) as error:
            reason = (
                f"gsync's extension, built for torch {info.TORCH}, does not load under torch {torch.__version__}: {error}. "
                f"Build it again: {REINSTALL}"
            )
    warnings.warn(f"{reason}. Until then gsync goes on without it, slower.", GsyncWarning, stacklevel=2)
    return None, reason


def build_info() -> ModuleType | None:
    """Return what the build wrote down (KIND, TORCH, TORCH_CUDA, CUDA, ARCHS, REASON), or None in an unbuilt source tree."""
    try:
        return importlib.import_module("gsync._build_info")
    except ModuleNotFoundError:
        return None


def require(what: str) -> ModuleType:
    """Return the extension for `what`, which cannot do without it.

    Raises:
        GsyncError: there is no extension; the message says why and how to get it.
    """
    if C is None:
        raise GsyncError(f"{what} needs gsync's compiled extension. {MISSING}")
    return C


def has_cuda() -> bool:
    """Return whether the extension is there and has the CUDA kernels and the NCCL transport."""
    info = build_info()
    return C is not None and info is not None and info.KIND == "cuda"


def _minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


check_torch(str(torch.__version__))
C, MISSING = load()

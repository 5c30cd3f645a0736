"""A device that is not there, for tests of the code that drives one: `tests/emulation`, built and loaded.

The device is called "emu"; its streams are threads, its memory is the host's, and a stand-in for NCCL comes with it. Loading it
changes the process (torch then has an accelerator), so tests run in processes of their own: `run_emulated`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ranks
import torch

from gsync import _native

ROOT = Path(__file__).resolve().parent.parent
NAME = "gsync_emulation"
DEVICE = "emu"
MAX_RANKS = 4
_BUILD_S = 400.0

FOLDER = ROOT / "build" / f"emulation-{sys.implementation.cache_tag}-torch{torch.__version__}"
FILE = FOLDER / f"{NAME}.so"


def why_not() -> str:
    """Return why there is no emulation here, or ""."""
    if _native.C is None:
        return _native.MISSING
    if not hasattr(_native.C, "register_kernels"):
        return "the extension is older than this tree"
    return "" if _ninja() else "ninja is not installed"


def run_emulated(
    fn: Callable[..., Any], world_size: int = 1, args: Sequence[Any] = (), timeout_s: float = 60.0, backend: str | None = None
) -> list[Any]:
    """As `ranks.run_on_ranks`, in processes that are used for emulation only; `fn` calls `load` first."""
    build()
    return ranks.run_on_ranks(fn, world_size, timeout_s, backend, args, pool="emulated")


@functools.cache
def build() -> Path:
    """Return the extension's file; compiled once for each torch, and again when a source has changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if environment.get("CXX"):
        environment["CXX"] = environment["CXX"].split()[-1]  # torch's helper finds ccache by itself, and takes one word
    environment.setdefault("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=_BUILD_S, check=False
    )
    assert done.returncode == 0, f"tests/emulation does not build:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return FILE


@functools.cache
def load() -> types.ModuleType:
    """Return the extension, with its device in place. Once for a process, before anything else asks torch for a device."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module())
    spec = importlib.util.spec_from_file_location(NAME, FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native = _native.C
    assert native is not None
    native.register_kernels(DEVICE, module.kernel_table(native.kernel_table("cpu")))
    return module


def _device_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: MAX_RANKS  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    return module


def _ninja() -> str | None:
    return shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _compile() -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        NAME,
        [str(source) for source in sorted((ROOT / "tests" / "emulation").glob("*.cpp"))],
        extra_cflags=["-O1", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        extra_include_paths=[str(ROOT / "csrc")],
        extra_ldflags=["-ldl", "-lrt"],
        build_directory=str(FOLDER),
        verbose=True,
    )


if __name__ == "__main__":
    _compile()

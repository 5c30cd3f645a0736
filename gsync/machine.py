"""What a measurement has to be filed with: machine, versions, commit, time."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gsync

_BYTES_PER_GIB = 2.0**30


def circumstances() -> dict[str, Any]:
    """Return machine, versions, commit and time: what a measurement has to be filed with."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def versions() -> dict[str, str | None]:
    """Return versions of gsync and of what it stands on; None for what is not there."""
    return {
        "gsync": gsync.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl()[0],
        "triton": package_version("triton"),
        "numpy": package_version("numpy"),
        "system": f"{platform.system()} {platform.release()}",
    }


def machine() -> dict[str, Any]:
    """Return host, processor, memory and GPUs."""
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": _memory_gib(),
        "gpus": [_gpu(idx) for idx in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


@functools.cache
def commit() -> str | None:
    """Return the commit of the source tree that gsync is imported from, with "+" if it has changes; None outside a tree."""
    tree = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        changed = subprocess.run(
            ["git", "-C", tree, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


@functools.cache
def nccl() -> tuple[str | None, str]:
    """Return the version of the NCCL library that gsync would load, and where from or why there is none."""
    if not torch.version.cuda:
        return None, "torch is built without CUDA"
    try:
        library = ctypes.CDLL("libnccl.so.2")
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return None, f"libnccl.so.2 does not load: {error}"
    value = number.value
    return f"{value // 10000}.{value // 100 % 100}.{value % 100}", "libnccl.so.2"


def package_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _BYTES_PER_GIB if hasattr(os, "sysconf") else float("nan")


def _gpu(idx: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(idx)
    return {
        "index": idx,
        "name": properties.name,
        "memory_gib": properties.total_memory / _BYTES_PER_GIB,
        "architecture": f"{properties.major}{properties.minor}",
    }

"""The operations in Triton: for CUDA devices where the extension was built without CUDA. One file per codec family.

The same kernels also run on CPU tensors, through Triton's interpreter, so that tests need no GPU. `triton.jit` decides between
compiler and interpreter when it decorates a function, and kernels reach their helpers through their module. So `interpreted`
executes the file of a module a second time with the interpreter switched on, and keeps that twin beside the compiled module:
both work in one process, and TRITON_INTERPRET need not be set. The interpreter takes milliseconds a tile, and one thread at a
time.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

import torch
import triton


def kernels_for(name: str, tensor: torch.Tensor) -> ModuleType:
    """The module `name` with kernels that can run where `tensor` lies: itself for CUDA, its interpreted twin for CPU.

    Raises:
        RuntimeError: a CUDA tensor while TRITON_INTERPRET is set (the interpreter would read device addresses on the host).
        ValueError: a tensor on any other device.
    """
    if tensor.device.type == "cpu":
        return interpreted(name)
    if tensor.device.type != "cuda":
        raise ValueError(f"the Triton backend runs on cuda and cpu tensors, not on {tensor.device}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: Triton's interpreter cannot follow addresses of CUDA tensors; unset it")
    return sys.modules[name]


@functools.cache
def interpreted(name: str) -> ModuleType:
    """A second copy of the imported module `name` whose kernels run in Triton's interpreter."""
    path = sys.modules[name].__file__
    spec = importlib.util.spec_from_file_location(f"{name}_interpreted", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {path} a second time")
    twin = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(twin)
    return twin

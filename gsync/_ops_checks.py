"""Checks of what callers give to gsync.ops: each raises ValueError or TypeError with operation, argument, value, expectation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import BLOCK_SIZES, CODEC_KINDS, MAX_BLOCK, MIN_BLOCK

_CODECS = ", ".join(CODEC_KINDS)
_REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_COMPLEX_DTYPES = (torch.complex64, torch.complex32, torch.complex128)
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)


def check_gradients(operation: str, gradients: Sequence[Tensor], written: bool = False) -> None:
    """A list of strided tensors of a supported dtype on one device; `written`: no two elements share memory."""
    if not isinstance(gradients, (list, tuple)):
        raise TypeError(f"{operation}: gradients is {type(gradients).__name__}, expected a list of tensors")
    for i, gradient in enumerate(gradients):
        where = f"{operation}: gradients[{i}]"
        if not isinstance(gradient, Tensor):
            raise TypeError(f"{where} is {type(gradient).__name__}, expected a tensor")
        if gradient.layout != torch.strided or gradient.is_quantized:
            raise TypeError(f"{where} has layout {gradient.layout}, expected a strided tensor")
        if not torch.compiler.is_compiling() and _is_wrapper(gradient):
            raise TypeError(f"{where} is a {type(gradient).__name__}, expected a plain tensor, such as its local part")
        if gradient.dtype not in _REAL_DTYPES and gradient.dtype not in _COMPLEX_DTYPES:
            raise TypeError(f"{where} is {gradient.dtype}, expected float32, float16, bfloat16, float64 or complex of these")
        if gradient.device != gradients[0].device:
            raise ValueError(f"{where} is on {gradient.device}, expected {gradients[0].device} as gradients[0]")
        if written and _overlaps_itself(gradient):
            raise ValueError(
                f"{where} has shape {tuple(gradient.shape)} and strides {tuple(gradient.stride())}: several elements share "
                "one place in memory, expected each to have its own; pass a contiguous copy"
            )


def check_numels(operation: str, numels: Sequence[int]) -> tuple[int, ...]:
    """A list of integers, 0 or more."""
    if not isinstance(numels, (list, tuple)):
        raise TypeError(f"{operation}: numels is {type(numels).__name__}, expected a list of integers")
    for i, numel in enumerate(numels):
        check_int(operation, f"numels[{i}]", numel, 0)
    return tuple(numels)


def check_codecs(operation: str, codec: str | Sequence[str], num_segments: int) -> tuple[str, ...]:
    """The codec of each segment."""
    if isinstance(codec, str):
        codecs: tuple[str, ...] = (codec,) * num_segments
        if codec not in CODEC_KINDS:
            raise ValueError(f"{operation}: codec={codec!r}: expected one of {_CODECS}")
        return codecs
    if not isinstance(codec, (list, tuple)):
        raise TypeError(f"{operation}: codec is {type(codec).__name__}, expected one of {_CODECS}, or a list of them")
    if len(codec) != num_segments:
        raise ValueError(f"{operation}: codec has {len(codec)} entries, expected {num_segments}, one per gradient")
    for i, name in enumerate(codec):
        if name not in CODEC_KINDS:
            raise ValueError(f"{operation}: codec[{i}]={name!r}: expected one of {_CODECS}")
    return tuple(codec)


def check_names(operation: str, names: Sequence[str] | None, num_segments: int) -> tuple[str, ...]:
    """The names of the segments, "0", "1", ... for None."""
    if names is None:
        return tuple(map(str, range(num_segments)))
    if isinstance(names, str) or not isinstance(names, (list, tuple)):
        raise TypeError(f"{operation}: names is {type(names).__name__}, expected a list of strings or None")
    if len(names) != num_segments:
        raise ValueError(f"{operation}: names has {len(names)} entries, expected {num_segments}, one per gradient")
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"{operation}: names[{i}] is {type(name).__name__}, expected a string")
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"{operation}: names has {twice!r} twice, expected different names")
    return tuple(names)


def check_scale(operation: str, scale: float) -> None:
    """A number that fp32 can hold."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{operation}: scale is {type(scale).__name__}, expected a number")
    if not math.isfinite(scale) or abs(scale) > _FLOAT32_MAX:
        raise ValueError(f"{operation}: scale={scale!r}: expected a finite number that fp32 can hold")


def check_int(operation: str, name: str, value: int, low: int | None, high: int | None = None) -> None:
    """An integer from `low` to `high`, where given."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{operation}: {name} is {type(value).__name__}, expected an integer")
    if (low is not None and value < low) or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{operation}: {name}={value}: expected {expected}")


def check_block_size(operation: str, block_size: int | None, codecs: Sequence[str]) -> int:
    """Elements that share a scale; 0 for None, the codecs' own."""
    if block_size is None:
        return 0
    check_int(operation, "block_size", block_size, MIN_BLOCK, MAX_BLOCK)
    if block_size & (block_size - 1):
        raise ValueError(f"{operation}: block_size={block_size}: expected a power of two from {MIN_BLOCK} to {MAX_BLOCK}")
    if codecs and not any(CODEC_KINDS[codec] in BLOCK_SIZES for codec in codecs):
        raise ValueError(f"{operation}: block_size={block_size}: codec {_listed(codecs)} has no blocks, expected None")
    return block_size


def check_rounding(operation: str, rounding: str, codecs: Sequence[str]) -> None:
    """`nearest` or `stochastic`; the latter for codecs that round."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{operation}: rounding={rounding!r}: expected 'nearest' or 'stochastic'")
    if rounding == "stochastic" and codecs and set(codecs) == {"fp32"}:
        raise ValueError(f"{operation}: rounding='stochastic': codec fp32 does not round, expected 'nearest'")


def check_residuals(
    operation: str, residuals: Sequence[Tensor], numels: Sequence[int], device: torch.device, held: str
) -> list[Tensor]:
    """fp32 memory for what each encoding loses, of the sizes `numels`; `held` says in words what these are."""
    if not isinstance(residuals, (list, tuple)):
        raise TypeError(f"{operation}: residuals is {type(residuals).__name__}, expected a list of tensors or None")
    if len(residuals) != len(numels):
        raise ValueError(f"{operation}: residuals has {len(residuals)} entries, expected {len(numels)}, one per gradient")
    for i, (residual, numel) in enumerate(zip(residuals, numels, strict=True)):
        where = f"{operation}: residuals[{i}]"
        if not isinstance(residual, Tensor):
            raise TypeError(f"{where} is {type(residual).__name__}, expected a tensor")
        if residual.dtype != torch.float32:
            raise TypeError(f"{where} is {residual.dtype}, expected float32")
        if residual.numel() != numel or not residual.is_contiguous():
            raise ValueError(
                f"{where} has shape {tuple(residual.shape)} and strides {tuple(residual.stride())}, expected {numel} contiguous "
                f"elements, {held}"
            )
        if residual.device != device:
            raise ValueError(f"{where} is on {residual.device}, expected {device}")
    return [residual.detach() for residual in residuals]


def _listed(codecs: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(codecs))


def check_payload(operation: str, name: str, payload: Tensor, num_bytes: int, device: torch.device) -> None:
    """Bytes of a payload to read."""
    if not isinstance(payload, Tensor):
        raise TypeError(f"{operation}: {name} is {type(payload).__name__}, expected a uint8 tensor")
    if payload.dtype != torch.uint8:
        raise TypeError(f"{operation}: {name} is {payload.dtype}, expected uint8")
    if payload.dim() != 1 or payload.numel() != num_bytes or not payload.is_contiguous():
        raise ValueError(
            f"{operation}: {name} has shape {tuple(payload.shape)} and strides {tuple(payload.stride())}, expected "
            f"contiguous [{num_bytes}]"
        )
    if payload.device != device:
        raise ValueError(f"{operation}: {name} is on {payload.device}, expected {device}")


def check_out(operation: str, out: Tensor, num_bytes: int, device: torch.device) -> None:
    """Memory for a payload to write."""
    check_payload(operation, "out", out, num_bytes, device)


def _is_wrapper(tensor: Tensor) -> bool:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory: sorted by stride, a dimension steps by less than what the smaller ones reach."""
    if tensor.numel() == 0:
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False

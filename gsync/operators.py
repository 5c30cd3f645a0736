"""The operators `torch.ops.gsync.*`: what gsync/ops.py calls, with every argument spelt out, on dense real tensors.

    pack     pack_out     pack_feedback     pack_feedback_out
    reduce   reduce_out   reduce_feedback   reduce_feedback_out      unpack

`_out` writes to memory that the caller has; `_feedback` takes residuals. Each is an operator of its own, since one with an
optional tensor that it writes cannot be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import backends
from ._ops_checks import check_out, check_payload
from .encoding import EncodeOptions, random_key
from .layout import BLOCK_SIZES, CODEC_KINDS, DTYPE_CODES, PAYLOAD_ALIGNMENT, Segment, hash64


@functools.lru_cache(maxsize=256)
def _layout(
    numels: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    codecs: tuple[str, ...],
    names: tuple[str, ...],
    num_chunks: int,
    block_size: int,
) -> backends.BucketLayout:
    columns = zip(numels, dtypes, codecs, names, strict=True)
    segments = []
    for numel, dtype, codec, name in columns:
        kind = CODEC_KINDS[codec]
        segments.append(Segment(numel, DTYPE_CODES[dtype], kind, hash64(name), block_size if kind in BLOCK_SIZES else 0))
    return backends.BucketLayout(segments, num_chunks)


def _layout_of(
    gradients: Sequence[Tensor], codecs: Sequence[str], names: Sequence[str], num_chunks: int, block_size: int
) -> backends.BucketLayout:
    numels = tuple(int(g.numel()) for g in gradients)
    return _layout(numels, tuple(g.dtype for g in gradients), tuple(codecs), tuple(names), num_chunks, block_size)


def layout_for(
    numels: Sequence[int], codecs: Sequence[str], names: Sequence[str], num_chunks: int, block_size: int
) -> backends.BucketLayout:
    """A bucket's layout where the gradients' dtypes do not matter."""
    return _layout(tuple(numels), (torch.float32,) * len(numels), tuple(codecs), tuple(names), num_chunks, block_size)


def device_of(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> torch.device:
    """Where an operation runs: on the first tensor's device, the CPU where there is none."""
    return next((tensor.device for tensor in (*gradients, *others) if isinstance(tensor, Tensor)), torch.device("cpu"))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one piece of memory, each place once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % PAYLOAD_ALIGNMENT == 0 else tensor.clone()


def _check_dense(operation: str, gradients: Sequence[Tensor]) -> None:
    for i, gradient in enumerate(gradients):
        if gradient.dtype not in DTYPE_CODES or not is_dense(gradient):
            raise ValueError(
                f"torch.ops.gsync.{operation}: gradients[{i}] is {gradient.dtype} with strides {tuple(gradient.stride())}, "
                f"expected a dense real tensor; gsync.ops.{operation} takes any"
            )


def _pack_into(out, gradients, residuals, codecs, scale, num_chunks, names, backend, block_size, rounding, seed, step, rank):  # type: ignore[no-untyped-def]
    _check_dense("pack", gradients)
    layout = _layout_of(gradients, codecs, names, num_chunks, block_size)
    device = gradients[0].device if gradients else out.device
    check_out("pack", out, layout.sizes.payload_bytes, device)
    options = EncodeOptions(residuals, random_key(seed, step, "pack", rank) if rounding == "stochastic" else None)
    target = out if out.data_ptr() % PAYLOAD_ALIGNMENT == 0 else torch.empty_like(out)
    backends.get(backend, device).pack(layout, gradients, target, scale, None, options)
    if target is not out:
        out.copy_(target)


def _payload_size(gradients, codecs, scale, num_chunks, names, backend, block_size, *encoding):  # type: ignore[no-untyped-def]
    _check_dense("pack", gradients)
    return int(_layout_of(gradients, codecs, names, num_chunks, block_size).sizes.payload_bytes)


def _fake_payload(gradients, *arguments):  # type: ignore[no-untyped-def]
    return torch.empty(_payload_size(gradients, *arguments), dtype=torch.uint8, device=device_of(gradients, ()))


def _new_payload(gradients, *arguments):  # type: ignore[no-untyped-def]
    return backends.empty_payload(_payload_size(gradients, *arguments), device_of(gradients, ()))


def _pack(gradients, *arguments):  # type: ignore[no-untyped-def]
    payload = _new_payload(gradients, *arguments)
    _pack_into(payload, gradients, None, *arguments)
    return payload


def _pack_out(gradients, *arguments):  # type: ignore[no-untyped-def]
    _pack_into(arguments[-1], gradients, None, *arguments[:-1])


def _pack_feedback(gradients, residuals, *arguments):  # type: ignore[no-untyped-def]
    payload = _new_payload(gradients, *arguments)
    _pack_into(payload, gradients, residuals, *arguments)
    return payload


def _pack_feedback_out(gradients, residuals, *arguments):  # type: ignore[no-untyped-def]
    _pack_into(arguments[-1], gradients, residuals, *arguments[:-1])


def _reduce_into(  # type: ignore[no-untyped-def]
    out, payloads, residuals, numels, codecs, num_chunks, chunk_idx, scale, names, backend, block_size, rounding, seed, step
):
    layout = layout_for(numels, codecs, names, num_chunks, block_size)
    chunk_bytes = layout.sizes.chunk_bytes
    device = payloads[0].device
    for i, payload in enumerate(payloads):
        check_payload("reduce", f"payloads[{i}]", payload, chunk_bytes, device)
    check_out("reduce", out, chunk_bytes, device)
    options = EncodeOptions(residuals, random_key(seed, step, "reduce", 0) if rounding == "stochastic" else None)
    target = out if out.data_ptr() % PAYLOAD_ALIGNMENT == 0 else torch.empty_like(out)
    backends.get(backend, device).reduce(layout, chunk_idx, [_aligned(p) for p in payloads], target, scale, options)
    if target is not out:
        out.copy_(target)


def _new_chunk(payloads, numels, codecs, num_chunks, chunk_idx, scale, names, backend, block_size, *encoding):  # type: ignore[no-untyped-def]
    layout = layout_for(numels, codecs, names, num_chunks, block_size)
    return torch.empty(int(layout.sizes.chunk_bytes), dtype=torch.uint8, device=payloads[0].device)


def _reduce(payloads, *arguments):  # type: ignore[no-untyped-def]
    out = _new_chunk(payloads, *arguments)
    _reduce_into(out, payloads, None, *arguments)
    return out


def _reduce_out(payloads, *arguments):  # type: ignore[no-untyped-def]
    _reduce_into(arguments[-1], payloads, None, *arguments[:-1])


def _reduce_feedback(payloads, residuals, *arguments):  # type: ignore[no-untyped-def]
    out = _new_chunk(payloads, *arguments)
    _reduce_into(out, payloads, residuals, *arguments)
    return out


def _reduce_feedback_out(payloads, residuals, *arguments):  # type: ignore[no-untyped-def]
    _reduce_into(arguments[-1], payloads, residuals, *arguments[:-1])


def _unpack(payload, gradients, codecs, num_chunks, names, backend, block_size):  # type: ignore[no-untyped-def]
    _check_dense("unpack", gradients)
    layout = _layout_of(gradients, codecs, names, num_chunks, block_size)
    device = gradients[0].device if gradients else payload.device
    check_payload("unpack", "payload", payload, layout.sizes.payload_bytes, device)
    partials = torch.empty(layout.sizes.num_partials, dtype=torch.float64, device=device)
    found_nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
    sums = torch.empty(len(gradients), dtype=torch.float64, device=device)
    backends.get(backend, device).unpack(layout, _aligned(payload), gradients, partials, found_nonfinite, sums)
    return found_nonfinite[0] != 0, sums


def _new_results(payload, gradients, *arguments):  # type: ignore[no-untyped-def]
    _check_dense("unpack", gradients)
    return payload.new_empty((), dtype=torch.bool), payload.new_empty(len(gradients), dtype=torch.float64)


def _second(function):  # type: ignore[no-untyped-def]
    """The same without its second argument, the residuals."""
    return lambda tensors, residuals, *arguments: function(tensors, *arguments)


def _nothing(*arguments):  # type: ignore[no-untyped-def]
    return None


_ENCODING = "int block_size, str rounding, int seed, int step"
_PACK = f"str[] codecs, float scale, int num_chunks, str[] names, str backend, {_ENCODING}, int rank"
_REDUCE = f"int[] numels, str[] codecs, int num_chunks, int chunk_idx, float scale, str[] names, str backend, {_ENCODING}"
_UNPACK = "Tensor payload, Tensor(a!)[] gradients, str[] codecs, int num_chunks, str[] names, str backend, int block_size"
_GRADIENTS, _PAYLOADS = "Tensor[] gradients", "Tensor[] payloads"
_RESIDUALS, _OUT = "Tensor(a!)[] residuals", "Tensor(b!) out"
_FIRST, _BOTH = ("residuals",), ("residuals", "out")

# needs_exact_strides: bytes follow the memory order, so a compiler must not change it.
for _name, _schema, _function, _fake, _mutates in (
    ("pack", f"({_GRADIENTS}, {_PACK}) -> Tensor", _pack, _fake_payload, ()),
    ("pack_out", f"({_GRADIENTS}, {_PACK}, {_OUT}) -> ()", _pack_out, _nothing, ("out",)),
    ("pack_feedback", f"({_GRADIENTS}, {_RESIDUALS}, {_PACK}) -> Tensor", _pack_feedback, _second(_fake_payload), _FIRST),
    ("pack_feedback_out", f"({_GRADIENTS}, {_RESIDUALS}, {_PACK}, {_OUT}) -> ()", _pack_feedback_out, _nothing, _BOTH),
    ("reduce", f"({_PAYLOADS}, {_REDUCE}) -> Tensor", _reduce, _new_chunk, ()),
    ("reduce_out", f"({_PAYLOADS}, {_REDUCE}, {_OUT}) -> ()", _reduce_out, _nothing, ("out",)),
    ("reduce_feedback", f"({_PAYLOADS}, {_RESIDUALS}, {_REDUCE}) -> Tensor", _reduce_feedback, _second(_new_chunk), _FIRST),
    ("reduce_feedback_out", f"({_PAYLOADS}, {_RESIDUALS}, {_REDUCE}, {_OUT}) -> ()", _reduce_feedback_out, _nothing, _BOTH),
    ("unpack", f"({_UNPACK}) -> (Tensor, Tensor)", _unpack, _new_results, ("gradients",)),
):  # fmt: skip
    torch.library.custom_op(
        f"gsync::{_name}", _function, mutates_args=_mutates, schema=_schema, tags=torch.Tag.needs_exact_strides
    ).register_fake(_fake)

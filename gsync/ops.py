"""pack, reduce, unpack: gradients to payload, payloads of all ranks to one chunk, payload to gradients.

Formulas are in gsync/reference.py, bytes in docs/wire_format.md. Every backend writes the same bytes (gsync/backends.py).

Registered as `torch.ops.gsync.pack`, `pack_out`, `reduce`, `reduce_out` and `unpack`, so they can be compiled. Those operators
take dense real tensors and spell out every argument; the functions here accept any strided tensor and fill in defaults.

Elements of a tensor are counted in the order in which they lie in memory if it is dense and does not overlap itself, else in
logical order. A complex element counts as two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import backends
from ._ops_checks import (
    check_codecs,
    check_gradients,
    check_int,
    check_names,
    check_numels,
    check_out,
    check_payload,
    check_scale,
    refuse_what_is_not_there,
)
from .layout import CODEC_KINDS, DTYPE_CODES, PAYLOAD_ALIGNMENT, Segment, hash64

__all__ = ["pack", "payload_bytes", "reduce", "unpack"]


def payload_bytes(
    numels: Sequence[int],
    codec: str | Sequence[str] = "int8",
    block_size: int | None = None,
    num_chunks: int = 1,
    names: Sequence[str] | None = None,
) -> int:
    """The exact size of a payload.

    Args:
        numels: elements of each gradient (a complex one counts as two).
        codec: `fp32`, `fp16` or `bf16`; or one of them for each gradient. To be given.
        block_size: None; these codecs have no scale and so no blocks to choose.
        num_chunks: chunks of the payload, at least 1.
        names: of the parameters, on which the cut into chunks depends; None: "0", "1", ...

    Returns:
        Bytes: num_chunks times the largest chunk, each area of a chunk padded to 16 bytes.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.
    """
    sizes = check_numels("payload_bytes", numels)
    refuse_what_is_not_there("payload_bytes", block_size=block_size)
    codecs = check_codecs("payload_bytes", codec, len(sizes))
    check_int("payload_bytes", "num_chunks", num_chunks, 1)
    layout = _layout(sizes, (torch.float32,) * len(sizes), codecs, check_names("payload_bytes", names, len(sizes)), num_chunks)
    return int(layout.sizes.payload_bytes)


def pack(
    gradients: Sequence[Tensor],
    codec: str | Sequence[str] = "int8",
    scale: float = 1.0,
    num_chunks: int = 1,
    rank: int = 0,
    names: Sequence[str] | None = None,
    block_size: int | None = None,
    residuals: Sequence[Tensor] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Encodes gradients into one payload, gathering, scaling and casting in one pass.

    Args:
        gradients: strided tensors, fp32, fp16, bf16, fp64 or complex of these, on one device; any shape, empty ones too.
        codec: `fp32`, `fp16` or `bf16`; or one of them for each gradient. To be given.
        scale: multiplies each gradient in fp32 before the cast (1 / world size for a mean).
        num_chunks: chunks of the payload, one per rank that reduces; at least 1.
        rank: this rank in its group. It changes nothing while rounding is to nearest.
        names: of the parameters, which decide what chunk holds what; None: "0", "1", ...
        block_size, residuals, rounding, seed, step: for codecs with a scale; here None, None, "nearest" and any numbers.
        backend: `auto`, `native`, `triton` or `reference`.
        out [payload_bytes] uint8: written instead of a new tensor.

    Returns:
        [payload_bytes] uint8 on the gradients' device; `out` if given.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.

    Cost: reads each gradient once, writes payload_bytes.
    Error: 2^-8 (bf16) or 2^-11 (fp16) of each value, none for fp32; see docs/codecs.md.
    """
    refuse_what_is_not_there("pack", block_size=block_size, residuals=residuals, rounding=rounding)
    check_int("pack", "rank", rank, 0)
    check_int("pack", "seed", seed, None)
    check_int("pack", "step", step, 0)
    check_gradients("pack", gradients)
    codecs = check_codecs("pack", codec, len(gradients))
    check_scale("pack", scale)
    check_int("pack", "num_chunks", num_chunks, 1)
    keys = check_names("pack", names, len(gradients))
    dense = [_dense(gradient) for gradient in gradients]
    if out is None:
        return torch.ops.gsync.pack(dense, codecs, scale, num_chunks, keys, backend)
    torch.ops.gsync.pack_out(dense, codecs, scale, num_chunks, keys, backend, out)
    return out


def reduce(
    payloads: Sequence[Tensor],
    numels: Sequence[int],
    codec: str | Sequence[str] = "int8",
    num_chunks: int = 1,
    chunk_idx: int = 0,
    scale: float = 1.0,
    names: Sequence[str] | None = None,
    residuals: Sequence[Tensor] | None = None,
    block_size: int | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Sums one chunk over all ranks, in fp32 and rank order, and encodes the sum once.

    Args:
        payloads: that chunk as each rank packed it, [payload_bytes / num_chunks] uint8 each, in rank order; at least one.
        numels: elements of each gradient (a complex one counts as two).
        codec, num_chunks, names: as they were given to `pack`.
        chunk_idx: which chunk, from 0.
        scale: multiplies the sum in fp32. 1 where `pack` was given 1 / world size.
        residuals, block_size, rounding, seed, step, backend: as in `pack`.
        out [payload_bytes / num_chunks] uint8: written instead of a new tensor.

    Returns:
        [payload_bytes / num_chunks] uint8; `out` if given.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.

    Cost: reads each payload once, writes one.
    """
    refuse_what_is_not_there("reduce", block_size=block_size, residuals=residuals, rounding=rounding)
    check_int("reduce", "seed", seed, None)
    check_int("reduce", "step", step, 0)
    sizes = check_numels("reduce", numels)
    codecs = check_codecs("reduce", codec, len(sizes))
    check_scale("reduce", scale)
    check_int("reduce", "num_chunks", num_chunks, 1)
    check_int("reduce", "chunk_idx", chunk_idx, 0, num_chunks - 1)
    keys = check_names("reduce", names, len(sizes))
    if not isinstance(payloads, (list, tuple)) or not payloads:
        raise ValueError(f"reduce: payloads={payloads!r}: expected a list with one tensor per rank")
    arguments = (list(payloads), sizes, codecs, num_chunks, chunk_idx, scale, keys, backend)
    if out is None:
        return torch.ops.gsync.reduce(*arguments)
    torch.ops.gsync.reduce_out(*arguments, out)
    return out


def unpack(
    payload: Tensor,
    gradients: Sequence[Tensor],
    codec: str | Sequence[str] = "int8",
    num_chunks: int = 1,
    names: Sequence[str] | None = None,
    backend: str = "auto",
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Decodes a payload into gradients, in place, and says what was written.

    Args:
        payload [payload_bytes] uint8: read.
        gradients: written; as they were packed, or others of the same sizes.
        codec, num_chunks, names: as they were given to `pack`.
        backend: `auto`, `native`, `triton` or `reference`.
        block_size: None.

    Returns:
        found_nonfinite [] bool: whether any value written is Inf or NaN.
        sum_of_squares [] fp64: of all values written; one sum per gradient, added up in the order of the names.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.

    Cost: reads the payload once, writes each gradient once.
    """
    refuse_what_is_not_there("unpack", block_size=block_size)
    check_gradients("unpack", gradients, written=True)
    codecs = check_codecs("unpack", codec, len(gradients))
    check_int("unpack", "num_chunks", num_chunks, 1)
    keys = check_names("unpack", names, len(gradients))
    dense = [_dense(gradient) for gradient in gradients]
    found_nonfinite, sums = torch.ops.gsync.unpack(payload, dense, codecs, num_chunks, keys, backend)
    for gradient, written in zip(gradients, dense, strict=True):
        if not _is_view(gradient):
            target = gradient.detach()
            target.copy_(torch.view_as_complex(written) if gradient.is_complex() else written)
    return found_nonfinite, _sum_in_name_order(sums, keys)


# ---- any strided tensor as a dense real one ----------------------------------------------------------------------------


def _is_view(tensor: Tensor) -> bool:
    """Whether `_dense(tensor)` shares its memory."""
    # A compiler cannot trace the question; view_as_real refuses a conjugated tensor there.
    lazy = not torch.compiler.is_compiling() and (tensor.is_conj() or tensor.is_neg())
    return not lazy and is_dense(tensor)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, real, its memory in the order in which elements are counted: a view where that is possible, else a copy."""
    tensor = tensor.detach()
    if not _is_view(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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


def _sum_in_name_order(sums: Tensor, names: Sequence[str]) -> Tensor:
    if not names:
        return sums.new_zeros(())
    order = sorted(range(len(names)), key=names.__getitem__)
    if order != list(range(len(names))):
        sums = sums[order]
    # One by one; on a GPU, where a scan may differ from run to run, by the fixed tree of a sum.
    return sums.cumsum(0)[-1] if sums.device.type == "cpu" else sums.sum()


# ---- operators --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _layout(
    numels: tuple[int, ...], dtypes: tuple[torch.dtype, ...], codecs: tuple[str, ...], names: tuple[str, ...], num_chunks: int
) -> backends.BucketLayout:
    columns = zip(numels, dtypes, codecs, names, strict=True)
    segments = [Segment(n, DTYPE_CODES[dtype], CODEC_KINDS[codec], hash64(name)) for n, dtype, codec, name in columns]
    return backends.BucketLayout(segments, num_chunks)


def _layout_of(
    gradients: Sequence[Tensor], codecs: Sequence[str], names: Sequence[str], num_chunks: int
) -> backends.BucketLayout:
    numels = tuple(int(g.numel()) for g in gradients)
    return _layout(numels, tuple(g.dtype for g in gradients), tuple(codecs), tuple(names), num_chunks)


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


def _pack_out(gradients, codecs, scale, num_chunks, names, backend, out):  # type: ignore[no-untyped-def]
    _check_dense("pack", gradients)
    layout = _layout_of(gradients, codecs, names, num_chunks)
    device = gradients[0].device if gradients else out.device
    check_out("pack", out, layout.sizes.payload_bytes, device)
    target = out if out.data_ptr() % PAYLOAD_ALIGNMENT == 0 else torch.empty_like(out)
    backends.get(backend, device).pack(layout, gradients, target, scale)
    if target is not out:
        out.copy_(target)


def _new_payload(gradients, codecs, scale, num_chunks, names, backend):  # type: ignore[no-untyped-def]
    _check_dense("pack", gradients)
    device = gradients[0].device if gradients else torch.device("cpu")
    num_bytes = int(_layout_of(gradients, codecs, names, num_chunks).sizes.payload_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _pack(gradients, codecs, scale, num_chunks, names, backend):  # type: ignore[no-untyped-def]
    payload = _new_payload(gradients, codecs, scale, num_chunks, names, backend)
    _pack_out(gradients, codecs, scale, num_chunks, names, backend, payload)
    return payload


def _reduce_out(payloads, numels, codecs, num_chunks, chunk_idx, scale, names, backend, out):  # type: ignore[no-untyped-def]
    layout = _layout(tuple(numels), (torch.float32,) * len(numels), tuple(codecs), tuple(names), num_chunks)
    chunk_bytes = layout.sizes.chunk_bytes
    device = payloads[0].device
    for i, payload in enumerate(payloads):
        check_payload("reduce", f"payloads[{i}]", payload, chunk_bytes, device)
    check_out("reduce", out, chunk_bytes, device)
    target = out if out.data_ptr() % PAYLOAD_ALIGNMENT == 0 else torch.empty_like(out)
    backends.get(backend, device).reduce(layout, chunk_idx, [_aligned(p) for p in payloads], target, scale)
    if target is not out:
        out.copy_(target)


def _new_chunk(payloads, numels, codecs, num_chunks, chunk_idx, scale, names, backend):  # type: ignore[no-untyped-def]
    layout = _layout(tuple(numels), (torch.float32,) * len(numels), tuple(codecs), tuple(names), num_chunks)
    return torch.empty(int(layout.sizes.chunk_bytes), dtype=torch.uint8, device=payloads[0].device)


def _reduce(payloads, numels, codecs, num_chunks, chunk_idx, scale, names, backend):  # type: ignore[no-untyped-def]
    out = _new_chunk(payloads, numels, codecs, num_chunks, chunk_idx, scale, names, backend)
    _reduce_out(payloads, numels, codecs, num_chunks, chunk_idx, scale, names, backend, out)
    return out


def _unpack(payload, gradients, codecs, num_chunks, names, backend):  # type: ignore[no-untyped-def]
    _check_dense("unpack", gradients)
    layout = _layout_of(gradients, codecs, names, num_chunks)
    device = gradients[0].device if gradients else payload.device
    check_payload("unpack", "payload", payload, layout.sizes.payload_bytes, device)
    partials = torch.empty(layout.sizes.num_partials, dtype=torch.float64, device=device)
    found_nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
    sums = torch.empty(len(gradients), dtype=torch.float64, device=device)
    backends.get(backend, device).unpack(layout, _aligned(payload), gradients, partials, found_nonfinite, sums)
    return found_nonfinite[0] != 0, sums


def _new_results(payload, gradients, codecs, num_chunks, names, backend):  # type: ignore[no-untyped-def]
    _check_dense("unpack", gradients)
    return payload.new_empty((), dtype=torch.bool), payload.new_empty(len(gradients), dtype=torch.float64)


_PACK = "Tensor[] gradients, str[] codecs, float scale, int num_chunks, str[] names, str backend"
_REDUCE = "Tensor[] payloads, int[] numels, str[] codecs, int num_chunks, int chunk_idx, float scale, str[] names, str backend"
_UNPACK = "Tensor payload, Tensor(a!)[] gradients, str[] codecs, int num_chunks, str[] names, str backend"

# needs_exact_strides: bytes follow the memory order, so a compiler must not change it.
for _name, _schema, _function, _fake, _mutates in (
    ("pack", f"({_PACK}) -> Tensor", _pack, _new_payload, ()),
    ("pack_out", f"({_PACK}, Tensor(a!) out) -> ()", _pack_out, lambda *arguments: None, ("out",)),
    ("reduce", f"({_REDUCE}) -> Tensor", _reduce, _new_chunk, ()),
    ("reduce_out", f"({_REDUCE}, Tensor(a!) out) -> ()", _reduce_out, lambda *arguments: None, ("out",)),
    ("unpack", f"({_UNPACK}) -> (Tensor, Tensor)", _unpack, _new_results, ("gradients",)),
):
    torch.library.custom_op(
        f"gsync::{_name}", _function, mutates_args=_mutates, schema=_schema, tags=torch.Tag.needs_exact_strides
    ).register_fake(_fake)

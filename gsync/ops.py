"""pack, reduce, unpack: gradients to payload, payloads of all ranks to one chunk, payload to gradients.

Formulas are in gsync/reference.py, bytes in docs/wire_format.md. Every backend writes the same bytes (gsync/backends.py).

Behind them are operators of torch (gsync/operators.py), so that they can be compiled. Those take dense real tensors and every
argument; the functions here accept any strided tensor and fill in defaults.

Elements of a tensor are counted in the order in which they lie in memory if it is dense and does not overlap itself, else in
logical order. A complex element counts as two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._ops_checks import (
    check_block_size,
    check_codecs,
    check_gradients,
    check_int,
    check_names,
    check_numels,
    check_residuals,
    check_rounding,
    check_scale,
)
from .layout import share_of
from .operators import device_of, is_dense, layout_for

__all__ = ["chunk_numels", "pack", "payload_bytes", "reduce", "unpack"]


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
        codec: `fp32`, `fp16`, `bf16`, `fp8_e4m3`, `fp8_e5m2`, `int8` or `int4`; or one of them for each gradient.
        block_size: elements that share a scale, a power of two from 32 to 4096, for those codecs that have one. None: 256, for
            int4 64.
        num_chunks: chunks of the payload, at least 1.
        names: of the parameters, on which the cut into chunks depends; None: "0", "1", ...

    Returns:
        Bytes: num_chunks times the largest chunk, each area of a chunk padded to 16 bytes.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.
    """
    sizes = check_numels("payload_bytes", numels)
    codecs = check_codecs("payload_bytes", codec, len(sizes))
    block = check_block_size("payload_bytes", block_size, codecs)
    check_int("payload_bytes", "num_chunks", num_chunks, 1)
    keys = check_names("payload_bytes", names, len(sizes))
    return int(layout_for(sizes, codecs, keys, num_chunks, block).sizes.payload_bytes)


def chunk_numels(
    numels: Sequence[int],
    codec: str | Sequence[str] = "int8",
    num_chunks: int = 1,
    chunk_idx: int = 0,
    names: Sequence[str] | None = None,
    block_size: int | None = None,
) -> list[int]:
    """How many elements of each gradient one chunk holds: the sizes of the residuals that `reduce` takes.

    Args:
        numels, codec, num_chunks, names, block_size: as in `payload_bytes`.
        chunk_idx: which chunk, from 0.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.
    """
    sizes = check_numels("chunk_numels", numels)
    codecs = check_codecs("chunk_numels", codec, len(sizes))
    block = check_block_size("chunk_numels", block_size, codecs)
    check_int("chunk_numels", "num_chunks", num_chunks, 1)
    check_int("chunk_numels", "chunk_idx", chunk_idx, 0, num_chunks - 1)
    keys = check_names("chunk_numels", names, len(sizes))
    layout = layout_for(sizes, codecs, keys, num_chunks, block)
    return [share_of(segment, chunk_idx, num_chunks)[1] for segment in layout.segments]


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
        codec: as in `payload_bytes`.
        scale: multiplies each gradient in fp32 before the cast (1 / world size for a mean).
        num_chunks: chunks of the payload, one per rank that reduces; at least 1.
        rank: this rank in its group, for stochastic rounding.
        names: of the parameters, which decide what chunk holds what; None: "0", "1", ...
        block_size: as in `payload_bytes`.
        residuals: one fp32 tensor per gradient, contiguous and as large: added after `scale`, then overwritten with what encoding
            lost, in the order in which elements are counted. Elements whose code is Inf or NaN keep theirs. None: not kept.
        rounding: `nearest` (ties to even), or `stochastic`: up or down so that the mean is exact, by random numbers that depend
            on seed, step, rank, name and element only.
        seed, step: for stochastic rounding.
        backend: `auto`, `native`, `triton` or `reference`.
        out [payload_bytes] uint8: written instead of a new tensor.

    Returns:
        [payload_bytes] uint8 on the gradients' device; `out` if given.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.

    Cost: reads each gradient once, writes payload_bytes; with residuals, reads and writes 4 bytes more per element.
    Error: per element and nearest, of the largest magnitude in its block: int8 1/254, int4 0.0725, fp8_e4m3 16/448, fp8_e5m2
    4096/57344; of its own magnitude: bf16 2^-8, fp16 2^-11. Stochastic: twice that. See docs/codecs.md.
    """
    check_int("pack", "rank", rank, 0, 2**32 - 1)
    check_int("pack", "seed", seed, None)
    check_int("pack", "step", step, 0)
    check_gradients("pack", gradients)
    codecs = check_codecs("pack", codec, len(gradients))
    block = check_block_size("pack", block_size, codecs)
    check_rounding("pack", rounding, codecs)
    check_scale("pack", scale)
    check_int("pack", "num_chunks", num_chunks, 1)
    keys = check_names("pack", names, len(gradients))
    dense = [_dense(gradient) for gradient in gradients]
    arguments = (codecs, scale, num_chunks, keys, backend, block, rounding, seed, step, rank)
    if residuals is not None:
        numels = [gradient.numel() for gradient in dense]
        kept = check_residuals("pack", residuals, numels, device_of(dense, residuals), "as many as the gradient has")
        if out is None:
            return torch.ops.gsync.pack_feedback(dense, kept, *arguments)
        torch.ops.gsync.pack_feedback_out(dense, kept, *arguments, out)
        return out
    if out is None:
        return torch.ops.gsync.pack(dense, *arguments)
    torch.ops.gsync.pack_out(dense, *arguments, out)
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
        codec, num_chunks, names, block_size: as they were given to `pack`.
        chunk_idx: which chunk, from 0.
        scale: multiplies the sum in fp32. 1 where `pack` was given 1 / world size.
        residuals: as in `pack`, but only of the elements that this chunk holds: sizes from `chunk_numels`. Those of a parameter
            that no rank used stay as they are.
        rounding, seed, step, backend: as in `pack`; the random numbers are others.
        out [payload_bytes / num_chunks] uint8: written instead of a new tensor.

    Returns:
        [payload_bytes / num_chunks] uint8; `out` if given.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.

    Cost: reads each payload once, writes one.
    """
    check_int("reduce", "seed", seed, None)
    check_int("reduce", "step", step, 0)
    sizes = check_numels("reduce", numels)
    codecs = check_codecs("reduce", codec, len(sizes))
    block = check_block_size("reduce", block_size, codecs)
    check_rounding("reduce", rounding, codecs)
    check_scale("reduce", scale)
    check_int("reduce", "num_chunks", num_chunks, 1)
    check_int("reduce", "chunk_idx", chunk_idx, 0, num_chunks - 1)
    keys = check_names("reduce", names, len(sizes))
    if not isinstance(payloads, (list, tuple)) or not payloads:
        raise ValueError(f"reduce: payloads={payloads!r}: expected a list with one tensor per rank")
    received = list(payloads)
    arguments = (sizes, codecs, num_chunks, chunk_idx, scale, keys, backend, block, rounding, seed, step)
    if residuals is not None:
        held = chunk_numels(sizes, codecs, num_chunks, chunk_idx, keys, block_size)
        kept = check_residuals("reduce", residuals, held, received[0].device, f"as many as chunk {chunk_idx} holds")
        if out is None:
            return torch.ops.gsync.reduce_feedback(received, kept, *arguments)
        torch.ops.gsync.reduce_feedback_out(received, kept, *arguments, out)
        return out
    if out is None:
        return torch.ops.gsync.reduce(received, *arguments)
    torch.ops.gsync.reduce_out(received, *arguments, out)
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
        codec, num_chunks, names, block_size: as they were given to `pack`.
        backend: `auto`, `native`, `triton` or `reference`.

    Returns:
        found_nonfinite [] bool: whether any value written is Inf or NaN.
        sum_of_squares [] fp64: of all values written; one sum per gradient, added up in the order of the names.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is expected.

    Cost: reads the payload once, writes each gradient once.
    """
    check_gradients("unpack", gradients, written=True)
    codecs = check_codecs("unpack", codec, len(gradients))
    block = check_block_size("unpack", block_size, codecs)
    check_int("unpack", "num_chunks", num_chunks, 1)
    keys = check_names("unpack", names, len(gradients))
    dense = [_dense(gradient) for gradient in gradients]
    found_nonfinite, sums = torch.ops.gsync.unpack(payload, dense, codecs, num_chunks, keys, backend, block)
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


def _sum_in_name_order(sums: Tensor, names: Sequence[str]) -> Tensor:
    if not names:
        return sums.new_zeros(())
    order = sorted(range(len(names)), key=names.__getitem__)
    if order != list(range(len(names))):
        sums = sums[order]
    # One by one; on a GPU, where a scan may differ from run to run, by the fixed tree of a sum.
    return sums.cumsum(0)[-1] if sums.device.type == "cpu" else sums.sum()

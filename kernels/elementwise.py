"""pack, reduce and unpack in Triton for the codecs without a scale: fp32, fp16, bf16.

The twin of csrc/cuda/elementwise.cu: one launch for a whole bucket, program i does tile i, the tables say what that is. Tables
(built by gsync/layout.py, described in csrc/common/plan.h):

    shares    [num_shares, 8] int64   64 bytes a share; the last two words hold narrower fields
    tiles     [num_tiles, 2] int32    share, index in the share
    pointers  [num_segments] int64    addresses of the gradients, 0 for an unused parameter; in `reduce` those of the payloads
    segments  [num_segments, 2] int64 where the sums of a segment begin and end among the partials

Rounding is the integer arithmetic of csrc/codecs/elementwise.h, so bytes equal those of every other backend, in the interpreter
too. A tile whose gradient is 16-byte aligned and whose numel is a multiple of 16 moves in 16-byte accesses, any other element by
element. Partials are added in an order that depends on the segment alone.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from . import kernels_for

NUM_WARPS = 8

TILE = tl.constexpr(4096)
FP32, FP16, BF16, FP64 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FLAGS, PADDING = tl.constexpr(14), tl.constexpr(15)
# Segments and partials that the last program adds up at a time.
SUM_SEGMENTS, SUM_LANES = tl.constexpr(16), tl.constexpr(64)


# ---- one value: bits and the float they stand for ------------------------------------------------------------------


@triton.jit
def encode_fp32(value):
    """Bits of fp32, with one NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits).to(tl.uint32)


@triton.jit
def encode_bf16(value):
    """Nearest bf16, ties to even, as uint16."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def decode_bf16(code):
    """The fp32 value of a bf16."""
    return (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_fp16(value):
    """Nearest fp16, ties to even, as uint16."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # Adding 0.5 puts the last bit of fp16's subnormal grid (2^-24) on the last bit of the sum, so the addition rounds.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.uint32, bitcast=True) - 0x3F000000
    code = tl.where(magnitude < 0x38800000, subnormal, normal)
    code = tl.where(magnitude >= 0x477FF000, 0x7C00, code) | sign
    return tl.where(magnitude > 0x7F800000, 0x7E00, code).to(tl.uint16)


@triton.jit
def decode_fp16(code):
    """The fp32 value of an fp16."""
    magnitude = (code & 0x7FFF).to(tl.uint32)
    sign = (code & 0x8000).to(tl.uint32) << 16
    subnormal = (magnitude.to(tl.int32).to(tl.float32) * 5.9604644775390625e-8).to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude < 0x0400, subnormal, (magnitude << 13) + 0x38000000)
    bits = tl.where(magnitude >= 0x7C00, (magnitude << 13) + 0x70000000, bits)
    return (sign | bits).to(tl.float32, bitcast=True)


# ---- sums: tl.sum and tl.max themselves cannot be called in the interpreter once triton was imported without it -----------


@triton.jit
def _sum(values, axis: tl.constexpr):
    return tl.reduce(values, axis, tl.standard._sum_combine)


@triton.jit
def _max(values):
    return tl.reduce(values, 0, tl.standard._elementwise_max)


# ---- one tile: tables, loads and stores --------------------------------------------------------------------------------


@triton.jit
def _load_tile(shares, tiles):
    """Address of this program's share, its first element in the share, numel, kind, dtype."""
    program = tl.program_id(0).to(tl.int64)
    share = shares + 8 * tl.load(tiles + 2 * program).to(tl.int64)
    first = tl.load(tiles + 2 * program + 1).to(tl.int64) * TILE
    numel = tl.minimum(tl.load(share + 1) - first, TILE).to(tl.int32)
    packed = tl.load(share + 7)
    return share, first, numel, ((packed >> 32) & 0xFF).to(tl.int32), ((packed >> 40) & 0xFF).to(tl.int32)


@triton.jit
def _segment(share):
    return tl.load(share + 6) & 0xFFFFFFFF


@triton.jit
def _chunk_start(share, chunk_bytes):
    """Bytes before this share's chunk in a payload."""
    return (tl.load(share + 6) >> 32) * chunk_bytes


@triton.jit
def _codes_start(share):
    """Bytes before this share in its chunk."""
    return tl.multiple_of(tl.load(share + 2), 16)


@triton.jit
def _load(address, start, numel, element: tl.constexpr):
    """TILE elements from `start` on, of which `numel` exist; the rest is zero."""
    offsets = tl.arange(0, TILE)
    base = address.to(tl.pointer_type(element)) + start
    if (base.to(tl.int64) % 16 == 0) & (numel % 16 == 0):
        # The hints must stand in this function, on an addition of their own, for the compiler to use 16-byte accesses.
        aligned = tl.multiple_of(address.to(tl.pointer_type(element)) + start, 16)
        values = tl.load(aligned + offsets, mask=offsets < numel // 16 * 16, other=0)
    else:
        values = tl.load(base + offsets, mask=offsets < numel, other=0)
    return values


@triton.jit
def _store(address, start, values, numel, element: tl.constexpr):
    offsets = tl.arange(0, TILE)
    base = address.to(tl.pointer_type(element)) + start
    if (base.to(tl.int64) % 16 == 0) & (numel % 16 == 0):
        aligned = tl.multiple_of(address.to(tl.pointer_type(element)) + start, 16)
        tl.store(aligned + offsets, values, mask=offsets < numel // 16 * 16)
    else:
        tl.store(base + offsets, values, mask=offsets < numel)


@triton.jit
def _load_codes(area, kind, first, numel):
    """Decoded codes of a tile; zero after its end."""
    offsets = tl.arange(0, TILE)
    if kind == FP32:
        padded = (numel + 3) // 4 * 4
        bits = tl.load(tl.multiple_of(area.to(tl.pointer_type(tl.uint32)) + first, 16) + offsets, mask=offsets < padded, other=0)
        values = bits.to(tl.float32, bitcast=True)
    else:
        padded = (numel + 7) // 8 * 8
        code = tl.load(tl.multiple_of(area.to(tl.pointer_type(tl.uint16)) + first, 16) + offsets, mask=offsets < padded, other=0)
        if kind == FP16:
            values = decode_fp16(code)
        else:
            values = decode_bf16(code)
    return tl.where(offsets < numel, values, 0.0)


@triton.jit
def _store_codes(area, kind, first, numel, values):
    """Encodes a tile and writes it, with zeros up to 16 bytes. Returns where a code is zero."""
    offsets = tl.arange(0, TILE)
    inside = offsets < numel
    if kind == FP32:
        padded = (numel + 3) // 4 * 4
        bits = tl.where(inside, encode_fp32(values), 0)
        tl.store(tl.multiple_of(area.to(tl.pointer_type(tl.uint32)) + first, 16) + offsets, bits, mask=offsets < padded)
        is_zero = (bits & 0x7FFFFFFF) == 0
    else:
        padded = (numel + 7) // 8 * 8
        if kind == FP16:
            code = encode_fp16(values)
        else:
            code = encode_bf16(values)
        code = tl.where(inside, code, 0)
        tl.store(tl.multiple_of(area.to(tl.pointer_type(tl.uint16)) + first, 16) + offsets, code, mask=offsets < padded)
        is_zero = (code & 0x7FFF) == 0
    return is_zero


@triton.jit
def _store_flags(area, share, first, numel, used):
    """Writes a tile of flags, with zeros up to 16 bytes."""
    offsets = tl.arange(0, TILE)
    packed = tl.load(share + 7)
    flag_bytes = (packed & 0xFFFFFFFF).to(tl.int32)
    flag_kind = ((packed >> 48) & 0xFF).to(tl.int32)
    padded = (numel * flag_bytes + 15) // 16 * 16 // flag_bytes
    used = used & (offsets < numel)
    if flag_kind == FP32:
        flags32 = tl.where(used, 0x3F800000, 0).to(tl.uint32)
        tl.store(area.to(tl.pointer_type(tl.uint32)) + first + offsets, flags32, mask=offsets < padded)
    elif flag_kind == FP16 or flag_kind == BF16:
        one = tl.where(flag_kind == FP16, 0x3C00, 0x3F80)
        flags16 = tl.where(used, one, 0).to(tl.uint16)
        tl.store(area.to(tl.pointer_type(tl.uint16)) + first + offsets, flags16, mask=offsets < padded)
    else:
        tl.store(area + first + offsets, used.to(tl.uint8), mask=offsets < padded)


@triton.jit
def _load_flags(area, share, first, numel):
    """True where a flag of this tile is on."""
    offsets = tl.arange(0, TILE)
    inside = offsets < numel
    flag_bytes = (tl.load(share + 7) & 0xFFFFFFFF).to(tl.int32)
    if flag_bytes == 4:
        used = tl.load(area.to(tl.pointer_type(tl.uint32)) + first + offsets, mask=inside, other=0) != 0
    elif flag_bytes == 2:
        used = tl.load(area.to(tl.pointer_type(tl.uint16)) + first + offsets, mask=inside, other=0) != 0
    else:
        used = tl.load(area + first + offsets, mask=inside, other=0) != 0
    return used


@triton.jit
def _store_padding(area, first, numel):
    offsets = tl.arange(0, TILE)
    whole = (numel + 15) // 16 * 16
    tl.store(tl.multiple_of(area + first, 16) + offsets, tl.full([TILE], 0, tl.uint8), mask=offsets < whole)


@triton.jit
def _load_gradient(address, dtype, start, numel):
    """A tile of a gradient in fp32, and where it is not zero."""
    if dtype == FP32:
        bits = _load(address, start, numel, tl.uint32)
        values = bits.to(tl.float32, bitcast=True)
        nonzero = (bits & 0x7FFFFFFF) != 0
    elif dtype == FP64:
        wide = _load(address, start, numel, tl.float64)
        values = wide.to(tl.float32)
        nonzero = wide != 0.0
    else:
        code = _load(address, start, numel, tl.uint16)
        if dtype == FP16:
            values = decode_fp16(code)
        else:
            values = decode_bf16(code)
        nonzero = (code & 0x7FFF) != 0
    return values, nonzero


@triton.jit
def _store_gradient(address, dtype, start, numel, values):
    """Rounds a tile to the gradient's dtype and writes it, unless address is 0. Returns what the gradient holds then, in fp32."""
    if dtype == FP32:
        if address != 0:
            _store(address, start, encode_fp32(values), numel, tl.uint32)
        stored = values
    elif dtype == FP64:
        if address != 0:
            # As bits: a cast of NaN to fp64 may keep the payload.
            bits = values.to(tl.float64).to(tl.int64, bitcast=True)
            bits = tl.where(values != values, 0x7FF8000000000000, bits)
            _store(address, start, bits, numel, tl.int64)
        stored = values
    else:
        if dtype == FP16:
            code = encode_fp16(values)
            stored = decode_fp16(code)
        else:
            code = encode_bf16(values)
            stored = decode_bf16(code)
        if address != 0:
            _store(address, start, code, numel, tl.uint16)
    return stored


# ---- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunk_bytes"])
def pack_kernel(shares, tiles, pointers, payload, counters, chunk_bytes, scale):
    """Writes one tile of a payload: codes, flags or padding. `counters` may be None."""
    share, first, numel, kind, dtype = _load_tile(shares, tiles)
    area = payload + tl.multiple_of(_chunk_start(share, chunk_bytes), 16) + _codes_start(share)
    if kind == FLAGS:
        offsets = tl.arange(0, TILE)
        used = tl.load(pointers + first + offsets, mask=offsets < numel, other=0) != 0
        _store_flags(area, share, first, numel, used)
    elif kind == PADDING:
        _store_padding(area, first, numel)
    else:
        address = tl.load(pointers + _segment(share))
        # An unused parameter has no elements to load, and packs as zeros.
        present = tl.where(address == 0, 0, numel)
        values, nonzero = _load_gradient(address, dtype, tl.load(share) + first, present)
        is_zero = _store_codes(area, kind, first, numel, values * scale)
        if counters is not None:
            tl.atomic_add(counters, _sum(nonzero.to(tl.int32), 0).to(tl.int64), sem="relaxed")
            tl.atomic_add(counters + 1, _sum((nonzero & is_zero).to(tl.int32), 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["num_payloads"])
def reduce_kernel(shares, tiles, payloads, out, num_payloads, scale):
    """Writes one tile of a reduced chunk: the fp32 sum in rank order, times scale, encoded once."""
    share, first, numel, kind, _dtype = _load_tile(shares, tiles)
    start = _codes_start(share)
    area = out + start
    first_area = tl.multiple_of(tl.load(payloads).to(tl.pointer_type(tl.uint8)), 16) + start
    if kind == FLAGS:
        used = _load_flags(first_area, share, first, numel)
        for rank in range(1, num_payloads):
            used |= _load_flags(tl.load(payloads + rank).to(tl.pointer_type(tl.uint8)) + start, share, first, numel)
        _store_flags(area, share, first, numel, used)
    elif kind == PADDING:
        _store_padding(area, first, numel)
    else:
        total = _load_codes(first_area, kind, first, numel)
        for rank in range(1, num_payloads):
            payload = tl.multiple_of(tl.load(payloads + rank).to(tl.pointer_type(tl.uint8)), 16)
            total += _load_codes(payload + start, kind, first, numel)
        _store_codes(area, kind, first, numel, total * scale)


@triton.jit(do_not_specialize=["chunk_bytes", "num_tiles", "num_segments"])
def unpack_kernel(
    shares, tiles, pointers, payload, partials, found_nonfinite, ticket, segments, sum_of_squares, failed,
    chunk_bytes, num_tiles, num_segments,
):  # fmt: skip
    """Writes one tile of a gradient and its sum of squares; the last program to finish adds up the sums of every segment.

    `failed` may be None; `ticket`, `segments` and `sum_of_squares` may be None together. The ticket is left zero.
    """
    if tl.program_id(0) < num_tiles:
        share, first, numel, kind, dtype = _load_tile(shares, tiles)
        if kind < FLAGS:
            area = payload + tl.multiple_of(_chunk_start(share, chunk_bytes), 16) + _codes_start(share)
            values = _load_codes(area, kind, first, numel)
            inside = tl.arange(0, TILE) < numel
            if failed is not None:
                nan = tl.full([TILE], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
                values = tl.where((tl.load(failed, volatile=True) != 0) & inside, nan, values)
            address = tl.load(pointers + _segment(share))
            stored = _store_gradient(address, dtype, tl.load(share) + first, numel, values)
            wide = stored.to(tl.float64)
            partial = _sum(wide * wide, 0)
            tl.store(partials + tl.load(share + 4) + first // TILE, partial)
            # fp64 holds the square of every fp32, so the sum is finite exactly if all values are.
            if (partial.to(tl.int64, bitcast=True) & 0x7FF0000000000000) == 0x7FF0000000000000:
                tl.store(found_nonfinite, 1)
    if segments is not None:
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            _sum_partials(partials, segments, sum_of_squares, num_segments)
            tl.store(ticket, 0)


@triton.jit
def _sum_partials(partials, segments, sum_of_squares, num_segments):
    lanes = tl.arange(0, SUM_LANES)
    for base in range(0, num_segments, SUM_SEGMENTS):
        segment = base + tl.arange(0, SUM_SEGMENTS).to(tl.int64)
        exists = segment < num_segments
        begin = tl.load(segments + 2 * segment, mask=exists, other=0)
        end = tl.load(segments + 2 * segment + 1, mask=exists, other=0)
        total = tl.full([SUM_SEGMENTS, SUM_LANES], 0.0, tl.float64)
        for i in range(0, _max(end - begin), SUM_LANES):
            idx = begin[:, None] + i + lanes[None, :]
            total += tl.load(partials + idx, mask=idx < end[:, None], other=0.0, cache_modifier=".cg")
        tl.store(sum_of_squares + segment, _sum(total, 1), mask=exists)


# ---- launchers ---------------------------------------------------------------------------------------------------------


def pack(
    shares: torch.Tensor,
    tiles: torch.Tensor,
    pointers: torch.Tensor,
    payload: torch.Tensor,
    chunk_bytes: int,
    scale: float,
    counters: torch.Tensor | None = None,
) -> None:
    """Write the payload of the gradients that `pointers` names; one launch, nothing allocated.

    Args:
        shares [num_shares, 8] int64: table of the layout.
        tiles [num_tiles, 2] int32: table of the layout.
        pointers [num_segments] int64: addresses of the gradients; 0 where the rank did not use the parameter.
        payload [num_chunks * chunk_bytes] uint8: written, every byte; 16-byte aligned.
        chunk_bytes (bytes): of one chunk.
        scale: multiplies each gradient in fp32 before the cast.
        counters [2] int64: adds the elements that are not zero, and those of them that became zero. None: not counted.
    """
    _launch("pack_kernel", payload, tiles.shape[0], shares, tiles, pointers, payload, counters, chunk_bytes, scale)


def reduce(
    shares: torch.Tensor,
    tiles: torch.Tensor,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Write one chunk: the fp32 sum of that chunk of all payloads, in rank order, times scale; one launch, nothing allocated.

    Args:
        shares [num_shares, 8] int64: table of the layout.
        tiles [num_tiles, 2] int32: the tiles of that chunk only.
        payloads [num_payloads] int64: addresses of that chunk as each rank sent it; at least one, each 16-byte aligned.
        out [chunk_bytes] uint8: written, every byte; 16-byte aligned.
        scale: multiplies the sum.
    """
    _launch("reduce_kernel", out, tiles.shape[0], shares, tiles, payloads, out, payloads.shape[0], scale)


def unpack(
    shares: torch.Tensor,
    tiles: torch.Tensor,
    pointers: torch.Tensor,
    payload: torch.Tensor,
    chunk_bytes: int,
    partials: torch.Tensor,
    found_nonfinite: torch.Tensor,
    ticket: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    sum_of_squares: torch.Tensor | None = None,
    failed: torch.Tensor | None = None,
) -> None:
    """Write the gradients of a payload, and measure them; one launch, nothing allocated.

    Args:
        shares [num_shares, 8] int64: table of the layout.
        tiles [num_tiles, 2] int32: table of the layout.
        pointers [num_segments] int64: addresses of the gradients; 0 where only the sums are wanted.
        payload [num_chunks * chunk_bytes] uint8: 16-byte aligned.
        chunk_bytes (bytes): of one chunk.
        partials [num_partials] float64: one sum of squares per tile, written.
        found_nonfinite [1] int32: set to 1 when a value written is Inf or NaN; never cleared.
        ticket [1] int32: zero before and after; needed with `segments`.
        segments [num_segments, 2] int64: where the sums of each segment lie. None: leave the partials unsummed.
        sum_of_squares [num_segments] float64: written when `segments` is given.
        failed [1] int32: not zero: the exchange failed, NaN is written instead. None: it did not.
    """
    num_tiles = tiles.shape[0]
    grid = num_tiles if segments is None or num_tiles > 0 else 1  # the sums of other slices may still have to be added up
    _launch(
        "unpack_kernel", payload, grid, shares, tiles, pointers, payload, partials, found_nonfinite, ticket, segments,
        sum_of_squares, failed, chunk_bytes, num_tiles, pointers.shape[0],
    )  # fmt: skip


def _launch(name: str, where: torch.Tensor, grid: int, *arguments: object, module: str = __name__) -> None:
    """Launch one kernel of `module` on the device of `where`, on its current stream."""
    if grid == 0:
        return
    kernel = getattr(kernels_for(module, where), name)
    with torch.cuda.device(where.device) if where.is_cuda else contextlib.nullcontext():
        # Without fusion of products and sums: it changes bits.
        kernel[(grid,)](*arguments, num_warps=NUM_WARPS, enable_fp_fusion=False)

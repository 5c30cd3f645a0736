"""pack, reduce and unpack in Triton for any layout: codecs with one scale per block, residuals, stochastic rounding.

The twin of csrc/cuda/block.cu: one launch for a whole bucket, program i does tile i; the tables are those of elementwise.py,
whose helpers serve here too. Formulas are in gsync/reference_block.py; all of them are integer arithmetic or single operations of
fp32, so bytes equal those of every other backend, in the interpreter too.

A block has a compile-time size: `block_8` elements under the codecs of 8 bits, `block_4` under int4. One launch knows one of
each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import block_values, elementwise, interpreted

# The helpers must be interpreted where this module is (see `interpreted`).
_shared, _values = (
    interpreted(module.__name__) if triton.knobs.runtime.interpret else module for module in (elementwise, block_values)
)
TILE, FP32, FP16, BF16, FLAGS, PADDING = (
    getattr(elementwise, name) for name in ("TILE", "FP32", "FP16", "BF16", "FLAGS", "PADDING")
)
encode_fp32, encode_fp16, encode_bf16, decode_fp16, decode_bf16 = (
    getattr(_shared, f"{verb}_{name}")
    for verb, name in (("encode", "fp32"), ("encode", "fp16"), ("encode", "bf16"), ("decode", "fp16"), ("decode", "bf16"))
)
_load_tile, _segment, _chunk_start, _codes_start, _load, _store, _load_codes, _sum, _sum_partials = (
    getattr(_shared, f"_{name}")
    for name in ("load_tile", "segment", "chunk_start", "codes_start", "load", "store", "load_codes", "sum", "sum_partials")
)
_load_gradient, _store_gradient, _load_flags, _store_flags, _store_padding = (
    getattr(_shared, f"_{name}") for name in ("load_gradient", "store_gradient", "load_flags", "store_flags", "store_padding")
)

INT4, NAN = block_values.INT4, block_values.NAN
random_words, round_magnitude, encode_scaled, decode_scaled, block_scales = (
    getattr(_values, name) for name in ("random_words", "round_magnitude", "encode_scaled", "decode_scaled", "block_scales")
)
HALF = tl.constexpr(2048)


# ---- one tile ------------------------------------------------------------------------------------------------------------


@triton.jit
def _scales_start(share):
    """Bytes before the scales of this share in its chunk."""
    return tl.load(share + 3)


@triton.jit
def _encode_blocks(
    chunk, share, kind, first, numel, x, words, stochastic: tl.constexpr, size: tl.constexpr, is_int4: tl.constexpr
):
    """Writes scales and codes of a tile under a codec with a scale. Returns the decoded values."""
    num_blocks: tl.constexpr = TILE // size
    blocks = tl.reshape(x, [num_blocks, size])
    absmax = tl.reduce((blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 1, tl.standard._elementwise_max)
    scale, inv = block_scales(absmax, kind, is_int4)
    y = tl.where(inv[:, None] == 0.0, 0.0, blocks) * inv[:, None]
    code = encode_scaled(y, tl.reshape(words, [num_blocks, size]), kind, stochastic)
    code = tl.where(inv[:, None] == 0.0, 0, code).to(tl.uint32)
    decoded = tl.reshape(decode_scaled(code, scale[:, None], kind), [TILE])
    code = tl.reshape(code, [TILE])

    area = chunk + _codes_start(share)
    block = tl.arange(0, num_blocks)
    exists = block * size < numel
    if is_int4:
        low, high = tl.split(tl.reshape(code, [HALF, 2]))
        offsets = tl.arange(0, HALF)
        padded = (numel + 31) // 32 * 16
        tl.store(tl.multiple_of(area + first // 2, 16) + offsets, (low | (high << 4)).to(tl.uint8), mask=offsets < padded)
        bits = (scale.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store((chunk + _scales_start(share)).to(tl.pointer_type(tl.uint16)) + first // size + block, bits, mask=exists)
    else:
        offsets = tl.arange(0, TILE)
        padded = (numel + 15) // 16 * 16
        tl.store(tl.multiple_of(area + first, 16) + offsets, code.to(tl.uint8), mask=offsets < padded)
        tl.store((chunk + _scales_start(share)).to(tl.pointer_type(tl.float32)) + first // size + block, scale, mask=exists)
    return decoded


@triton.jit
def _decode_blocks(chunk, share, kind, first, numel, size: tl.constexpr, is_int4: tl.constexpr):
    """Values of a tile under a codec with a scale; zero after its end."""
    num_blocks: tl.constexpr = TILE // size
    area = chunk + _codes_start(share)
    block = tl.arange(0, num_blocks)
    exists = block * size < numel
    if is_int4:
        offsets = tl.arange(0, HALF)
        padded = (numel + 31) // 32 * 16
        pair = tl.load(tl.multiple_of(area + first // 2, 16) + offsets, mask=offsets < padded, other=0).to(tl.uint32)
        code = tl.interleave(pair & 0x0F, pair >> 4)
        bits = tl.load(
            (chunk + _scales_start(share)).to(tl.pointer_type(tl.uint16)) + first // size + block, mask=exists, other=0
        )
        scale = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        offsets = tl.arange(0, TILE)
        padded = (numel + 15) // 16 * 16
        code = tl.load(tl.multiple_of(area + first, 16) + offsets, mask=offsets < padded, other=0).to(tl.uint32)
        scales = (chunk + _scales_start(share)).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + first // size + block, mask=exists, other=0.0)
    values = decode_scaled(tl.reshape(code, [num_blocks, size]), scale[:, None], kind)
    return tl.where(tl.arange(0, TILE) < numel, tl.reshape(values, [TILE]), 0.0)


@triton.jit
def _decode_tile(chunk, share, kind, first, numel, block_8: tl.constexpr, block_4: tl.constexpr):
    if kind <= BF16:
        values = _load_codes(chunk + _codes_start(share), kind, first, numel)
    elif kind == INT4:
        values = _decode_blocks(chunk, share, INT4, first, numel, block_4, True)
    else:
        values = _decode_blocks(chunk, share, kind, first, numel, block_8, False)
    return values


@triton.jit
def _encode_plain(chunk, share, kind, first, numel, x, words, stochastic: tl.constexpr):
    """Writes the codes of a tile under a codec without a scale. Returns the decoded values."""
    area = chunk + _codes_start(share)
    offsets = tl.arange(0, TILE)
    inside = offsets < numel
    if kind == FP32:
        padded = (numel + 3) // 4 * 4
        bits = tl.where(inside, encode_fp32(x), 0).to(tl.uint32)
        tl.store(tl.multiple_of(area.to(tl.pointer_type(tl.uint32)) + first, 16) + offsets, bits, mask=offsets < padded)
        decoded = bits.to(tl.float32, bitcast=True)
    else:
        padded = (numel + 7) // 8 * 8
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        sign = (bits >> 16) & 0x8000
        if kind == FP16:
            if stochastic:
                code = round_magnitude(magnitude, words, 10, 15)
                code = tl.where(magnitude >= 0x47800000, 0x7C00, code) | sign
                code = tl.where(magnitude > 0x7F800000, 0x7E00, code).to(tl.uint16)
            else:
                code = encode_fp16(x)
        else:
            if stochastic:
                code = (magnitude + tl.where(magnitude < 0x7F800000, words >> 16, 0).to(tl.uint32)) >> 16
                code = tl.where(magnitude > 0x7F800000, 0x7FC0, code | sign).to(tl.uint16)
            else:
                code = encode_bf16(x)
        code = tl.where(inside, code, 0).to(tl.uint16)
        tl.store(tl.multiple_of(area.to(tl.pointer_type(tl.uint16)) + first, 16) + offsets, code, mask=offsets < padded)
        if kind == FP16:
            decoded = decode_fp16(code)
        else:
            decoded = decode_bf16(code)
    return decoded


@triton.jit
def _encode_tile(
    chunk, share, kind, first, numel, x, residual, error_sums, key_low, key_high,
    stochastic: tl.constexpr, block_8: tl.constexpr, block_4: tl.constexpr,
):  # fmt: skip
    """Writes a tile: scales, codes and what encoding lost. `residual`: an address or 0. Returns where the decoded value is 0."""
    offsets = tl.arange(0, TILE)
    inside = offsets < numel
    if residual != 0:
        x += tl.load(residual.to(tl.pointer_type(tl.float32)) + offsets, mask=inside, other=0.0)
    x = tl.where(inside, x, 0.0)
    if stochastic:
        words = random_words(share, first, key_low, key_high)
    else:
        words = tl.full([TILE], 0, tl.uint32)
    if kind <= BF16:
        decoded = _encode_plain(chunk, share, kind, first, numel, x, words, stochastic)
    elif kind == INT4:
        decoded = _encode_blocks(chunk, share, INT4, first, numel, x, words, stochastic, block_4, True)
    else:
        decoded = _encode_blocks(chunk, share, kind, first, numel, x, words, stochastic, block_8, False)
    finite = (decoded.to(tl.uint32, bitcast=True) & 0x7F800000) != 0x7F800000
    lost = tl.where(finite, x, 0.0) - tl.where(finite, decoded, 0.0)
    if residual != 0:
        tl.store(residual.to(tl.pointer_type(tl.float32)) + offsets, lost, mask=inside & finite)
    if error_sums is not None:
        row = error_sums + 4 * tl.program_id(0)
        error = lost.to(tl.float64)
        value = tl.where(finite, x, 0.0).to(tl.float64)
        nonzero = finite & (x != 0.0)
        tl.store(row, tl.load(row) + _sum(error * error, 0))
        tl.store(row + 1, tl.load(row + 1) + _sum(value * value, 0))
        tl.store(row + 2, tl.load(row + 2) + _sum(nonzero.to(tl.int32), 0).to(tl.float64))
        tl.store(row + 3, tl.load(row + 3) + _sum((nonzero & (decoded == 0.0)).to(tl.int32), 0).to(tl.float64))
    return decoded == 0.0


@triton.jit
def _finish_share(chunk, share, kind, first, numel):
    """Zeros after the scales of a share, by its last tile."""
    share_numel = tl.load(share + 1)
    packed = tl.load(share + 7)
    padding = ((packed >> 56) & 0xFF).to(tl.int32)
    if (kind > BF16) & (first + numel == share_numel) & (padding > 0):
        block_size = packed & 0xFFFFFFFF
        num_blocks = (share_numel + block_size - 1) // block_size
        end = _scales_start(share) + num_blocks * tl.where(kind == INT4, 2, 4)
        offsets = tl.arange(0, 16)
        tl.store(chunk + end + offsets, tl.full([16], 0, tl.uint8), mask=offsets < padding)


@triton.jit
def _residual_of(residuals, share, first):
    """Address of the tile's residuals, or 0."""
    if residuals is not None:
        base = tl.load(residuals + _segment(share))
        address = tl.where(base == 0, 0, base + 4 * (tl.load(share) + first))
    else:
        address = tl.full([], 0, tl.int64)
    return address


# ---- kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunk_bytes", "key_low", "key_high"])
def pack_kernel(
    shares, tiles, pointers, residuals, payload, counters, error_sums, chunk_bytes, scale, key_low, key_high,
    stochastic: tl.constexpr, block_8: tl.constexpr, block_4: tl.constexpr,
):  # fmt: skip
    """Writes one tile of a payload: scales and codes, flags or padding. `residuals`, `counters` and `error_sums` may be None."""
    share, first, numel, kind, dtype = _load_tile(shares, tiles)
    chunk = payload + tl.multiple_of(_chunk_start(share, chunk_bytes), 16)
    if kind == FLAGS:
        offsets = tl.arange(0, TILE)
        used = tl.load(pointers + first + offsets, mask=offsets < numel, other=0) != 0
        _store_flags(chunk + _codes_start(share), share, first, numel, used)
    elif kind == PADDING:
        _store_padding(chunk + _codes_start(share), first, numel)
    else:
        address = tl.load(pointers + _segment(share))
        # An unused parameter has no elements to load, packs as zeros and keeps its residual.
        present = tl.where(address == 0, 0, numel)
        values, nonzero = _load_gradient(address, dtype, tl.load(share) + first, present)
        residual = tl.where(address == 0, 0, _residual_of(residuals, share, first))
        is_zero = _encode_tile(
            chunk, share, kind, first, numel, tl.where(address == 0, 0.0, values * scale), residual, error_sums, key_low,
            key_high, stochastic, block_8, block_4,
        )  # fmt: skip
        _finish_share(chunk, share, kind, first, numel)
        if counters is not None:  # noqa: SIM102 - decided when the kernel is compiled, the next one when it runs
            if kind <= BF16:
                tl.atomic_add(counters, _sum(nonzero.to(tl.int32), 0).to(tl.int64), sem="relaxed")
                tl.atomic_add(counters + 1, _sum((nonzero & is_zero).to(tl.int32), 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["num_payloads", "key_low", "key_high", "chunk_bytes", "sent_chunk_bytes", "first_chunk"])
def reduce_kernel(
    shares, tiles, payloads, residuals, out, error_sums, num_payloads, flag_bytes, scale, key_low, key_high,
    sent_shares, chunk_bytes, sent_chunk_bytes, first_chunk,
    stochastic: tl.constexpr, block_8: tl.constexpr, block_4: tl.constexpr,
):  # fmt: skip
    """Writes one tile of a reduced chunk: the fp32 sum in rank order, times scale, encoded once.

    With `sent_shares` one of a shard, whose chunks lie one after the other, from payloads that hold it in fp32.
    """
    share, first, numel, kind, _dtype = _load_tile(shares, tiles)
    start = _codes_start(share)
    if sent_shares is not None:
        chunk_idx = (tl.load(share + 6) >> 32) - first_chunk
        out += tl.multiple_of(chunk_idx * chunk_bytes, 16)
        sent_start = tl.multiple_of(chunk_idx * sent_chunk_bytes, 16)
        sent_share, _first, _numel, sent_kind, _sent_dtype = _load_tile(sent_shares, tiles)
    else:
        sent_start = tl.full([], 0, tl.int64)
        sent_share = share
        sent_kind = kind
    chunk = tl.multiple_of(tl.load(payloads).to(tl.pointer_type(tl.uint8)), 16)
    if kind == FLAGS:
        used = _load_flags(chunk + start, share, first, numel)
        for rank in range(1, num_payloads):
            used |= _load_flags(tl.load(payloads + rank).to(tl.pointer_type(tl.uint8)) + start, share, first, numel)
        _store_flags(out + start, share, first, numel, used)
    elif kind == PADDING:
        _store_padding(out + start, first, numel)
    else:
        total = _decode_tile(chunk + sent_start, sent_share, sent_kind, first, numel, block_8, block_4)
        for rank in range(1, num_payloads):
            sent = tl.multiple_of(tl.load(payloads + rank).to(tl.pointer_type(tl.uint8)), 16) + sent_start
            total += _decode_tile(sent, sent_share, sent_kind, first, numel, block_8, block_4)
        residual = _residual_of(residuals, share, first)
        if residuals is not None:
            # A parameter that no rank used stays zero, and the reducer keeps its residual.
            flag = tl.arange(0, 4)
            any_rank = tl.full([4], 0, tl.int32)
            for rank in range(num_payloads):
                flags = tl.load(payloads + rank).to(tl.pointer_type(tl.uint8)) + _segment(share) * flag_bytes
                any_rank |= tl.load(flags + flag, mask=flag < flag_bytes, other=0).to(tl.int32)
            residual = tl.where(_sum(any_rank, 0) == 0, 0, residual)
        _encode_tile(
            out, share, kind, first, numel, total * scale, residual, error_sums, key_low, key_high, stochastic, block_8, block_4
        )
        _finish_share(out, share, kind, first, numel)


@triton.jit(do_not_specialize=["chunk_bytes", "num_tiles", "num_segments"])
def unpack_kernel(
    shares, tiles, pointers, payload, partials, found_nonfinite, ticket, segments, sum_of_squares, failed,
    chunk_bytes, num_tiles, num_segments, block_8: tl.constexpr, block_4: tl.constexpr,
):  # fmt: skip
    """Writes one tile of a gradient and its sum of squares; the last program to finish adds up the sums of every segment.

    `failed` may be None; `ticket`, `segments` and `sum_of_squares` may be None together. The ticket is left zero.
    """
    if tl.program_id(0) < num_tiles:
        share, first, numel, kind, dtype = _load_tile(shares, tiles)
        if kind < FLAGS:
            chunk = payload + tl.multiple_of(_chunk_start(share, chunk_bytes), 16)
            values = _decode_tile(chunk, share, kind, first, numel, block_8, block_4)
            inside = tl.arange(0, TILE) < numel
            if failed is not None:
                nan = tl.full([TILE], NAN, tl.int32).to(tl.float32, bitcast=True)
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


# ---- launchers -----------------------------------------------------------------------------------------------------------


def pack(
    shares: torch.Tensor,
    tiles: torch.Tensor,
    pointers: torch.Tensor,
    payload: torch.Tensor,
    chunk_bytes: int,
    scale: float,
    counters: torch.Tensor | None,
    residuals: torch.Tensor | None,
    random_key: int | None,
    error_sums: torch.Tensor | None,
    block_sizes: tuple[int, int],
) -> None:
    """Write the payload of the gradients that `pointers` names; one launch, nothing allocated.

    Args:
        shares, tiles, pointers, payload, chunk_bytes, scale, counters: as in elementwise.pack.
        residuals [num_segments] int64: addresses of the residuals, fp32 and as large as the parameters; 0 or None: none.
        random_key: of the random words; None rounds to nearest.
        error_sums [num_tiles, 4] float64: added to; None: not wanted.
        block_sizes: elements of a block under the codecs of 8 bits, and under int4.
    """
    elementwise._launch(
        "pack_kernel", payload, tiles.shape[0], shares, tiles, pointers, residuals, payload, counters, error_sums, chunk_bytes,
        scale, *_halves(random_key), random_key is not None, *block_sizes, module=__name__,
    )  # fmt: skip


def reduce(
    shares: torch.Tensor,
    tiles: torch.Tensor,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    flag_bytes: int,
    residuals: torch.Tensor | None,
    random_key: int | None,
    error_sums: torch.Tensor | None,
    block_sizes: tuple[int, int],
    sent: tuple[torch.Tensor, int, int, int] | None = None,
) -> None:
    """Write one chunk: the fp32 sum of that chunk of all payloads, in rank order, times scale; one launch, nothing allocated.

    Args:
        shares, tiles, payloads, out, scale: as in elementwise.reduce.
        flag_bytes (bytes): of one flag.
        residuals [num_segments] int64: addresses that element 0 of each parameter's residuals would have; only the elements of
            this chunk are touched. 0 or None: none.
        random_key, error_sums, block_sizes: as in `pack`, the tiles being those of this chunk.
        sent: of a shard: the shares of the payloads, which hold it in fp32; chunk_bytes of `out` and of the payloads; the shard's
            first chunk. None: one chunk, the payloads like `out`.
    """
    elementwise._launch(
        "reduce_kernel", out, tiles.shape[0], shares, tiles, payloads, residuals, out, error_sums, payloads.shape[0],
        flag_bytes, scale, *_halves(random_key), *(sent or (None, 0, 0, 0)), random_key is not None, *block_sizes,
        module=__name__,
    )  # fmt: skip


def unpack(
    shares: torch.Tensor,
    tiles: torch.Tensor,
    pointers: torch.Tensor,
    payload: torch.Tensor,
    chunk_bytes: int,
    partials: torch.Tensor,
    found_nonfinite: torch.Tensor,
    ticket: torch.Tensor | None,
    segments: torch.Tensor | None,
    sum_of_squares: torch.Tensor | None,
    failed: torch.Tensor | None,
    block_sizes: tuple[int, int],
) -> None:
    """Write the gradients of a payload, and measure them; one launch, nothing allocated. Arguments as in elementwise.unpack."""
    num_tiles = tiles.shape[0]
    grid = num_tiles if segments is None or num_tiles > 0 else 1  # the sums of other slices may still have to be added up
    elementwise._launch(
        "unpack_kernel", payload, grid, shares, tiles, pointers, payload, partials, found_nonfinite, ticket, segments,
        sum_of_squares, failed, chunk_bytes, num_tiles, pointers.shape[0], *block_sizes, module=__name__,
    )  # fmt: skip


def _halves(key: int | None) -> tuple[int, int]:
    """The low and the high 32 bits as signed numbers, so that their type does not depend on their value."""
    key = key or 0
    low, high = key & 0xFFFFFFFF, key >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)

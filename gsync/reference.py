"""pack, reduce, unpack in plain PyTorch: the specification of every backend, the fallback, and the oracle of the tests.

Per element, with round() to nearest, ties to even, and every NaN in the one form of its format:

    pack     code = round_codec(fp32(g) * scale)                  product in fp32; an fp64 g is rounded to fp32 first
    reduce   code = round_codec((d_0 + d_1 + ... ) * scale)       d_r = fp32(code of rank r); fp32 sum in rank order
    unpack   g    = round_dtype(fp32(code))

Subnormal numbers are kept everywhere, whatever flush-to-zero the calling thread has set. The bytes around the codes are
described in docs/wire_format.md and laid out by gsync/layout.py. Codecs with a scale, residuals and stochastic rounding are in
gsync/reference_block.py. Gradients come as dense real tensors; elements are taken in
the order in which they lie in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import reference_block as block
from .encoding import NEAREST, EncodeOptions
from .layout import BYTE_FLAGS, DTYPE_CODES, KIND_FLAGS, KIND_PADDING, SCALE_BYTES, TILE_ELEMENTS, Layout, Share

# By number in layout.CODEC_KINDS: what the codes are, and the same as integers.
CODE_DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}
_NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float64: 0x7FF8000000000000}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
# Accumulators of a tile's sum of squares; element i goes to accumulator i mod LANES.
LANES = 16


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` [n] fp32 rounded to `dtype`, NaN in the one form of that format."""
    rounded = values.to(dtype).view(_INTEGERS[dtype])
    return torch.where(values != values, _NAN_BITS[dtype], rounded).view(dtype)


def encode(values: Tensor, codec: int) -> Tensor:
    """Codes [n] of `values` [n] fp32, in the codec's own dtype."""
    return round_to(values, CODE_DTYPES[codec])


def decode(codes: Tensor) -> Tensor:
    """Values [n] fp32 of `codes` [n]; exact."""
    return codes.float()


def sum_of_squares_by_tile(values: Tensor) -> Tensor:
    """Sums of squares [num_tiles] fp64 of `values` [n], one per TILE_ELEMENTS of them."""
    num_tiles = -(-values.numel() // TILE_ELEMENTS)
    squares = values.new_zeros(num_tiles * TILE_ELEMENTS, dtype=torch.float64)
    squares[: values.numel()] = values.double().square()
    lanes = squares.view(num_tiles, TILE_ELEMENTS // LANES, LANES).sum(1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def pack(
    layout: Layout,
    gradients: Sequence[Tensor | None],
    payload: Tensor,
    scale: float,
    counters: Tensor | None = None,
    options: EncodeOptions = NEAREST,
) -> None:
    """Writes every byte of the payload of `gradients`.

    Args:
        layout: where each byte lies.
        gradients: one per segment, dense and real; None: this rank did not use the parameter (zeros, flag 0).
        payload [layout.payload_bytes] uint8: written.
        scale: multiplies each gradient in fp32.
        counters [2] int64: adds the elements that are not zero, and those of them whose code is zero; codecs without a scale.
        options: residuals, rounding, sums of errors.
    """
    flat = [None if g is None else memory_order(g) for g in gradients]
    payload.zero_()
    with default_float_mode(payload.device):
        factor = torch.tensor(scale, dtype=torch.float32)
        for share, first_tile in _with_tiles(layout.shares):
            chunk = payload[share.chunk * layout.chunk_bytes :][: layout.chunk_bytes]
            if share.kind == KIND_FLAGS:
                _area(chunk, share).copy_(torch.tensor([float(g is not None) for g in gradients]))
            elif share.kind != KIND_PADDING:
                gradient = flat[share.segment]
                if gradient is not None:
                    elements = gradient[share.element : share.element + share.numel]
                    residual = _residual(options, share, share.element)
                    encode_share(chunk, share, elements.float() * factor, residual, options, first_tile)
                    if counters is not None and share.kind in CODE_DTYPES:
                        nonzero = elements != 0
                        counters += torch.stack([nonzero.sum(), (nonzero & (_area(chunk, share) == 0)).sum()])


def reduce(
    layout: Layout,
    chunk: int,
    payloads: Sequence[Tensor],
    out: Tensor,
    scale: float,
    options: EncodeOptions = NEAREST,
    uncompressed: bool = False,
) -> None:
    """Writes every byte of one chunk, or of a shard: the sum over ranks, in rank order, times `scale`.

    Args:
        layout: where each byte lies.
        chunk: which chunk of the layout.
        payloads: [layout.chunk_bytes] uint8 of each rank.
        out [layout.chunk_bytes] uint8: written.
        scale: multiplies the sum in fp32.
        options: residuals of the elements of this chunk, rounding, sums of errors.
        uncompressed: instead of one chunk, the shard that begins with it: H = layout.chunks_per_shard chunks one after the other.
            Payloads are [H * layout.uncompressed.chunk_bytes], in the places of that layout; out is [H * layout.chunk_bytes].
    """
    out.zero_()
    sent = layout.uncompressed if uncompressed else layout
    count = layout.chunks_per_shard if uncompressed else 1
    held = layout.held(chunk, is_shard=uncompressed)
    pairs = zip(_with_tiles(layout.shares_of_chunks(chunk, count)), sent.shares_of_chunks(chunk, count), strict=True)
    with default_float_mode(out.device):
        factor = torch.tensor(scale, dtype=torch.float32)
        used = torch.empty(0)
        for (share, first_tile), sent_share in pairs:
            idx = share.chunk - chunk
            sent_chunks = [payload[idx * sent.chunk_bytes :][: sent.chunk_bytes] for payload in payloads]
            out_chunk = out[idx * layout.chunk_bytes :][: layout.chunk_bytes]
            if share.kind == KIND_FLAGS:
                flags = [_area(sent_chunk, sent_share) for sent_chunk in sent_chunks]
                used = torch.stack([flag.view(_INTEGERS.get(flag.dtype, flag.dtype)) != 0 for flag in flags]).any(0)
                _area(out_chunk, share).copy_(used)
            elif share.kind != KIND_PADDING and (options.residuals is None or used[share.segment]):
                # With a residual, a parameter that no rank used stays zero and the reducer keeps what it has.
                total = decode_share(sent_chunks[0], sent_share)
                for sent_chunk in sent_chunks[1:]:
                    total = total + decode_share(sent_chunk, sent_share)
                residual = _residual(options, share, share.element - held[share.segment][0])
                encode_share(out_chunk, share, total * factor, residual, options, first_tile)


def unpack(
    layout: Layout,
    payload: Tensor,
    gradients: Sequence[Tensor | None],
    partials: Tensor,
    found_nonfinite: Tensor,
    sum_of_squares: Tensor | None,
) -> None:
    """Writes the gradients of a payload, and what was found in them.

    Args:
        layout: where each byte lies.
        payload [layout.payload_bytes] uint8: read.
        gradients: one per segment, dense and real, written in place; None: decoded for the sums only.
        partials [layout.num_partials] fp64: sums of squares of this slice's tiles, of the values as written.
        found_nonfinite [1] int32: set to 1 if a value written is Inf or NaN; never cleared.
        sum_of_squares [num_segments] fp64: partials added up; None for all slices of a bucket but its last.
    """
    flat = [None if g is None else memory_order(g) for g in gradients]
    with default_float_mode(payload.device):
        for share in layout.shares:
            if share.segment < 0:
                continue
            chunk = payload[share.chunk * layout.chunk_bytes :][: layout.chunk_bytes]
            values = round_to(decode_share(chunk, share), _DTYPES[share.dtype])
            gradient = flat[share.segment]
            if gradient is not None:
                gradient[share.element : share.element + share.numel] = values
            sums = sum_of_squares_by_tile(values)
            partials[share.first_partial : share.first_partial + sums.numel()] = sums
            found_nonfinite |= ~values.isfinite().all()
        if sum_of_squares is not None:
            for i, (begin, end) in enumerate(layout.partials):
                sum_of_squares[i] = partials[begin:end].sum()


def encode_share(
    chunk: Tensor, share: Share, values: Tensor, residual: Tensor | None, options: EncodeOptions, first_tile: int
) -> None:
    """Writes scales and codes of a share to its chunk, and what encoding lost to `residual` and the sums of errors.

    Args:
        chunk [layout.chunk_bytes] uint8: written in part; the padding must be zero already.
        share: which part.
        values [share.numel] fp32: what to encode, but for the residual.
        residual [share.numel] fp32: added and replaced; may be None.
        options: rounding, sums of errors.
        first_tile: row of the share's first tile in the sums of errors.
    """
    x = values if residual is None else values + residual
    words = None
    if options.random_key is not None:
        words = block.random_words(options.random_key, share.name_hash, share.element, share.numel, x.device)
    if share.kind in SCALE_BYTES:
        padded = None if words is None else block.as_blocks(words, share.block_size)
        codes, scales = block.encode_blocks(block.as_blocks(x, share.block_size), share.kind, padded)
        block.write_blocks(chunk, share, codes, scales)
    else:
        dtype = CODE_DTYPES[share.kind]
        _area(chunk, share).copy_(round_to(x if words is None else block.round_up_or_down(x, dtype, words).float(), dtype))
    decoded = decode_share(chunk, share)
    finite = decoded.isfinite()
    if residual is not None:
        residual.copy_(torch.where(finite, x - decoded, residual))
    if options.error_sums is not None:
        lost, nonzero = torch.where(finite, x - decoded, 0.0), finite & (x != 0)
        columns = [sum_of_squares_by_tile(lost), sum_of_squares_by_tile(torch.where(finite, x, 0.0))]
        columns += [sum_of_squares_by_tile(count.float()) for count in (nonzero, nonzero & (decoded == 0))]
        options.error_sums[first_tile : first_tile + len(columns[0])] += torch.stack(columns, 1)


def decode_share(chunk: Tensor, share: Share) -> Tensor:
    """Values [share.numel] fp32 of a share in its chunk."""
    if share.kind in SCALE_BYTES:
        return block.decode_blocks(*block.read_blocks(chunk, share), share.kind).view(-1)[: share.numel]
    return decode(_area(chunk, share))


def _residual(options: EncodeOptions, share: Share, first: int) -> Tensor | None:
    residual = None if options.residuals is None else options.residuals[share.segment]
    return None if residual is None else residual.view(-1)[first : first + share.numel]


def _with_tiles(shares: Sequence[Share]) -> Iterator[tuple[Share, int]]:
    """Each share with the number of tiles before it."""
    num_tiles = 0
    for share in shares:
        yield share, num_tiles
        num_tiles += -(-share.numel // TILE_ELEMENTS)


def memory_order(tensor: Tensor) -> Tensor:
    """A flat view [numel] of a dense tensor, its elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


@contextlib.contextmanager
def default_float_mode(device: torch.device) -> Iterator[None]:
    """While it lasts, the calling thread keeps subnormal numbers; only CPUs have such a mode.

    Where the caller flushes them, torch's worker threads may too, and cannot be told otherwise: everything stays on this thread.
    """
    flushes = device.type == "cpu" and float(torch.tensor(1e-40) * 1.0) == 0.0
    if not flushes:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_flush_denormal(True)


def _area(chunk: Tensor, share: Share) -> Tensor:
    """The codes (or flags, or padding) of a share in its chunk, in their own dtype."""
    kind = share.flag_kind if share.kind == KIND_FLAGS and share.flag_kind != BYTE_FLAGS else share.kind
    dtype = CODE_DTYPES.get(kind, torch.uint8)
    num_bytes = share.numel * dtype.itemsize
    return chunk[share.codes_offset : share.codes_offset + num_bytes].view(dtype)

"""Where each byte of a payload lies: the Python twin of csrc/common/layout.h (prose in docs/wire_format.md).

A parameter of n blocks is owned by all ranks together: with r = (chunk - name_hash) mod num_chunks, chunk ``chunk`` holds its
blocks floor(n*r/num_chunks) .. floor(n*(r+1)/num_chunks)-1. Chunk c of a bucket is the concatenation of those shares, padded to
the largest chunk. Chunks may form shards of H = num_chunks/num_shards each, of which every one holds consecutive blocks of a
parameter: chunk g*H + h then has r = ((g - name_hash) mod num_shards)*H + ((h - floor(name_hash/num_shards)) mod H).

A slice is a run of tiles of every chunk. One chunk of a slice is: flags, scales share by share, codes share by share, padding,
every area padded with zeros to 16 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch

TILE_ELEMENTS = 4096
PAYLOAD_ALIGNMENT = 16
ELEMENTWISE_BLOCK = 256

# Numbers of the enums Kind and Dtype in csrc/common/plan.h.
CODEC_KINDS = {"fp32": 0, "fp16": 1, "bf16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5, "int4": 6}
KIND_FLAGS, KIND_PADDING = 14, 15
CODE_BYTES = {0: 4, 1: 2, 2: 2}  # of the codecs without a scale
BLOCK_SIZES = {3: 256, 4: 256, 5: 256, 6: 64}  # of the codecs with one, unless another is asked for
SCALE_BYTES = {3: 4, 4: 4, 5: 4, 6: 2}
MIN_BLOCK, MAX_BLOCK = 32, TILE_ELEMENTS
BYTE_FLAGS = 255
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}

_SHARE = struct.Struct("<qqqqqQiiiBBBB")


@dataclasses.dataclass(frozen=True)
class Segment:
    """One parameter's place in a bucket.

    Args:
        numel: elements (a complex one counts as two).
        dtype: number from `DTYPE_CODES`.
        codec: number from `CODEC_KINDS`.
        name_hash: `hash64` of the parameter's name.
        block_size: elements that share a scale; 0: the codec's own, and the only choice for codecs without a scale.
    """

    numel: int
    dtype: int
    codec: int
    name_hash: int
    block_size: int = 0

    @property
    def block(self) -> int:
        """Elements of one block; ownership is counted in blocks."""
        return self.block_size or BLOCK_SIZES.get(self.codec, ELEMENTWISE_BLOCK)


@dataclasses.dataclass(frozen=True)
class Share:
    """Consecutive elements of one segment that lie in one chunk; or the flags, or the padding, of a chunk."""

    element: int
    numel: int
    codes_offset: int
    scales_offset: int
    first_partial: int
    name_hash: int
    segment: int
    chunk: int
    block_size: int
    kind: int
    dtype: int
    flag_kind: int
    scales_padding: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of one slice of a bucket; fields as in csrc/common/layout.h."""

    shares: tuple[Share, ...]
    chunk_first_tile: tuple[int, ...]
    chunk_first_share: tuple[int, ...]
    partials: tuple[tuple[int, int], ...]
    num_segments: int
    num_chunks: int
    chunk_bytes: int
    num_partials: int
    segments: tuple[Segment, ...]
    num_shards: int = 1

    @property
    def payload_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    @property
    def num_tiles(self) -> int:
        return self.chunk_first_tile[-1]

    @property
    def has_scales(self) -> bool:
        """Whether a segment has a block codec."""
        return any(segment.codec in BLOCK_SIZES for segment in self.segments)

    @property
    def chunks_per_shard(self) -> int:
        return self.num_chunks // self.num_shards

    def held(self, chunk: int, is_shard: bool = False) -> list[tuple[int, int]]:
        """For each segment, first element and numel of what the chunk of the whole bucket holds, or the shard it begins."""
        if is_shard:
            shard = chunk // self.chunks_per_shard
            return [shard_of(segment, shard, self.num_shards) for segment in self.segments]
        return [share_of(segment, chunk, self.num_chunks, self.num_shards) for segment in self.segments]

    def shares_of_chunks(self, chunk: int, count: int = 1) -> tuple[Share, ...]:
        """The shares of `count` chunks from `chunk` on, in the order of their bytes."""
        return self.shares[self.chunk_first_share[chunk] : self.chunk_first_share[chunk + count]]

    @functools.cached_property
    def uncompressed(self) -> Layout:
        """The same slice with its elements as fp32: shares have the same numbers, elements and flags, but other places."""
        plain = {"kind": CODEC_KINDS["fp32"], "scales_offset": 0, "scales_padding": 0}
        shares = [dataclasses.replace(share, **plain) if share.segment >= 0 else share for share in self.shares]
        begins = zip(self.chunk_first_share, self.chunk_first_share[1:], strict=False)
        return dataclasses.replace(self, **_place([shares[begin:end] for begin, end in begins], self.num_segments))

    def share_table(self) -> torch.Tensor:
        """The shares as kernels read them: [num_shares, 8] int64 on the CPU, 64 bytes a share."""
        table = bytearray(b"".join(_SHARE.pack(*dataclasses.astuple(share)) for share in self.shares))
        if not table:
            return torch.empty(0, 8, dtype=torch.int64)
        return torch.frombuffer(table, dtype=torch.int64).view(-1, 8)

    def tile_table(self) -> torch.Tensor:
        """The tiles as kernels read them: [num_tiles, 2] int32 on the CPU, (share, index in the share)."""
        counts = torch.tensor([_ceil_div(share.numel, TILE_ELEMENTS) for share in self.shares], dtype=torch.int64)
        share_idx = torch.repeat_interleave(torch.arange(len(self.shares)), counts)
        first = torch.cumsum(counts, 0) - counts
        index = torch.arange(share_idx.numel()) - first[share_idx]
        return torch.stack([share_idx, index], dim=1).to(torch.int32)

    def partial_table(self) -> torch.Tensor:
        """Where the sums of each segment lie: [num_segments, 2] int64 on the CPU, (begin, end)."""
        return torch.tensor(self.partials, dtype=torch.int64).view(-1, 2)


def hash64(name: str) -> int:
    """FNV-1a, 64 bits, of the UTF-8 bytes of a parameter's name."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def codes_bytes(kind: int, numel: int) -> int:
    """Bytes of the codes of `numel` elements, without padding."""
    if kind == CODEC_KINDS["int4"]:
        return _ceil_div(numel, 2)
    return numel * CODE_BYTES.get(kind, 1)


def share_of(segment: Segment, chunk: int, num_chunks: int, num_shards: int = 1) -> tuple[int, int]:
    """First element and numel of what chunk `chunk` of the bucket holds of a segment: what one rank reduces."""
    return _part(segment, _part_idx(segment, chunk, num_chunks, num_shards), num_chunks)


def shard_of(segment: Segment, shard: int, num_shards: int) -> tuple[int, int]:
    """First element and numel of what the chunks of shard `shard` of the bucket hold of a segment together."""
    return _part(segment, (shard - segment.name_hash) % num_shards, num_shards)


def build_layout(
    segments: Sequence[Segment], num_chunks: int, slice_idx: int = 0, num_slices: int = 1, num_shards: int = 1
) -> Layout:
    """The layout of one slice of a bucket.

    Args:
        segments: the parameters, in the bucket's order.
        num_chunks: ranks that share the reduction, at least 1.
        slice_idx: which slice, from 0.
        num_slices: slices the bucket is cut into, at least 1.
        num_shards: into how many runs of chunks, a divisor of num_chunks.

    Raises:
        ValueError: num_chunks < 1, num_slices < 1, slice_idx out of range, negative numel, unknown codec or dtype, num_shards
            does not divide num_chunks, a block_size that is not a power of two from MIN_BLOCK to MAX_BLOCK.
    """
    _check(segments, num_chunks, slice_idx, num_slices, num_shards)
    # 1. Partial sums, in the order of the elements of the whole bucket.
    partials: list[tuple[int, int]] = []
    first_partial: list[list[int]] = []
    num_partials = 0
    for segment in segments:
        begin, firsts = num_partials, []
        for r in range(num_chunks):
            firsts.append(num_partials)
            num_partials += _ceil_div(_part(segment, r, num_chunks)[1], TILE_ELEMENTS)
        first_partial.append(firsts)
        partials.append((begin, num_partials))

    # 2. The shares of every chunk that fall into this slice: flags, codes, padding.
    codecs = {segment.codec for segment in segments}
    flag_kind = codecs.pop() if len(codecs) == 1 and codecs <= CODE_BYTES.keys() else BYTE_FLAGS
    flag_bytes = CODE_BYTES.get(flag_kind, 1)
    chunks: list[list[Share]] = []
    for chunk in range(num_chunks):
        shares: list[Share] = []
        chunks.append(shares)
        if not segments:
            continue
        shares.append(Share(0, len(segments), 0, 0, 0, 0, -1, chunk, flag_bytes, KIND_FLAGS, 0, flag_kind))
        parts = []
        for segment in segments:
            r = _part_idx(segment, chunk, num_chunks, num_shards)
            parts.append((r, *_part(segment, r, num_chunks)))
        chunk_tiles = sum(_ceil_div(numel, TILE_ELEMENTS) for _, _, numel in parts)
        slice_begin = chunk_tiles * slice_idx // num_slices
        slice_end = chunk_tiles * (slice_idx + 1) // num_slices
        tile = 0  # of the chunk, before it is cut into slices
        for i, (segment, (r, element, numel)) in enumerate(zip(segments, parts, strict=True)):
            num_tiles = _ceil_div(numel, TILE_ELEMENTS)
            first = min(max(slice_begin - tile, 0), num_tiles)
            last = min(max(slice_end - tile, 0), num_tiles)
            tile += num_tiles
            if first == last:
                continue
            share = Share(
                element=element + first * TILE_ELEMENTS,
                numel=min(numel, last * TILE_ELEMENTS) - first * TILE_ELEMENTS,
                codes_offset=0,
                scales_offset=0,
                first_partial=first_partial[i][r] + first,
                name_hash=segment.name_hash,
                segment=i,
                chunk=chunk,
                block_size=segment.block,
                kind=segment.codec,
                dtype=segment.dtype,
                flag_kind=0,
            )
            shares.append(share)
        shares.append(Share(0, 0, 0, 0, 0, 0, -1, chunk, 1, KIND_PADDING, 0, 0))
    return Layout(
        partials=tuple(partials),
        num_segments=len(segments),
        num_chunks=num_chunks,
        num_partials=num_partials,
        segments=tuple(segments),
        num_shards=num_shards,
        **_place(chunks, len(segments)),
    )


def _place(chunks: list[list[Share]], num_segments: int) -> dict[str, Any]:
    """The fields of a layout that follow from its shares: their places, padding to the largest chunk, tiles.

    Args:
        chunks: the shares of each: flags, codes in segment order, padding. Changed.
    """
    chunk_bytes = 0
    for shares in filter(None, chunks):
        offset = _align(num_segments * shares[0].block_size)
        last_with_scales = None
        for i, share in enumerate(shares):
            if share.kind in SCALE_BYTES:
                num_bytes = _ceil_div(share.numel, share.block_size) * SCALE_BYTES[share.kind]
                padding = -num_bytes % 4
                shares[i] = dataclasses.replace(share, scales_offset=offset, scales_padding=padding)
                offset += num_bytes + padding
                last_with_scales = i
        if last_with_scales is not None:
            share = shares[last_with_scales]
            padding = share.scales_padding + _align(offset) - offset
            shares[last_with_scales] = dataclasses.replace(share, scales_padding=padding)
            offset = _align(offset)
        for i, share in enumerate(shares):
            if share.segment >= 0:
                shares[i] = dataclasses.replace(share, codes_offset=offset)
                offset += _align(codes_bytes(share.kind, share.numel))
        shares[-1] = dataclasses.replace(shares[-1], codes_offset=offset)
        chunk_bytes = max(chunk_bytes, offset)
    chunk_first_tile, chunk_first_share = [0], [0]
    for shares in chunks:
        if shares:
            shares[-1] = dataclasses.replace(shares[-1], numel=chunk_bytes - shares[-1].codes_offset)
        num_tiles = sum(_ceil_div(share.numel, TILE_ELEMENTS) for share in shares)
        chunk_first_tile.append(chunk_first_tile[-1] + num_tiles)
        chunk_first_share.append(chunk_first_share[-1] + len(shares))
    return {
        "shares": tuple(share for shares in chunks for share in shares),
        "chunk_first_tile": tuple(chunk_first_tile),
        "chunk_first_share": tuple(chunk_first_share),
        "chunk_bytes": chunk_bytes,
    }


def _check(segments: Sequence[Segment], num_chunks: int, slice_idx: int, num_slices: int, num_shards: int) -> None:
    if num_chunks < 1:
        raise ValueError(f"layout: num_chunks is {num_chunks}, expected at least 1")
    if num_shards < 1 or num_chunks % num_shards:
        raise ValueError(f"layout: num_shards is {num_shards}, expected a divisor of num_chunks, {num_chunks}")
    if num_slices < 1:
        raise ValueError(f"layout: num_slices is {num_slices}, expected at least 1")
    if not 0 <= slice_idx < num_slices:
        raise ValueError(f"layout: slice_idx is {slice_idx}, expected 0 to {num_slices - 1}")
    for i, segment in enumerate(segments):
        if segment.numel < 0:
            raise ValueError(f"layout: numels[{i}] is {segment.numel}, expected 0 or more")
        if segment.codec not in CODEC_KINDS.values():
            known = ", ".join(f"{kind} ({codec})" for codec, kind in CODEC_KINDS.items())
            raise ValueError(f"layout: codecs[{i}] is {segment.codec}, expected {known}")
        size = segment.block_size
        if size and segment.codec in CODE_BYTES:
            raise ValueError(f"layout: block_sizes[{i}] is {size}, expected 0 with a codec that has no scale")
        if size and not (MIN_BLOCK <= size <= MAX_BLOCK and size & (size - 1) == 0):
            raise ValueError(f"layout: block_sizes[{i}] is {size}, expected 0 or a power of two from {MIN_BLOCK} to {MAX_BLOCK}")
        if not 0 <= segment.dtype <= 3:
            raise ValueError(f"layout: dtypes[{i}] is {segment.dtype}, expected 0 (fp32), 1 (fp16), 2 (bf16) or 3 (fp64)")


def _part_idx(segment: Segment, chunk: int, num_chunks: int, num_shards: int) -> int:
    """Which of the num_chunks parts of a segment chunk `chunk` holds."""
    shard, place = divmod(chunk, num_chunks // num_shards)
    per_shard = num_chunks // num_shards
    return (shard - segment.name_hash) % num_shards * per_shard + (place - segment.name_hash // num_shards) % per_shard


def _part(segment: Segment, r: int, num_chunks: int) -> tuple[int, int]:
    """First element and numel of part r of a segment."""
    num_blocks = _ceil_div(segment.numel, segment.block)
    begin = num_blocks * r // num_chunks * segment.block
    end = num_blocks * (r + 1) // num_chunks * segment.block
    return begin, max(min(end, segment.numel) - begin, 0)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _align(num_bytes: int) -> int:
    return _ceil_div(num_bytes, PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT

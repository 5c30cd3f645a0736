"""Buckets for the tests of codecs with a scale: random cases, run on one backend and on the reference, compared bit by bit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from ops_cases import same_bits
from torch import Tensor

from gsync import backends
from gsync.encoding import EncodeOptions, random_key
from gsync.layout import BLOCK_SIZES, CODEC_KINDS, DTYPE_CODES, Segment, hash64, shard_of, share_of

BLOCK_CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
SIZES = (0, 1, 31, 63, 64, 65, 255, 256, 257, 1009, 4095, 4096, 4097, 9001)
DTYPES = tuple(DTYPE_CODES)
# The borders of a zero block, of fp32 and of fp16; Inf and NaN spoil their block, so they are strewn thinly.
SPECIAL_VALUES = (
    0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1e-40, 1.2e-38, 3.4028234663852886e38,
    -3.4028234663852886e38, 2.0**-80, 2.0**-81, 1.5 * 2.0**-80, 65504.0, 65520.0, 7e4, 3.39e38,
)  # fmt: skip
STEPS = 2
RANKS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One bucket and how it is encoded.

    Args:
        segments: (numel, dtype, codec) of each.
        block_size: of the codecs that have one; 0: their own.
        shards: above 1: pack as fp32, then let `reduce` encode each shard, of chunks / shards chunks.
        slices: number of slices the bucket is cut into.
    """

    segments: tuple[tuple[int, torch.dtype, str], ...]
    block_size: int = 0
    chunks: int = 1
    shards: int = 1
    slices: int = 1
    residuals: bool = True
    stochastic: bool = False
    sums: bool = False
    scale: float = 1 / 3
    seed: int = 0

    def layout_segments(self) -> list[Segment]:
        found = []
        for i, (numel, dtype, codec) in enumerate(self.segments):
            kind = CODEC_KINDS[codec]
            size = self.block_size if kind in BLOCK_SIZES else 0
            found.append(Segment(numel, DTYPE_CODES[dtype], kind, hash64(f"layers.{i}.weight"), size))
        return found


def random_case(seed: int, largest: int = 9001) -> Case:
    """A case that depends on `seed` alone."""
    rng = random.Random(seed)
    sizes = [size for size in SIZES if size <= largest]
    one_codec = rng.choice(BLOCK_CODECS) if rng.random() < 0.5 else None
    segments = tuple(
        (rng.choice(sizes), rng.choice(DTYPES), one_codec or rng.choice(list(CODEC_KINDS))) for _ in range(rng.randrange(1, 6))
    )
    chunks, shards = rng.choice(((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (3, 3), (6, 2)))
    return Case(
        segments,
        block_size=rng.choice((0, 0, 32, 64, 256, 512, 1024, 4096)),
        chunks=chunks,
        shards=shards,
        slices=rng.choice((1, 1, 2)),
        residuals=rng.random() < 0.6,
        stochastic=rng.random() < 0.5,
        sums=rng.random() < 0.5,
        seed=seed,
    )


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values over six powers of ten, special ones in between, and a stretch of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, dtype=torch.float64, generator=generator)
    x *= 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    for _ in range(-(-numel // 700)):
        where = int(torch.randint(0, numel, (1,), generator=generator))
        x[where] = SPECIAL_VALUES[int(torch.randint(0, len(SPECIAL_VALUES), (1,), generator=generator))]
    if numel > 600:
        x[256:512] = 0.0
        x[300] = 1e-30
    return x.to(dtype)


def memory(num_bytes: int) -> Tensor:
    """`num_bytes` bytes of 0xEE that begin at a multiple of 16 bytes."""
    room = torch.full((num_bytes + 16,), 0xEE, dtype=torch.uint8)
    return room[-room.data_ptr() % 16 :][:num_bytes]


class Side:
    """A backend with its own residuals, driven over the steps of a case."""

    def __init__(self, backend: Any, case: Case) -> None:
        self.backend, self.case, self.table = backend, case, case.layout_segments()
        # Without shards a sender encodes all of its gradients, with shards one shard of a host's sum.
        self.sent = [[torch.zeros(s.numel) for s in self.table] for _ in range(RANKS)]
        if case.shards > 1:
            self.sent = [[torch.zeros(shard_of(s, i, case.shards)[1]) for s in self.table] for i in range(case.shards)]
        held = [[share_of(s, chunk, case.chunks, case.shards)[1] for s in self.table] for chunk in range(case.chunks)]
        self.reduced = [[torch.zeros(numel) for numel in numels] for numels in held]

    def options(self, residuals: list[Tensor], tiles: int, step: int, stage: str, rank: int) -> EncodeOptions:
        sums = torch.zeros(tiles, 4, dtype=torch.float64) if self.case.sums else None
        key = random_key(self.case.seed, step, stage, rank) if self.case.stochastic else None
        return EncodeOptions(residuals if self.case.residuals else None, key, sums)

    def run(self, step: int, slice_idx: int) -> list[Tensor]:
        """One slice of one step: everything that came out."""
        case, out = self.case, []
        layout = backends.BucketLayout(self.table, case.chunks, slice_idx, case.slices, case.shards)
        sent_layout = layout.uncompressed if case.shards > 1 else layout
        table, sent_table = layout.python, sent_layout.python
        payloads = []
        for rank in range(RANKS):
            gradients = [
                values(s.numel, dtype, 100 * step + 10 * rank + i + 1000 * case.seed) if (i + rank + step) % 5 else None
                for i, (s, (_, dtype, _)) in enumerate(zip(self.table, case.segments, strict=True))
            ]
            payload, counters = memory(sent_table.payload_bytes), torch.zeros(2, dtype=torch.int64)
            if case.shards > 1:
                self.backend.pack(sent_layout, gradients, payload, case.scale)
            else:
                options = self.options(self.sent[rank], table.num_tiles, step, "pack", rank)
                self.backend.pack(layout, gradients, payload, case.scale, counters, options)
                out += [counters, *self.sent[rank], *self._sums(options)]
            out.append(payload)
            payloads.append(payload)
        if case.shards > 1:
            payloads = [self._encode_shards(layout, payloads, step, out)] * RANKS  # as if the hosts were alike
        whole = memory(table.payload_bytes)
        for chunk in range(case.chunks):
            area = slice(chunk * table.chunk_bytes, (chunk + 1) * table.chunk_bytes)
            first, last = table.chunk_first_tile[chunk : chunk + 2]
            options = self.options(self.reduced[chunk], last - first, step, "reduce", 0)
            result = memory(table.chunk_bytes)
            sent = [memory(table.chunk_bytes).copy_(payload[area]) for payload in payloads]
            self.backend.reduce(layout, chunk, sent, result, 1.0, options)
            whole[area] = result
            out += [result, *self.reduced[chunk], *self._sums(options)]
        gradients = [
            torch.full((s.numel,), -1.0, dtype=dtype) for s, (_, dtype, _) in zip(self.table, case.segments, strict=True)
        ]
        partials, found = torch.zeros(table.num_partials, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
        self.backend.unpack(layout, whole, gradients, partials, found, None)
        return [tensor.clone() for tensor in [*out, *gradients, found, partials.nan_to_num(-1.0, -1.0, -1.0)]]

    def _encode_shards(self, layout: backends.BucketLayout, payloads: list[Tensor], step: int, out: list[Tensor]) -> Tensor:
        """The sum of payloads that are not compressed, encoded by the owners of the shards."""
        table, sent_table = layout.python, layout.uncompressed.python
        count = table.chunks_per_shard
        encoded = memory(table.payload_bytes)
        for shard in range(self.case.shards):
            chunk = shard * count
            num_tiles = table.chunk_first_tile[chunk + count] - table.chunk_first_tile[chunk]
            options = self.options(self.sent[shard], num_tiles, step, "pack", shard)
            num_bytes = count * sent_table.chunk_bytes
            sent = [memory(num_bytes).copy_(payload[shard * num_bytes :][:num_bytes]) for payload in payloads]
            result = memory(count * table.chunk_bytes)
            self.backend.reduce(layout, chunk, sent, result, 1.0, options, uncompressed=True)
            encoded[chunk * table.chunk_bytes :][: result.numel()] = result
            out += [result, *self.sent[shard], *self._sums(options)]
        return encoded

    def _sums(self, options: EncodeOptions) -> list[Tensor]:
        return [] if options.error_sums is None else [options.error_sums]


def compare(backend: Any, case: Case) -> None:
    """Everything that the backend writes, residuals too, has the reference's bits; sums of squares are close."""
    sides = [Side(which, case) for which in (backends.ReferenceBackend(), backend)]
    for step in range(STEPS):
        for slice_idx in range(case.slices):
            expected, got = (side.run(step, slice_idx) for side in sides)
            for i, (a, b) in enumerate(zip(expected, got, strict=True)):
                if (a.dtype == torch.float64 and a.dim() != 1) or a is expected[-1]:
                    torch.testing.assert_close(b, a, rtol=1e-12, atol=0)
                else:
                    assert same_bits(a, b), f"output {i} of step {step}, slice {slice_idx} of {case}"


def round_trip(x: Tensor, codec: str, **options: Any) -> Tensor:
    """x packed and unpacked, by the reference's rules, fp32."""
    from gsync import ops

    back = torch.empty_like(x)
    sizes = {key: options[key] for key in ("block_size", "backend") if key in options}
    ops.unpack(ops.pack([x], codec, **options), [back], codec, **sizes)
    return back


__all__ = ["BLOCK_CODECS", "Case", "compare", "random_case", "round_trip", "values"]

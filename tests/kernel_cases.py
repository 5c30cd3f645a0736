"""Runs pack, reduce and unpack of one backend on one device and compares every byte with gsync/reference.py on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gsync import reference
from gsync.backends import BucketLayout
from gsync.layout import CODEC_KINDS, DTYPE_CODES, Segment, hash64

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CODECS = ("fp32", "fp16", "bf16")
# Around vectors of 4 and 8 elements, blocks of 256 and tiles of 4096; a prime; nothing.
NUMELS = (0, 1, 3, 4, 5, 7, 8, 9, 255, 256, 257, 4095, 4096, 4097, 5003)
NUM_RANKS = 3
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}

# Zeros, Inf, NaN, subnormal numbers of fp32 and fp16, ties of bf16 and fp16, and the borders of fp16's range.
SPECIAL_VALUES = (
    0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1e-40, 1.17549435e-38, 2.98e-8, 2.9802322e-8, 2.99e-8,
    5.96e-8, 6.09e-5, 6.1e-5, 65504.0, 65519.996, 65520.0, 7e4, 3.3895314e38, 3.39e38, 3.4028235e38, 1.00390625, 1.01171875,
    -1.00390625, 1.0004883, 1.0014648,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One bucket and how its gradients lie in memory.

    Args:
        unused: segments whose gradient is None.
        misaligned: every other gradient begins one element after a multiple of 16 bytes.
        finite: neither Inf nor NaN, so that sums of squares can be compared.
    """

    numels: Sequence[int]
    dtypes: Sequence[torch.dtype]
    codecs: Sequence[str]
    num_chunks: int = 1
    num_slices: int = 1
    unused: Sequence[int] = ()
    misaligned: bool = False
    finite: bool = False
    scale: float = 1 / 3

    def segments(self) -> list[Segment]:
        columns = zip(self.numels, self.dtypes, self.codecs, strict=True)
        return [Segment(n, DTYPE_CODES[d], CODEC_KINDS[c], hash64(f"layer.{i}")) for i, (n, d, c) in enumerate(columns)]


def values(numel: int, dtype: torch.dtype, seed: int, finite: bool) -> Tensor:
    """`numel` values on the CPU over 18 powers of ten, with the special ones strewn in."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, dtype=torch.float64, generator=generator)
    x *= 10.0 ** torch.randint(-12, 3 if finite else 6, (numel,), generator=generator).double()
    if not finite:
        special = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)[torch.randperm(len(SPECIAL_VALUES), generator=generator)]
        where = torch.randperm(numel, generator=generator)[: len(special)]
        x[where] = special[: len(where)]
    return x.to(dtype)


def place(source: Tensor, device: torch.device, offset: int) -> Tensor:
    """A copy of `source` on `device` that begins `offset` elements after a multiple of 16 bytes."""
    room = torch.zeros(source.numel() + 32, dtype=source.dtype, device=device)
    first = (-room.data_ptr() % 16) // room.element_size() + offset
    room[first : first + source.numel()].copy_(source)
    return room[first : first + source.numel()]


def payload_of(num_bytes: int, device: torch.device) -> Tensor:
    """`num_bytes` bytes of 0xEE that begin at a multiple of 16 bytes."""
    room = torch.full((num_bytes + 16,), 0xEE, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % 16
    return room[first : first + num_bytes]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS.get(tensor.dtype, tensor.dtype)).cpu()


def check(backend: Any, device: torch.device, case: Case) -> Tensor:
    """Compare the three operations with the reference; return the backend's sums of squares [num_segments] on the CPU."""
    cpu = torch.device("cpu")
    gradients = [
        None if i in case.unused else values(n, d, i, case.finite)
        for i, (n, d) in enumerate(zip(case.numels, case.dtypes, strict=True))
    ]
    offsets = [int(case.misaligned and i % 2 == 0) for i in range(len(gradients))]
    placed = [None if g is None else place(g, device, o) for g, o in zip(gradients, offsets, strict=True)]
    expected = [torch.zeros_like(values(n, d, 0, True)) for n, d in zip(case.numels, case.dtypes, strict=True)]
    written = [place(e, device, o) for e, o in zip(expected, offsets, strict=True)]
    layouts = [BucketLayout(case.segments(), case.num_chunks, i, case.num_slices) for i in range(case.num_slices)]
    oracle, mine = (_measures(layouts[0], where) for where in (cpu, device))
    for layout in layouts:
        _check_pack(backend, device, layout, case, gradients, placed)
        payload = _check_reduce(backend, device, layout, case)
        last = layout is layouts[-1]
        reference.unpack(layout.python, payload, expected, oracle[0], oracle[1], oracle[2] if last else None)
        backend.unpack(layout, payload_on(payload, device), written, mine[0], mine[1], mine[2] if last else None)
    for i, (want, got) in enumerate(zip(expected, written, strict=True)):
        assert torch.equal(bits(want), bits(got)), f"unpack: gradient {i} of {case}"
    assert torch.equal(oracle[1], mine[1].cpu()), f"found_nonfinite of {case}"
    # fp64 sums of at most 2^13 squares per segment in two orders: far below 1e-12.
    torch.testing.assert_close(mine[2].cpu(), oracle[2], rtol=1e-12, atol=0, equal_nan=True)
    return mine[2].cpu()


def _measures(layout: BucketLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """partials, found_nonfinite, sum_of_squares, as unpack wants them."""
    return (
        torch.full((layout.python.num_partials,), float("nan"), dtype=torch.float64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((len(layout.segments),), -1.0, dtype=torch.float64, device=device),
    )


def payload_on(payload: Tensor, device: torch.device) -> Tensor:
    copy = payload_of(payload.numel(), device)
    return copy.copy_(payload)


def _check_pack(
    backend: Any, device: torch.device, layout: BucketLayout, case: Case, gradients: list[Any], placed: list[Any]
) -> None:
    want = payload_of(layout.python.payload_bytes, torch.device("cpu"))
    got = payload_of(layout.python.payload_bytes, device)
    counts, counters = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64, device=device)
    reference.pack(layout.python, gradients, want, case.scale, counts)
    backend.pack(layout, placed, got, case.scale, counters)
    assert torch.equal(want, got.cpu()), f"pack: {case}"
    assert counts.tolist() == counters.tolist(), f"counters: {case}"
    got.fill_(0xEE)
    backend.pack(layout, placed, got, case.scale)
    assert torch.equal(want, got.cpu()), f"pack without counters: {case}"


def _check_reduce(backend: Any, device: torch.device, layout: BucketLayout, case: Case) -> Tensor:
    """Compare every chunk; return the payload of all reduced chunks on the CPU."""
    table = layout.python
    sent = []
    for rank in range(NUM_RANKS):
        columns = enumerate(zip(case.numels, case.dtypes, strict=True))
        # A parameter that only some ranks used, and one that none did.
        ranks_own = [
            None if i in case.unused and (rank > 0 or i % 2) else values(n, d, 100 * rank + i, case.finite)
            for i, (n, d) in columns
        ]
        sent.append(payload_of(table.payload_bytes, torch.device("cpu")))
        reference.pack(table, ranks_own, sent[-1], 1 / NUM_RANKS)
    reduced = payload_of(table.payload_bytes, torch.device("cpu"))
    for chunk in range(case.num_chunks):
        area = slice(chunk * table.chunk_bytes, (chunk + 1) * table.chunk_bytes)
        want = reduced[area]
        reference.reduce(table, chunk, [payload[area] for payload in sent], want, case.scale)
        got = payload_of(table.chunk_bytes, device)
        backend.reduce(layout, chunk, [payload_on(payload[area], device) for payload in sent], got, case.scale)
        assert torch.equal(want, got.cpu()), f"reduce: chunk {chunk} of {case}"
    return reduced

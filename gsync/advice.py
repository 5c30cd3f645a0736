"""Which codec and bucket size to try, from what was measured between the ranks (gsync/link.py): arithmetic, without a clock.

The time to synchronise S bytes of fp32 gradients that nothing hides, at W ranks:

    t = k S + n L + r f S / B        f = 2 (W-1)/W

with k the time of pack, reduce and unpack for a byte of gradients, n the collectives of the exchange, L the time of an empty one,
r payload over gradient bytes, and B the bytes that a rank sends in a second while all do. fp32 under stock DDP has k = 0, and
n = r = 1. So a codec pays where

    B < (1 - r) f / k
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN_BYTES = 25 * 2**20  # a bucket
_CLEAR = 0.9  # a codec has to take less than this share of the time of the one before it, or it is not worth its error
_LATENCY_SHARE = 0.05  # of a bucket's time, at most
_BUCKETS_MB = (1, 2, 4, 8, 16, 25, 50, 100)
COLLECTIVES = {"all_reduce": 1, "scatter_gather": 2}
FORMULA = "t = k S + n L + r f S / B,  f = 2 (W-1)/W"


@dataclass(frozen=True)
class Candidate:
    """A codec with an exchange, as measured.

    Attributes:
        codec, exchange: as in `SyncConfig`.
        encode_s_per_byte: k: time of pack, reduce and unpack over bytes of gradients.
        wire_share: r: payload over bytes of gradients.
    """

    codec: str
    exchange: str
    encode_s_per_byte: float
    wire_share: float


@dataclass(frozen=True)
class Link:
    """What moves bytes between the ranks.

    Attributes:
        world_size: ranks.
        latency_s: of a collective with next to nothing in it.
        bytes_per_s: sent by one rank while all of them do.
    """

    world_size: int
    latency_s: float
    bytes_per_s: float

    @property
    def factor(self) -> float:
        """f: times that each byte of a payload is sent by a rank, in all_reduce as in scatter_gather."""
        return 2.0 * (self.world_size - 1) / self.world_size


FP32 = Candidate("fp32", "all_reduce", 0.0, 1.0)  # stock DDP


def time_of(candidate: Candidate, link: Link, num_bytes: float) -> float:
    """t, in s, of `num_bytes` of gradients."""
    moved = candidate.wire_share * link.factor * num_bytes / link.bytes_per_s
    return candidate.encode_s_per_byte * num_bytes + COLLECTIVES[candidate.exchange] * link.latency_s + moved


def pays_below(candidate: Candidate, link: Link) -> float:
    """The B below which the codec is faster than fp32, in bytes/s; infinite where it costs nothing."""
    if candidate.encode_s_per_byte <= 0:
        return math.inf
    return (1 - candidate.wire_share) * link.factor / candidate.encode_s_per_byte


def choose(candidates: Sequence[Candidate], link: Link) -> Candidate:
    """The codec to try: candidates come in the order of their errors, and each must win clearly over the best before it."""
    best = FP32
    for candidate in candidates:
        if time_of(candidate, link, _SHOWN_BYTES) < _CLEAR * time_of(best, link, _SHOWN_BYTES):
            best = candidate
    return best


def bucket_mb(candidate: Candidate, link: Link) -> int:
    """The smallest usual bucket, in MiB, in which latency is at most 5 % of the time: more buckets hide more of the exchange."""
    latency_s = COLLECTIVES[candidate.exchange] * link.latency_s
    for size in _BUCKETS_MB:
        if latency_s <= _LATENCY_SHARE * time_of(candidate, link, size * 2**20):
            return size
    return _BUCKETS_MB[-1]


def lines(candidates: Sequence[Candidate], link: Link, where: str, took_s: float) -> list[str]:
    """The advice as text of 80 columns at most.

    Args:
        candidates: in the order of their errors.
        where: the transport and device that were measured.
    """
    stock = time_of(FP32, link, _SHOWN_BYTES)
    found = [
        f"measured   {link.world_size} ranks, {where}, in {took_s:.0f} s",
        f"           latency L {1e3 * link.latency_s:.2f} ms, B {link.bytes_per_s / 1e6:.0f} MB/s sent by each rank",
        f"           {FORMULA}",
        f"           {'':<22}{'k ns/B':>8}{'r':>8}{'t ms':>9}{'to fp32':>9}  pays below",
    ]
    for one in (FP32, *candidates):
        took = time_of(one, link, _SHOWN_BYTES)
        limit = pays_below(one, link)
        cells = f"{1e9 * one.encode_s_per_byte:>8.2f}{one.wire_share:>8.3f}{1e3 * took:>9.1f}{took / stock:>9.2f}"
        below = f"{limit / 1e6:>7.0f} MB/s" if math.isfinite(limit) else ""
        found.append(f"           {one.codec + ' ' + one.exchange:<22}{cells}{below}".rstrip())
    best = choose(candidates, link)
    size = bucket_mb(best, link)
    found.append(f"           t: {_SHOWN_BYTES // 2**20} MiB of gradients that nothing hides")
    if best is FP32:
        found.append(f"advice     stay with fp32: no codec is {1 - _CLEAR:.0%} faster here")
    else:
        feedback = ", error_feedback=True" if best.codec not in ("fp16", "bf16") else ""
        found.append(f'advice     try codec="{best.codec}", exchange="{best.exchange}"{feedback}')
    found.append(f"           and bucket_mb={size} (of DDP: bucket_cap_mb). gsync bench times a step")
    return found

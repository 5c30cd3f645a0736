"""`SyncStats`: what synchronisation cost since the last reset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_DERIVED = (
    "overlap_share",
    "bandwidth_mb_per_s",
    "queue_depth",
    "max_queue_depth",
    "arrival_spread_ms",
    "late_ms",
    "slowest_rank",
    "per_bucket",
    "relative_error",
    "relative_error_of_sums",
    "zeroed_share",
    "zeroed_share_of_sums",
    "residual_bytes",
    "choice",
)
_MIB = 2.0**20
_WIDTHS = (8, 8, 8, 9, 8, 13)  # of the table's columns
_SHOWN_BUCKETS = 12  # in the table; the others are in `per_bucket`


@dataclass
class BucketStats:
    """Totals of the buckets with one index since the last reset. DDP gives the indices to other parameters in its second step.

    Attributes:
        bucket: the index; buckets are handed over in its order.
        times: how many were exchanged.
        gradient_bytes, wire_bytes, pack_ms, exchange_ms, unpack_ms: as in `SyncStats`, of these.
        bucket_ms: time from the hand-over, when the gradients were ready, to the mean being in place, in ms. On CUDA 0.
    """

    bucket: int = 0
    times: int = 0
    gradient_bytes: int = 0
    wire_bytes: int = 0
    pack_ms: float = 0.0
    exchange_ms: float = 0.0
    unpack_ms: float = 0.0
    bucket_ms: float = 0.0


@dataclass
class SyncStats:
    """Totals since the last reset, of this rank.

    Attributes:
        steps: backward passes that were synchronised.
        buckets: buckets exchanged.
        gradient_bytes: bytes of the gradients in them.
        wire_bytes: bytes that this rank sent.
        waiting_ms: time between the first and the last bucket of a step in which no bucket was under way, in ms: synchronisation
            waited for gradients. The rest of backward is before the first bucket.
        pack_ms: time spent encoding, in ms. On CUDA times are 0 unless the engine measures them.
        exchange_ms: time from handing the payload to the transport until the result was there, in ms; once where slices overlap.
        unpack_ms: time spent decoding, with the sum of squares and the search for Inf and NaN, in ms.
        exposed_ms: time from the hand-over of a step's last bucket until its mean was in place, in ms: what backward waited for.
        overlap_share: share of pack, exchange and unpack that the backward pass did not wait for, 0 to 1.
        bandwidth_mb_per_s: wire_bytes over exchange_ms, in 10^6 bytes a second; 0 without either.
        queue_depth: buckets under way when another was handed over, mean.
        max_queue_depth: the largest of these.
        arrival_spread_ms: how much earlier the first rank's backward pass comes to its end than the last one's, mean over the
            steps, in ms. None until every rank has called `stats`: see `Surface.stats`.
        late_ms: how much later than the first each rank comes, in ms, by rank. None as above.
        slowest_rank: the rank that comes last. None as above.
        per_bucket: `BucketStats` of each bucket, in order.
        relative_error: norm of what encoding this rank's gradients lost over the norm of what was encoded (with error feedback
            gradient plus residual), over the steps measured; None without `measure_every`.
        relative_error_of_sums: the same of the sums that this rank encoded; None under all_reduce too.
        zeroed_share: share of the values encoded that were not zero and became zero, 0 to 1; None without `measure_every`.
        zeroed_share_of_sums: the same of the sums that this rank encoded.
        nonfinite_steps: steps with Inf or NaN in a synchronised gradient.
        residual_bytes: memory of error feedback held now, in bytes.
        choice: what codec="auto" uses now, and the measurement it follows from; "" under any other codec.
    """

    steps: int = 0
    buckets: int = 0
    gradient_bytes: int = 0
    wire_bytes: int = 0
    waiting_ms: float = 0.0
    pack_ms: float = 0.0
    exchange_ms: float = 0.0
    unpack_ms: float = 0.0
    exposed_ms: float = 0.0
    overlap_share: float = 0.0
    bandwidth_mb_per_s: float = 0.0
    queue_depth: float = 0.0
    max_queue_depth: int = 0
    arrival_spread_ms: float | None = None
    late_ms: list[float] | None = None
    slowest_rank: int | None = None
    per_bucket: list[BucketStats] = field(default_factory=list)
    relative_error: float | None = None
    relative_error_of_sums: float | None = None
    zeroed_share: float | None = None
    zeroed_share_of_sums: float | None = None
    nonfinite_steps: int = 0
    residual_bytes: int = 0
    choice: str = ""

    @classmethod
    def of(cls, *totals: dict[str, Any]) -> SyncStats:
        """The sum of what engines counted; entries that are no field here are left out."""
        stats = cls()
        for one in fields(cls):
            if one.name not in _DERIVED:
                start = getattr(stats, one.name)  # 0, or 0.0 for times
                setattr(stats, one.name, type(start)(sum(total.get(one.name, 0) for total in totals)))
        busy = stats.pack_ms + stats.exchange_ms + stats.unpack_ms
        if busy > 0:
            stats.overlap_share = min(1.0, max(0.0, 1.0 - stats.exposed_ms / busy))
        if stats.exchange_ms > 0:
            stats.bandwidth_mb_per_s = stats.wire_bytes / stats.exchange_ms / 1e3
        stats.queue_depth = sum(total.get("queued", 0) for total in totals) / max(1, stats.buckets)
        stats.max_queue_depth = max((total.get("max_queue_depth", 0) for total in totals), default=0)
        stats.per_bucket = _by_bucket(totals)
        measured = [total["error_sums"] for total in totals if total.get("error_sums")]
        lost, encoded, nonzero, zeroed, *of_sums = [sum(column) for column in zip(*measured, strict=True)] or [0] * 8
        stats.relative_error, stats.zeroed_share = _root_of_share(lost, encoded), _share(zeroed, nonzero)
        lost, encoded, nonzero, zeroed = of_sums
        stats.relative_error_of_sums, stats.zeroed_share_of_sums = _root_of_share(lost, encoded), _share(zeroed, nonzero)
        return stats

    def set_arrivals(self, exposed_ms: list[float] | None) -> None:
        """Works out who comes late from the mean `exposed_ms` of a step on each rank, by rank; None: not known.

        An exchange ends on all ranks at about the same time, so the rank that waits longest came first. No clocks are compared.
        """
        if exposed_ms is None or max(exposed_ms) <= 0:
            return
        self.late_ms = [max(exposed_ms) - one for one in exposed_ms]
        self.arrival_spread_ms = max(self.late_ms)
        self.slowest_rank = self.late_ms.index(self.arrival_spread_ms)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers by field name; `per_bucket` a list of such, `late_ms` a list."""
        return asdict(self)

    def __str__(self) -> str:
        steps = max(self.steps, 1)
        saved = f", {self.gradient_bytes / self.wire_bytes:.2f} to 1" if self.wire_bytes else ""
        lines = [
            f"gsync: {self.steps} steps, {self.buckets} buckets, {self.nonfinite_steps} steps with Inf or NaN",
            f"  a step    {self.gradient_bytes / steps / _MIB:.2f} MiB of gradients, "
            f"{self.wire_bytes / steps / _MIB:.2f} MiB sent{saved}",
            f"            pack {self.pack_ms / steps:.2f} ms, exchange {self.exchange_ms / steps:.2f} ms, "
            f"unpack {self.unpack_ms / steps:.2f} ms",
            f"            exposed {self.exposed_ms / steps:.2f} ms, {100 * self.overlap_share:.0f} % overlapped; "
            f"waiting for gradients {self.waiting_ms / steps:.2f} ms",
            f"            {self.bandwidth_mb_per_s:.1f} MB/s; {self.queue_depth:.1f} buckets under way at a hand-over, "
            f"at most {self.max_queue_depth}",
        ]
        if self.late_ms is not None:
            lines.append(
                f"  ranks     rank {self.slowest_rank} of {len(self.late_ms)} comes last, "
                f"{self.arrival_spread_ms:.2f} ms after the first"
            )
        if self.choice:
            lines.append(f"  choice    {self.choice}")
        if self.relative_error is not None:
            lines.append(f"  relative error {self.relative_error:.2e}")
        if self.per_bucket:
            lines.append("  bucket  times      MiB     sent     pack  exchange   unpack  ready to done, ms")
        for one in self.per_bucket[:_SHOWN_BUCKETS]:
            totals = (
                one.gradient_bytes / _MIB,
                one.wire_bytes / _MIB,
                one.pack_ms,
                one.exchange_ms,
                one.unpack_ms,
                one.bucket_ms,
            )
            cells = [f"{total / one.times:>{width}.2f}" for total, width in zip(totals, _WIDTHS, strict=True)]
            lines.append(f"  {one.bucket:>6} {one.times:>6} {' '.join(cells)}")
        if len(self.per_bucket) > _SHOWN_BUCKETS:
            lines.append(f"  and {len(self.per_bucket) - _SHOWN_BUCKETS} more buckets")
        return "\n".join(lines)


def add_totals(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """What two engines counted, as if one had: for states that are reset often."""
    result: dict[str, Any] = {}
    for name in {**left, **right}:
        here, there = left.get(name), right.get(name)
        if not here or not there:
            result[name] = here or there
        elif name == "per_bucket":
            result[name] = [asdict(bucket) for bucket in _by_bucket((left, right))]
        elif name == "max_queue_depth":
            result[name] = max(here, there)
        elif isinstance(here, list):
            result[name] = [a + b for a, b in zip(here, there, strict=True)]
        else:
            result[name] = here + there
    return result


def _by_bucket(totals: Sequence[dict[str, Any]]) -> list[BucketStats]:
    """Of each bucket, added up over engines."""
    found: dict[int, BucketStats] = {}
    for total in totals:
        for entry in total.get("per_bucket", ()):
            if not entry["times"]:
                continue
            bucket = found.setdefault(entry["bucket"], BucketStats(entry["bucket"]))
            for name in (one.name for one in fields(BucketStats) if one.name != "bucket"):
                setattr(bucket, name, getattr(bucket, name) + entry[name])
    return [found[number] for number in sorted(found)]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _root_of_share(part: float, whole: float) -> float | None:
    return math.sqrt(part / whole) if whole else None

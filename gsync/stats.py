"""`SyncStats`: what synchronisation cost since the last reset."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

_DERIVED = (
    "overlap_share",
    "relative_error",
    "relative_error_of_sums",
    "zeroed_share",
    "zeroed_share_of_sums",
    "residual_bytes",
)


@dataclass
class SyncStats:
    """Totals since the last reset, of this rank.

    Attributes:
        steps: backward passes that were synchronised.
        buckets: buckets exchanged.
        gradient_bytes: bytes of the gradients in them.
        wire_bytes: bytes that this rank sent.
        pack_ms: time spent encoding, in ms. On CUDA times are 0 unless the engine measures them.
        exchange_ms: time from handing the payload to the transport until the result was there, in ms.
        unpack_ms: time spent decoding, with the sum of squares and the search for Inf and NaN, in ms.
        exposed_ms: time that the backward pass waited at its end, in ms.
        overlap_share: share of pack, exchange and unpack that the backward pass did not wait for, 0 to 1.
        relative_error: norm of what encoding this rank's gradients lost over the norm of what was encoded (with error feedback
            gradient plus residual), over the steps measured; None without `measure_every`.
        relative_error_of_sums: the same of the sums that this rank encoded; None under all_reduce too.
        zeroed_share: share of the values encoded that were not zero and became zero, 0 to 1; None without `measure_every`.
        zeroed_share_of_sums: the same of the sums that this rank encoded.
        nonfinite_steps: steps with Inf or NaN in a synchronised gradient.
        residual_bytes: memory of error feedback held now, in bytes.
    """

    steps: int = 0
    buckets: int = 0
    gradient_bytes: int = 0
    wire_bytes: int = 0
    pack_ms: float = 0.0
    exchange_ms: float = 0.0
    unpack_ms: float = 0.0
    exposed_ms: float = 0.0
    overlap_share: float = 0.0
    relative_error: float | None = None
    relative_error_of_sums: float | None = None
    zeroed_share: float | None = None
    zeroed_share_of_sums: float | None = None
    nonfinite_steps: int = 0
    residual_bytes: int = 0

    @classmethod
    def of(cls, *totals: dict[str, Any]) -> SyncStats:
        """The sum of what engines counted; entries that are no field here are left out."""
        stats = cls()
        for field in fields(cls):
            if field.name not in _DERIVED:
                start = getattr(stats, field.name)  # 0, or 0.0 for times
                setattr(stats, field.name, type(start)(sum(total.get(field.name, 0) for total in totals)))
        busy = stats.pack_ms + stats.exchange_ms + stats.unpack_ms
        if busy > 0:
            stats.overlap_share = min(1.0, max(0.0, 1.0 - stats.exposed_ms / busy))
        measured = [total["error_sums"] for total in totals if total.get("error_sums")]
        lost, encoded, nonzero, zeroed, *of_sums = [sum(column) for column in zip(*measured, strict=True)] or [0] * 8
        stats.relative_error, stats.zeroed_share = _root_of_share(lost, encoded), _share(zeroed, nonzero)
        lost, encoded, nonzero, zeroed = of_sums
        stats.relative_error_of_sums, stats.zeroed_share_of_sums = _root_of_share(lost, encoded), _share(zeroed, nonzero)
        return stats

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers by field name."""
        return asdict(self)

    def __str__(self) -> str:
        steps = max(self.steps, 1)
        mib = 2.0**20
        saved = f" ({self.gradient_bytes / self.wire_bytes:.2f} gradient bytes a wire byte)" if self.wire_bytes else ""
        error = "" if self.relative_error is None else f"\n  relative error {self.relative_error:.2e}"
        return (
            f"gsync: {self.steps} steps, {self.buckets} buckets, {self.nonfinite_steps} steps with Inf or NaN\n"
            f"  a step: {self.gradient_bytes / steps / mib:.2f} MiB of gradients, "
            f"{self.wire_bytes / steps / mib:.2f} MiB sent{saved}\n"
            f"  a step: pack {self.pack_ms / steps:.2f} ms, exchange {self.exchange_ms / steps:.2f} ms, "
            f"unpack {self.unpack_ms / steps:.2f} ms, exposed {self.exposed_ms / steps:.2f} ms "
            f"({100 * self.overlap_share:.0f} % overlapped){error}"
        )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _root_of_share(part: float, whole: float) -> float | None:
    return math.sqrt(part / whole) if whole else None

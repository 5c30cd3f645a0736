"""What happened since one looked last, from totals that go on counting."""

from __future__ import annotations

from typing import Any

from gsync.stats import SyncStats

# Totals that mean something divided by steps.
PER_STEP = ("gradient_bytes", "wire_bytes", "waiting_ms", "pack_ms", "exchange_ms", "unpack_ms", "exposed_ms")
# What is true now, as it is. None is left out.
AS_IT_IS = ("relative_error", "zeroed_share", "arrival_spread_ms", "residual_bytes", "max_queue_depth")


class Window:
    """Means of the steps since the last look. The totals of `stats` stay as they are, for others who read them."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = SyncStats().to_dict()

    def look(self, stats: SyncStats) -> dict[str, float]:
        """Returns numbers by name: `NAME_per_step` of those in PER_STEP, `overlap_share` and `bandwidth_mb_per_s` of these steps,
        and those of AS_IT_IS. Empty where there was no step."""
        now = stats.to_dict()
        before = self._before if now["steps"] >= self._before["steps"] else SyncStats().to_dict()  # it was reset
        self._before = now
        steps = now["steps"] - before["steps"]
        if steps == 0:
            return {}
        done = {name: now[name] - before[name] for name in PER_STEP}
        found = {f"{name}_per_step": done[name] / steps for name in PER_STEP}
        busy = done["pack_ms"] + done["exchange_ms"] + done["unpack_ms"]
        if busy > 0:
            found["overlap_share"] = min(1.0, max(0.0, 1.0 - done["exposed_ms"] / busy))
        if done["exchange_ms"] > 0:
            found["bandwidth_mb_per_s"] = done["wire_bytes"] / done["exchange_ms"] / 1e3
        found["nonfinite_steps"] = now["nonfinite_steps"] - before["nonfinite_steps"]
        return found | {name: float(now[name]) for name in AS_IT_IS if now[name] is not None}

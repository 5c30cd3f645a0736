"""How long the engine in Python packs, exchanges and unpacks, and while a trace is taken, when: the rule of csrc/clock.cpp.

Times are those of `time.perf_counter`, on Linux the clock of the native engine. Used by the engine's thread and by the one that
hands buckets over; Python's lock keeps them apart.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

# phase, step, bucket, slice (counted through the bucket), begin, end (s)
Span = tuple[str, int, int, int, float, float]

_NO_RANGE: Any = contextlib.nullcontext()
_TIMES = ("pack_ms", "exchange_ms", "unpack_ms", "bucket_ms")


class SpanBook:
    """Totals since the last reset, and the spans of a trace. Jobs are those of gsync/bucket_job.py."""

    def __init__(self) -> None:
        self._under_way = 0  # buckets
        self._last_done = self._exchanged_until = 0.0
        self._spans: list[Span] | None = None
        self._room = self._dropped = 0
        self._timing = False
        self._step_began: float | None = None  # of a step that is timed
        self._steps_s, self._ready_s = list[float](), list[float]()
        self.reset()

    def reset(self) -> None:
        """Sets the totals to zero."""
        counts = ("steps", "buckets", "gradient_bytes", "wire_bytes", "queued", "max_queue_depth")
        self.totals: dict[str, Any] = dict.fromkeys(counts, 0)
        self.totals |= dict.fromkeys((*_TIMES, "exposed_ms", "waiting_ms"), 0.0)
        self._buckets: dict[int, dict[str, Any]] = {}

    def to_dict(self) -> dict[str, Any]:
        """As `SyncStats.of` takes them."""
        return {**self.totals, "per_bucket": [dict(bucket) for _, bucket in sorted(self._buckets.items())]}

    def ready(self, job: Any) -> None:
        """A bucket is handed over: its gradients are there."""
        job.ready = time.perf_counter()
        if self._under_way == 0 and job.index > 0:
            self.totals["waiting_ms"] += 1e3 * (job.ready - self._last_done)
        self.totals["queued"] += self._under_way
        self.totals["max_queue_depth"] = max(self.totals["max_queue_depth"], self._under_way)
        self._under_way += 1
        if job.index == 0:
            self._step_began = job.ready if self._timing else None
        if self._step_began is not None:
            self._ready_s += [0.0] * (job.index + 1 - len(self._ready_s))
            self._ready_s[job.index] += job.ready - self._step_began

    def add(self, phase: str, job: Any, number: int, begin: float, end: float) -> None:
        """Slice `number` of a job was in a phase."""
        counted_from = begin
        if phase == "exchange":  # counted once where slices overlap
            counted_from = min(end, max(begin, self._exchanged_until))
            self._exchanged_until = end
        self.totals[f"{phase}_ms"] += 1e3 * (end - counted_from)
        self._bucket(job)[f"{phase}_ms"] += 1e3 * (end - begin)
        self._keep(phase, job, number, begin, end)

    def done(self, job: Any, timed: bool) -> None:
        """A bucket has ended. `timed`: when this is called says so."""
        bucket = self._bucket(job)
        gradient_bytes = job.plan.gradient_bytes if job.plan is not None else 0
        self._under_way -= 1
        for totals, name in ((self.totals, "buckets"), (bucket, "times")):
            totals[name] += 1
            totals["gradient_bytes"] += gradient_bytes
            totals["wire_bytes"] += job.wire_bytes
        self.totals["steps"] += job.is_last
        if not timed:
            return
        self._last_done = time.perf_counter()
        took_ms = 1e3 * (self._last_done - job.ready)
        bucket["bucket_ms"] += took_ms
        self._keep("bucket", job, 0, job.ready, self._last_done)
        if job.is_last:
            self.totals["exposed_ms"] += took_ms
            self._keep("exposed", job, 0, job.ready, self._last_done)
            if self._step_began is not None and self._timing:
                self._steps_s.append(self._last_done - self._step_began)

    def time_steps(self) -> None:
        """Times steps from now on, from the hand-over of the first bucket to the end of the last."""
        self._timing, self._steps_s, self._ready_s = True, [], []

    def take_step_times(self) -> tuple[list[float], list[float]]:
        """Ends that; returns each step's ms, and by bucket the ms from the first hand-over to its own, added up."""
        taken = [1e3 * took for took in self._steps_s], [1e3 * ready for ready in self._ready_s]
        self._timing, self._steps_s, self._ready_s = False, [], []
        return taken

    def start_trace(self, capacity: int) -> None:
        """Keeps spans from now on, up to `capacity`."""
        self._spans, self._room, self._dropped = [], capacity, 0

    def take_trace(self) -> tuple[list[Span], int]:
        """Ends that; returns the spans, and how many found no room."""
        spans, self._spans = self._spans or [], None
        return spans, self._dropped

    def _bucket(self, job: Any) -> dict[str, Any]:
        found = self._buckets.get(job.index)
        if found is None:
            found = {"bucket": job.index, "times": 0, "gradient_bytes": 0, "wire_bytes": 0, **dict.fromkeys(_TIMES, 0.0)}
            self._buckets[job.index] = found
        return found

    def _keep(self, phase: str, job: Any, number: int, begin: float, end: float) -> None:
        if self._spans is None:
            return
        if len(self._spans) < self._room:
            self._spans.append((phase, job.step.number, job.index, number, begin, end))
        else:
            self._dropped += 1


def profiler_range(name: str) -> Any:
    """A context that shows in torch.profiler; of a worker thread, where it profiles all threads."""
    return torch.autograd.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _NO_RANGE

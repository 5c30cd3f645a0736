"""What the engine in Python does to its buckets, slice by slice; on a CPU in a thread of its own (gsync/python_engine.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from . import backends, forks
from .bucket_job import Job, Slice, Step
from .encoding import NEAREST, EncodeOptions
from .errors import SyncError
from .groups import as_sync_error, forked_from
from .hosts import Place
from .lanes import Lanes
from .python_exchange import Exchange, make_exchange
from .spans import SpanBook, profiler_range

_SLICES_UNDER_WAY = 2
_VANISHED_SHARE = 0.01  # of the non-zero elements; above it fp16 is the wrong codec


class Core:
    """All of the engine that its worker thread needs. Nothing here refers to the engine, so that one can be collected."""

    def __init__(
        self,
        lanes: Mapping[str, Lanes],
        backend: str,
        device: torch.device,
        place: Place,
        scale: float,
        rank: int,
        world_size: int,
        label: str,
        rounding: str,
        measure_every: int,
    ) -> None:
        self.rounding, self.measure_every = rounding, measure_every
        self.lanes, self.device, self.scale, self.label = lanes, device, scale, label
        self.rank, self.world_size = rank, world_size
        self.kernels = backends.get(backend, device)
        self._place = place
        self._exchanges: dict[str, Exchange] = {}
        self.changed = threading.Condition()
        self.queue: deque[Slice] = deque()
        self.jobs: list[Job] = []  # not finished
        self.error: SyncError | None = None
        self.closed = False
        self.warning = ""
        self.warned = False
        self.pool: dict[tuple[str, int], torch.Tensor] = {}
        self.slot = 0
        self.last: Step | None = None
        self.steps_done = 0
        self.book = SpanBook()
        self.reset_totals()
        forks.tell(self)

    def reset_totals(self) -> None:
        self.book.reset()
        self.nonfinite_steps = torch.zeros(1, dtype=torch.int64, device=self.device)

    def exchange_named(self, name: str) -> Exchange | None:
        """None for one rank."""
        if self.lanes and name not in self._exchanges:
            made = make_exchange(name, self.lanes, self._place, self.rank, self.world_size, self.kernels, self._buffer)
            self._exchanges[name] = made
        return self._exchanges.get(name)

    # A slice is started, then finished: by the worker thread (CPU) or by the caller (CUDA).

    def start(self, current: Slice) -> None:
        """1. pack  2. the first collective."""
        job, part = current.job, current.part
        current.started = time.perf_counter()
        if part is None:  # sparse, reduced as it is, in its turn; or without elements
            if job.is_sparse and self.lanes:
                if self.scale != 1.0:
                    job.buffer.div_(round(1 / self.scale))  # as stock DDP does it: the same bits
                size = job.buffer._values().nbytes + job.buffer._indices().nbytes
                job.wire_bytes += size * (self.world_size - 1)
                current.collective = self.lanes["all"].all_reduce(job.buffer)
            return
        exchange = part.exchange
        if exchange is None:
            return
        layout = part.layouts[current.slice_idx]
        packed = exchange.packed(layout)
        self.slot = (self.slot + 1) % _SLICES_UNDER_WAY
        current.payload = self._buffer("payload", exchange.payload_bytes(layout))
        counters = job.step.counters if part.codec == "fp16" else None
        # What travels uncompressed at first is encoded on its way.
        encoding = self._encoding(current)("pack") if packed is layout else NEAREST
        with profiler_range("gsync::pack"):
            payload = current.payload[: packed.sizes.payload_bytes]
            self.kernels.pack(packed, current.sent, payload, self.scale, counters, encoding)
        self._add("pack", current)
        current.collective = exchange.start(current, layout)
        job.wire_bytes += exchange.wire_bytes(layout)

    def finish(self, current: Slice) -> None:
        """3. wait, and whatever the exchange does next  4. unpack."""
        job, part, step = current.job, current.part, current.job.step
        if current.collective is not None:
            current.collective.wait()
        if part is None:
            self._add("exchange", current)
            if job.is_sparse:
                self._measure([job.buffer.coalesce()._values()], job.norm_idx, step)
        elif part.exchange is None:
            self._measure(current.gradients, part.norm_idx, step)
        else:
            layout = part.layouts[current.slice_idx]
            part.exchange.finish(current, layout, self._encoding(current))
            self._add("exchange", current)
            current.make_missing()
            assert current.payload is not None and part.partials is not None
            is_end = current.slice_idx == len(part.layouts) - 1
            sums = torch.zeros(len(part.spans), dtype=torch.float64, device=self.device) if is_end else None
            with profiler_range("gsync::unpack"):
                self.kernels.unpack(layout, current.payload, current.gradients, part.partials, step.nonfinite, sums)
            if sums is not None:
                step.sums[part.index] = sums
            self._add("unpack", current)
        job.slices_left -= 1
        if job.slices_left <= 0:
            self.complete(job)

    def complete(self, job: Job) -> None:
        self.book.done(job, timed=self.device.type == "cpu")
        if job.is_last:
            self.steps_done += 1
            self.nonfinite_steps += job.step.nonfinite
            self.last = job.step
            if self.device.type == "cpu":  # elsewhere reading them would wait for the device
                self._look_for_vanished(*job.step.counters.tolist())
        job.slices = []  # they refer to the job
        job.future.set_result(job.buffer)
        with self.changed:
            self.jobs.remove(job)
            self.changed.notify_all()

    def fail(self, error: BaseException, what: str) -> None:
        """Makes the engine fail: unfinished buckets get NaN, and the other ranks see closed connections."""
        with self.changed:
            if self.error is None:
                self.error = as_sync_error(what, error)
                if self.error is not error:
                    self.error.__cause__ = error
            jobs, self.jobs = self.jobs, []
            self.queue.clear()
        for lanes in self.lanes.values():
            lanes.abort()
        for job in jobs:
            job.poison()
            job.future.set_exception(self.error)  # type: ignore[arg-type]
        with self.changed:
            self.changed.notify_all()

    def see_fork(self) -> None:
        """In a forked process: fails, and touches neither the thread nor the connections."""
        self.changed = threading.Condition()
        self.queue, self.jobs, self.closed = deque(), [], True
        if self.lanes:
            forks.left_behind.append(self.lanes)
            self.lanes = {}
            self.error = SyncError(f"gsync ({self.label}): {forked_from(self.rank)}")

    def place(self, bucket: int, step: int) -> str:
        return (
            f"gsync: bucket {bucket} of step {step} on rank {self.rank} of {self.world_size} ({self.label}) was not synchronised"
        )

    def run_worker(self) -> None:
        """Life of the worker thread."""
        torch.set_flush_denormal(False)  # a thread inherits the mode of the one that made it
        under_way: deque[Slice] = deque()
        with torch.no_grad():
            while True:
                with self.changed:
                    while not (self.queue or under_way or self.closed):
                        self.changed.wait()
                    if self.closed:
                        return
                    current = self.queue.popleft() if self.queue else None
                job = current.job if current is not None else under_way[0].job
                try:
                    if current is not None:
                        self.start(current)
                        under_way.append(current)
                    if current is None or len(under_way) == _SLICES_UNDER_WAY:
                        job = under_way[0].job
                        self.finish(under_way.popleft())
                except BaseException as error:
                    under_way.clear()
                    self.fail(error, self.place(job.index, job.step.number))

    def _encoding(self, current: Slice) -> Callable[[str], EncodeOptions]:
        """How a slice is encoded in stage "pack" or "reduce"."""
        measures = self.measure_every > 0 and current.job.step.number % self.measure_every == 0
        return lambda stage: current.encoding(stage, self.rounding, self.rank, measures)

    def _buffer(self, kind: str, num_bytes: int) -> torch.Tensor:
        """Persistent memory of the slice under way; it grows to the largest slice."""
        found = self.pool.get((kind, self.slot))
        if found is None or found.numel() < num_bytes:
            found = self.pool[kind, self.slot] = backends.empty_payload(num_bytes, self.device)
        return found[:num_bytes]

    def _measure(self, gradients: Sequence[torch.Tensor | None], norm_idx: Sequence[int], step: Step) -> None:
        """Σg² and the search for Inf and NaN where nothing was unpacked."""
        for gradient, i in zip(gradients, norm_idx, strict=True):
            if gradient is None:
                continue
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            step.nonfinite |= ~real.isfinite().all()
            step.sums[i] = real.double().square().sum()

    def _add(self, phase: str, current: Slice) -> None:
        if self.device.type == "cpu":
            now = time.perf_counter()
            self.book.add(phase, current.job, current.number, current.started, now)
            current.started = now

    def _look_for_vanished(self, nonzero: int, vanished: int) -> None:
        if vanished > _VANISHED_SHARE * nonzero and not self.warned:
            self.warned = True
            self.warning = (
                f"gsync: {100 * vanished / nonzero:.1f} % of the non-zero gradients are too small for fp16 "
                'and became zero; codec="bf16" has the range of fp32'
            )

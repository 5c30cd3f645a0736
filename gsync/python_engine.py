"""The engine in Python: for builds without the extension, and for CUDA without gsync's CUDA kernels.

Same rules and numbers as the native engine. On a CPU one worker thread exchanges slices in the order in which their buckets came,
two at a time: while one is exchanged the next is packed. On CUDA everything is enqueued from the caller's thread on one stream of
the engine, over the group's own process group, and nothing here waits for the device.

Errors. A torch future that fails in Python loses the class of its error inside DDP. So the first bucket of a backward pass queues
a callback which autograd runs at the end, before DDP's own: it waits for the buckets, and raises the error itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from . import backends, forks
from .bucket_job import Job, Slice, Step
from .bucket_plan import Parameters, PlanOptions
from .encoding import NEAREST, EncodeOptions
from .errors import GsyncError, GsyncWarning, SyncError, SyncTimeoutError
from .gradient_list import fill_nan_gradients
from .groups import as_sync_error, forked_from, names_a_timeout
from .hosts import Place
from .lanes import Lanes
from .python_exchange import make_exchange
from .spans import Span, SpanBook, profiler_range

_SLICES_UNDER_WAY = 2
_VANISHED_SHARE = 0.01  # of the non-zero elements; above it fp16 is the wrong codec


class _Core:
    """All of the engine that its worker thread needs. Nothing here refers to the engine, so that one can be collected."""

    def __init__(
        self,
        lanes: Mapping[str, Lanes],
        backend: str,
        device: torch.device,
        exchange: str,
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
        self.exchange = make_exchange(exchange, lanes, place, rank, world_size, self.kernels, self._buffer) if lanes else None
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

    # A slice is started, then finished: by the worker thread (CPU) or by the caller (CUDA).

    def start(self, current: Slice) -> None:
        """1. pack  2. the first collective."""
        job, part = current.job, current.part
        current.started = time.perf_counter()
        if part is None:  # sparse, reduced as it is, in its turn; or without elements
            if job.is_sparse and self.exchange is not None:
                if self.scale != 1.0:
                    job.buffer.div_(round(1 / self.scale))  # as stock DDP does it: the same bits
                size = job.buffer._values().nbytes + job.buffer._indices().nbytes
                job.wire_bytes += size * (self.world_size - 1)
                current.collective = self.lanes["all"].all_reduce(job.buffer)
            return
        if self.exchange is None:
            return
        layout = part.layouts[current.slice_idx]
        packed = self.exchange.packed(layout)
        self.slot = (self.slot + 1) % _SLICES_UNDER_WAY
        current.payload = self._buffer("payload", self.exchange.payload_bytes(layout))
        counters = job.step.counters if part.codec == "fp16" else None
        # What travels uncompressed at first is encoded on its way.
        encoding = self._encoding(current)("pack") if packed is layout else NEAREST
        with profiler_range("gsync::pack"):
            payload = current.payload[: packed.sizes.payload_bytes]
            self.kernels.pack(packed, current.sent, payload, self.scale, counters, encoding)
        self._add("pack", current)
        current.collective = self.exchange.start(current, layout)
        job.wire_bytes += self.exchange.wire_bytes(layout)

    def finish(self, current: Slice) -> None:
        """3. wait, and whatever the exchange does next  4. unpack."""
        job, part, step = current.job, current.part, current.job.step
        if current.collective is not None:
            current.collective.wait()
        if part is None:
            self._add("exchange", current)
            if job.is_sparse:
                self._measure([job.buffer.coalesce()._values()], job.norm_idx, step)
        elif self.exchange is None:
            self._measure(current.gradients, part.norm_idx, step)
        else:
            layout = part.layouts[current.slice_idx]
            self.exchange.finish(current, layout, self._encoding(current))
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


class PythonEngine:
    """See `gsync.engine.Engine`.

    Args:
        lanes: the collectives over "all" ranks, under hierarchical also over the "inner" and the "outer" ones; empty for one
            rank: gradients are only scaled and measured, never encoded.
        device: of the gradients.
        place: where this rank stands among hosts.
        rank, world_size: of the group.
        exchange: "all_reduce", "scatter_gather" or "hierarchical".
        scale: multiplies every gradient before it is encoded.
        slice_bytes: of gradients, at least 1.
        label: names the engine in messages.
        backend: see `gsync.backends`.
        threaded: exchange in a thread of its own; else in the caller's, as collectives on a shared group must be.
        stream_priority: of the CUDA stream; None: the highest.
        on_failure: called at the end of a backward pass that failed, in the place of what DDP would have done.
        rounding: "nearest" or "stochastic".
        start_step: see `PlanOptions`.
        measure_every: every how many steps what encoding loses is summed; 0: never.
    """

    def __init__(
        self,
        lanes: Mapping[str, Lanes],
        device: torch.device,
        place: Place,
        rank: int,
        world_size: int,
        exchange: str,
        scale: float,
        slice_bytes: int,
        label: str,
        backend: str = "auto",
        threaded: bool = True,
        stream_priority: int | None = None,
        on_failure: Callable[[], None] = lambda: None,
        rounding: str = "nearest",
        start_step: int = 0,
        measure_every: int = 0,
    ) -> None:
        self._on_failure = on_failure
        self._core = _Core(lanes, backend, device, exchange, place, scale, rank, world_size, label, rounding, measure_every)
        self._parameters = Parameters(device, self._core.exchange, PlanOptions(slice_bytes, start_step, measure_every > 0))
        self._seed = 0
        self._loss_scale: tuple[torch.Tensor, torch.Tensor] | None = None
        self._step: Step | None = None
        self._first_step = 0
        self._last_task = -1
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            priority = -5 if stream_priority is None else stream_priority  # CUDA clamps it to what the device has
            self._stream = torch.cuda.Stream(device, priority=priority)
        self._thread = None
        if threaded and device.type == "cpu":
            self._thread = threading.Thread(target=self._core.run_worker, name="gsync", daemon=True)
            self._thread.start()
        self._finalizer = weakref.finalize(self, _close, self._core, self._thread)

    def set_parameters(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        codecs: Sequence[str],
        block_sizes: Sequence[int] = (),
        residuals: Sequence[tuple[torch.Tensor, torch.Tensor] | None] = (),
    ) -> None:
        self._parameters.set(params, names, codecs, block_sizes, residuals)

    def follow_loss_scale(self, scale: torch.Tensor, unit: torch.Tensor) -> None:
        self._loss_scale = (scale, unit)

    def submit(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        in_backward = self._queue_end_of_backward()
        if self._core.error is not None:  # told at the end of the backward pass, when all its gradients can be marked
            if not in_backward:
                self.raise_pending()
            failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            failed.set_exception(self._core.error)  # type: ignore[arg-type]
            return failed
        return self._take(bucket)

    def hand_over(self, bucket: Any) -> None:
        """Starts the exchange of a bucket of `GradReducer`, which calls `wait_for_buckets` at the end."""
        if self._core.error is not None:
            fill_nan_gradients(bucket.parameters())
            return
        self._take(bucket)

    def wait_for_buckets(self) -> None:
        """Returns when all buckets are done (CUDA: on the current stream), or the engine has failed."""
        core = self._core
        with core.changed:
            while core.jobs and core.error is None:
                core.changed.wait()
        if self._stream is not None:
            torch.cuda.current_stream(core.device).wait_stream(self._stream)

    def _take(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        core = self._core
        if self._step is None or bucket.index() == 0:
            self._step = Step(self.step, self._seed, len(self._parameters), core.device)
            self._parameters.forget_unused(self._step.number)
            if self._loss_scale is not None:
                self._parameters.follow_loss_scale(*self._loss_scale)
        try:
            job = self._make_job(bucket, self._step)
            core.book.ready(job)
            with core.changed:
                core.jobs.append(job)
                if self._thread is not None:
                    core.queue.extend(job.slices)
                    core.changed.notify_all()
            if self._thread is None:
                self._run_here(job)
            return job.future
        except Exception as error:
            core.fail(error, core.place(bucket.index(), self._step.number))
            fill_nan_gradients(self._parameters.alive())
            if isinstance(error, (ValueError, TypeError)):
                raise
            self.raise_pending()
            raise

    def stats(self) -> dict[str, Any]:
        nonfinite_steps = int(self._core.nonfinite_steps.item())
        return dict(self._core.book.to_dict(), nonfinite_steps=nonfinite_steps, error_sums=self._parameters.error_sums())

    def reset_stats(self) -> None:
        self._core.reset_totals()
        self._parameters.reset_error_sums()

    def start_trace(self, capacity: int) -> None:
        self._core.book.start_trace(capacity)

    def take_trace(self) -> tuple[list[Span], int]:
        return self._core.book.take_trace()

    def sum_of_squares(self) -> torch.Tensor:
        return self._last().sums

    def found_nonfinite(self) -> torch.Tensor:
        return self._last().nonfinite[0] != 0

    def raise_pending(self) -> None:
        core = self._core
        if core.warning:
            text, core.warning = core.warning, ""
            warnings.warn(text, GsyncWarning, stacklevel=3)
        if core.error is not None:
            raise type(core.error)(str(core.error)) from core.error.__cause__

    def abort(self, reason: str) -> None:
        self._core.fail(
            (SyncTimeoutError if names_a_timeout(reason) else SyncError)(
                f"gsync: step {self.step} on rank {self._core.rank} of {self._core.world_size} "
                f"({self._core.label}) was not synchronised: {reason}"
            ),
            "",
        )

    def close(self) -> None:
        self._finalizer()

    @property
    def failed(self) -> bool:
        return self._core.error is not None

    @property
    def closed(self) -> bool:
        return self._core.closed

    @property
    def step(self) -> int:
        return self._first_step + self._core.steps_done

    def set_step(self, step: int) -> None:
        self._first_step = step - self._core.steps_done

    def set_seed(self, seed: int) -> None:
        self._seed = seed

    def _make_job(self, bucket: Any, step: Step) -> Job:
        buffer, params = bucket.buffer(), bucket.parameters()
        plan = None
        if buffer is None:
            dtype = params[0].dtype.to_real() if params[0].is_complex() else params[0].dtype
            plan = self._parameters.plan(dtype, None, params, step.number)
        elif not buffer.is_sparse:
            plan = self._parameters.plan(buffer.dtype, buffer.numel(), params, step.number)
        return Job(bucket, step, plan, [self._parameters.norm_idx(param) for param in params])

    def _run_here(self, job: Job) -> None:
        """What the worker thread would do, in the caller's thread; on CUDA it only enqueues."""
        core = self._core
        context: Any = contextlib.nullcontext()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(core.device))
            context = torch.cuda.stream(self._stream)
        with context, torch.no_grad():
            for current in job.slices:
                core.start(current)
                core.finish(current)
            if self._stream is not None and job.buffer is not None and not job.is_sparse:
                job.buffer.record_stream(self._stream)

    def _queue_end_of_backward(self) -> bool:
        """Whether this is in a backward pass, as it is not on a rank without inputs in DDP's join."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._last_task):
            self._last_task = task
            Variable._execution_engine.queue_callback(self._end_of_backward)
        return task != -1

    def _end_of_backward(self) -> None:
        self.wait_for_buckets()
        if self._core.error is not None:
            fill_nan_gradients(self._parameters.alive())
            self._on_failure()
        self.raise_pending()

    def _last(self) -> Step:
        self.raise_pending()
        if self._core.last is None:
            raise GsyncError("no backward pass has been synchronised yet")
        return self._core.last


def _close(core: _Core, thread: threading.Thread | None) -> None:
    """Ends the worker thread. Buckets that are still under way fail, here and on the other ranks."""
    with core.changed:
        core.closed = True
        unfinished = bool(core.jobs)
        core.changed.notify_all()
    if unfinished:
        core.fail(SyncError(f"gsync ({core.label}) was closed while buckets were under way"), "")
    if thread is not None and thread is not threading.current_thread():
        thread.join(1.0)

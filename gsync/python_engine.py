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
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from .bucket_job import Job, Step
from .bucket_plan import Parameters, PlanOptions
from .errors import GsyncError, GsyncWarning, SyncError, SyncTimeoutError
from .gradient_list import fill_nan_gradients
from .groups import names_a_timeout
from .hosts import Place
from .lanes import Lanes
from .python_core import Core
from .spans import Span


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
        self._core = Core(lanes, backend, device, place, scale, rank, world_size, label, rounding, measure_every)
        options = PlanOptions(slice_bytes, start_step, measure_every > 0)
        self._parameters = Parameters(device, self._core.exchange_named, exchange, options)
        self._call: tuple[int, Callable[[], None]] | None = None
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
        exchanges: Sequence[str] = (),
    ) -> None:
        self._parameters.set(params, names, codecs, block_sizes, residuals, exchanges)

    def call_at(self, step: int, callback: Callable[[], None]) -> None:
        self._call = (step, callback)

    def time_steps(self) -> None:
        self._core.book.time_steps()

    def take_step_times(self) -> tuple[list[float], list[float]]:
        return self._core.book.take_step_times()

    def last_buckets(self) -> list[list[int]]:
        return self._core.last.buckets if self._core.last is not None else []

    def transport(self, level: str = "all") -> Lanes | None:
        return self._core.lanes.get(level)

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
        due, self._call = (self._call, None) if self._is_due(bucket) else (None, self._call)
        try:
            if due is not None:
                due[1]()
        except Exception as error:
            core.fail(error, core.place(bucket.index(), self.step))
            fill_nan_gradients(self._parameters.alive())
            self.raise_pending()
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

    def _is_due(self, bucket: Any) -> bool:
        return self._call is not None and bucket.index() == 0 and self.step >= self._call[0]

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


def _close(core: Core, thread: threading.Thread | None) -> None:
    """Ends the worker thread. Buckets that are still under way fail, here and on the other ranks."""
    with core.changed:
        core.closed = True
        unfinished = bool(core.jobs)
        core.changed.notify_all()
    if unfinished:
        core.fail(SyncError(f"gsync ({core.label}) was closed while buckets were under way"), "")
    if thread is not None and thread is not threading.current_thread():
        thread.join(1.0)

"""The hooks of `GradReducer` in Python, for the engine in Python. The rule is that of csrc/grad_reducer.cpp.

A hook in Python costs about 2 µs for each parameter in autograd's thread.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from .bucket_order import ReducerBucket
from .errors import GsyncError, InternalError
from .gradient_list import dense_like, fill_nan_gradients
from .python_engine import PythonEngine

_OWN_USES = 2  # of a gradient's memory: the gradient, and the Python object that asks


class GradientBucket:
    """A bucket as `PythonEngine.hand_over` takes it: the gradients are where autograd left them.

    Attributes:
        gradient_list: one for each parameter, dense in the parameter's order of elements; None: this rank did not use it. Where
            another rank did, the engine puts memory with the mean there.
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor | None] | None,
        sparse: torch.Tensor | None = None,
    ) -> None:
        self._index, self._is_last, self._parameters, self._sparse = index, is_last, parameters, sparse
        self.gradient_list = gradients

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor | None:
        """The gradient of a sparse bucket, else None."""
        return self._sparse


class _End:
    """What autograd calls at the end of a backward pass. It dies uncalled with one that ends by an exception."""

    def __init__(self, reducer: PythonReducer, task: int) -> None:
        self.reducer, self.task = reducer, task

    def __call__(self) -> None:
        self.reducer._task_ended(self.task)


class PythonReducer:
    """See `_C.GradReducer`: the same arguments and methods."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        prepare: Callable[[], None],
        learned: Callable[[list[int], list[int]], None],
        sending: Callable[[int], None] = lambda number: None,
        synchronised: Callable[[], None] = lambda: None,
    ) -> None:
        self.enabled = True
        self._sending, self._synchronised = sending, synchronised
        self._params, self._names, self._prepare, self._learned = list(params), list(names), prepare, learned
        self._lock = threading.RLock()
        self._engine: PythonEngine | None = None
        self._buckets: list[ReducerBucket] = []
        self._bucket_of = [-1] * len(self._params)
        self._tasks: dict[int, weakref.ref[_End]] = {}
        self._learning = self._waited_for = True
        self._unsynchronised = -1
        self._closed = False
        self._is_open = False
        self._next = self._hold = 0
        self._in_flight: list[GradientBucket] = []
        self._kinds = [(param.dtype, param.device) for param in self._params]
        self._handles = [self._hook(idx, param) for idx, param in enumerate(self._params)]

    def _hook(self, idx: int, param: torch.Tensor) -> Any:
        this = weakref.ref(self)

        def ready(_: torch.Tensor) -> None:
            reducer = this()
            if reducer is not None:
                reducer._ready(idx)

        frozen = not param.requires_grad  # a hook wants a parameter that is trained, and stays when it is frozen again
        if frozen:
            param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(ready)
        if frozen:
            param.requires_grad_(False)
        return handle

    def set_engine(self, engine: PythonEngine | None) -> None:
        """None: `prepare` is called at the next step."""
        with self._lock:
            self._engine = engine
            self._is_open, self._in_flight = False, []

    def set_buckets(self, buckets: list[ReducerBucket], learning: bool) -> None:
        """learning: the next step is the first of these buckets; `learned` follows it."""
        with self._lock:
            self._buckets, self._learning = buckets, learning
            self._bucket_of = [-1] * len(self._params)
            for number, bucket in enumerate(buckets):
                for idx in bucket.parameters:
                    self._bucket_of[idx] = number

    def note_backward(self) -> None:
        """The step under way is to end with this backward pass, not with one nested in it."""
        with self._lock:
            self._note_task()

    def check(self) -> None:
        """Raises what went wrong: an engine that has failed, a backward pass that did not come to its end."""
        with self._lock:
            self._raise_if_dead()
            if self._engine is not None:
                self._engine.raise_pending()

    def unsynchronised(self) -> int:
        """Index of a parameter with gradients that were accumulated and not synchronised since, or -1."""
        return self._unsynchronised

    def unhooked(self) -> int:
        """Index of a parameter that was moved to another device or dtype, or -1."""
        for idx, (param, kind) in enumerate(zip(self._params, self._kinds, strict=True)):
            if (param.dtype, param.device) != kind and param.requires_grad:
                return idx
        return -1

    def wait(self) -> None:
        """Synchronises what was accumulated since, or takes part with nothing if no backward pass did since the last call."""
        with self._lock:
            self.check()
            if self._tasks:
                raise GsyncError("gsync: wait() was called inside of a backward pass, which ends by itself")
            if self.enabled and (self._waited_for or self._unsynchronised >= 0):
                self._begin()
                self._finish()
            self._waited_for = True

    def close(self) -> None:
        """Removes the hooks."""
        with self._lock:
            self._closed = True
            for handle in self._handles:
                handle.remove()
            self._engine, self._in_flight = None, []

    # One gradient.

    def _ready(self, idx: int) -> None:
        if self._closed:
            return
        if not self.enabled:
            if self._unsynchronised < 0:
                self._unsynchronised = idx
            return
        with self._lock:
            self._note_task()
            if not self._is_open:
                self._begin()
            gradient = self._params[idx].grad
            if gradient is None:
                self._fail(
                    f"the gradient of parameter {self._names[idx]!r} was gone right after it came: a hook on the parameter has "
                    "taken it away before it could be synchronised"
                )
            elif not gradient.is_sparse and _uses(gradient) > _OWN_USES:
                # Other nodes of this backward pass may still read its memory, such as a larger gradient that this one is part of.
                self._hold = min(self._hold, self._bucket_of[idx])
            self._mark(idx)

    def _note_task(self) -> None:
        _refuse_compiled_autograd()
        task = torch._C._current_graph_task_id()
        known = self._tasks.get(task)
        if known is not None and known() is not None:
            return
        self._raise_if_dead()
        end = _End(self, task)
        self._tasks[task] = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def _task_ended(self, task: int) -> None:
        with self._lock:
            self._tasks.pop(task, None)
            self._forget_dead()
            if self._is_open and not self._tasks and not self._closed:
                self._finish()

    def _begin(self) -> None:
        ungrouped = any(self._bucket_of[idx] < 0 and param.requires_grad for idx, param in enumerate(self._params))
        try:
            if self._engine is not None:
                self._engine.raise_pending()
            if self._engine is None or ungrouped:
                self._prepare()
            if self._engine is None:
                raise InternalError("a reducer was prepared and has no engine")
        except BaseException:
            fill_nan_gradients(self._params)
            raise
        self._pending = [sum(self._params[idx].requires_grad for idx in bucket.parameters) for bucket in self._buckets]
        self._times = [0] * len(self._params)
        self._order: list[int] = []
        self._next, self._hold = 0, len(self._buckets)
        self._is_open = True

    def _mark(self, idx: int) -> None:
        number = self._bucket_of[idx]
        if number < 0:
            self._fail(f"parameter {self._names[idx]!r} was unfrozen while the backward pass was under way")
        self._times[idx] += 1
        if self._times[idx] > 1:
            if number < self._next:
                self._fail(
                    f"parameter {self._names[idx]!r} got a second gradient in one backward pass, after the first had been sent; "
                    "reentrant checkpointing of a module that is used twice does that: use_reentrant=False does not"
                )
            return
        self._pending[number] -= 1
        if self._learning:
            self._order.append(idx)
            return
        while self._next < self._hold and self._pending[self._next] <= 0 and not self._buckets[self._next].is_late:
            self._hand_over()

    # One bucket.

    def _hand_over(self) -> None:
        assert self._engine is not None
        try:
            bucket = self._make_bucket(self._next)
        except ValueError as error:
            self._fail(str(error))
            raise
        self._sending(self._next)
        self._next += 1
        self._in_flight.append(bucket)
        self._engine.hand_over(bucket)

    def _make_bucket(self, number: int) -> GradientBucket:
        members = self._buckets[number]
        params = [self._params[idx] for idx in members.parameters]
        is_last = number + 1 == len(self._buckets)
        gradients: list[torch.Tensor | None] = []
        for idx, param in zip(members.parameters, params, strict=True):
            gradient = param.grad if param.requires_grad else None
            if gradient is not None:
                _check_gradient(self._names[idx], param, gradient, members.is_sparse)
            gradients.append(gradient)
        if members.is_sparse:
            return GradientBucket(number, is_last, params, None, _copy_of_sparse(params[0], gradients[0]))
        dense = [None if g is None else dense_like(param, g.detach()) for param, g in zip(params, gradients, strict=True)]
        return GradientBucket(number, is_last, params, dense)

    # The end of a step.

    def _finish(self) -> None:
        assert self._engine is not None
        with torch.no_grad():
            while self._next < len(self._buckets):
                self._hand_over()
            self._engine.wait_for_buckets()
            self._is_open = False
            done, self._in_flight = self._in_flight, []
            self._engine.raise_pending()
            for bucket in done:
                self._write_back(bucket)
        self._unsynchronised, self._waited_for = -1, False
        self._synchronised()
        if self._learning:
            self._learning = False
            repeated = [idx for idx, times in enumerate(self._times) if times > 1]
            self._learned(self._order, repeated)

    def _write_back(self, bucket: GradientBucket) -> None:
        sparse = bucket.buffer()
        if sparse is not None:
            (param,) = bucket.parameters()
            if param.grad is not None:
                param.grad.copy_(sparse)
            elif sparse._nnz() > 0:
                param.grad = sparse
            return
        assert bucket.gradient_list is not None
        for param, mean in zip(bucket.parameters(), bucket.gradient_list, strict=True):
            if mean is None:
                continue
            if not param.requires_grad:
                name = next(name for name, mine in zip(self._names, self._params, strict=True) if mine is param)
                self._fail(f"parameter {name!r} is frozen on this rank and trained on another")
            if param.grad is None:
                param.grad = mean
            elif param.grad.data_ptr() != mean.data_ptr() or param.grad.is_conj() or param.grad.is_neg():
                param.grad.copy_(mean)
            else:
                torch.autograd.graph.increment_version(param.grad)

    # Errors.

    def _forget_dead(self) -> None:
        self._tasks = {task: end for task, end in self._tasks.items() if end() is not None}

    def _raise_if_dead(self) -> None:
        self._forget_dead()
        if self._is_open and not self._tasks:
            self._fail(
                f"the backward pass before this one ended by an exception, after {self._next} of {len(self._buckets)} buckets"
            )

    def _fail(self, cause: str) -> None:
        """Raises after failing the step, here and on the other ranks."""
        assert self._engine is not None
        self._is_open = False
        self._engine.abort(cause)
        fill_nan_gradients([self._params[idx] for bucket in self._buckets[self._next :] for idx in bucket.parameters])
        self._engine.wait_for_buckets()
        self._in_flight = []
        self._engine.raise_pending()


def _refuse_compiled_autograd() -> None:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise GsyncError(
            "gsync.GradReducer does not work under compiled autograd; torch.compile of the model works without "
            "torch._dynamo.config.compiled_autograd"
        )


def _uses(gradient: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))


def _check_gradient(name: str, param: torch.Tensor, gradient: torch.Tensor, is_sparse: bool) -> None:
    if (gradient.shape, gradient.dtype, gradient.device) != (param.shape, param.dtype, param.device):
        raise ValueError(
            f"the gradient of parameter {name!r} is {gradient.dtype} {tuple(gradient.shape)} on {gradient.device}, "
            f"the parameter {param.dtype} {tuple(param.shape)} on {param.device}"
        )
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"the gradient of parameter {name!r} has layout {gradient.layout}; expected a dense or sparse tensor")
    if gradient.is_sparse != is_sparse:
        words = ("sparse", "dense") if gradient.is_sparse else ("dense", "sparse")
        raise ValueError(
            f"the gradient of parameter {name!r} is {words[0]}, and was expected to be {words[1]}: sparse are those of "
            "nn.Embedding and nn.EmbeddingBag with sparse=True, used by nothing else"
        )


def _copy_of_sparse(param: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is not None:
        return gradient.detach().clone()
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True)

"""`GradReducer`: gradients synchronised without DDP, and without its copies."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from . import _native, env
from .bucket_order import FIRST_BUCKET_BYTES, ReducerBucket, make_buckets, sparse_parameters
from .config import SyncConfig, make_config
from .errors import GsyncError, SyncError
from .groups import as_sync_error, find_group
from .model import Model, read_model
from .module_watch import ForwardHooks, ModuleWatch, named_parameters
from .python_reducer import PythonReducer
from .surface import Surface

_BUCKET_BYTES = 25 * 2**20
_LEAST_BUCKETS = 4  # of what is large enough for so many
_BROADCAST_BYTES = 250 * 2**20

_reduced: Any = WeakTensorKeyDictionary()  # parameter -> its reducer, weakly


class GradReducer(Surface):
    """Averages the gradients of a module over a process group, in every backward pass.

    When ``backward()`` returns, the gradients of all parameters are the mean over the ranks (on a GPU: on the current stream).
    They stay where autograd has put them: no copy of them is kept.

    Making one is collective over the group. Parameters and buffers are set to those of rank 0. The module keeps the reducer until
    `close` is called.

    Args:
        module: what is trained; not wrapped in DDP. It may be compiled, before or after.
        config: a `SyncConfig`; or give its fields as keywords. `bucket_mb` is 25 by default, less for models that would not fill
            four such buckets.
        process_group: the group to average over. Default: the default group.
        broadcast_buffers: set the buffers to those of rank 0 before each forward pass in training mode that is synchronised.
        scaler: a GradScaler whose scale residuals follow; with error_feedback only.

    Raises:
        TypeError: `module` is no module, or is a DDP instance.
        ValueError: there is nothing to train, something cannot be synchronised, the module has a reducer already, or the ranks
            were given different things; the message names the first.
        SyncError, SyncTimeoutError: another rank did not come.
    """

    def __init__(
        self,
        module: nn.Module,
        config: SyncConfig | None = None,
        process_group: Any = None,
        broadcast_buffers: bool = False,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        self.config = make_config(config, options)
        _check_module(module)
        self._set_up(scaler)
        self._group = find_group(process_group)
        self._model = model = read_model(module, self.config)
        self._params = model.alive()
        for name, param in zip(model.names, self._params, strict=True):
            if _reduced.get(param, lambda: None)() is not None:
                raise ValueError(f"parameter {name!r} belongs to a GradReducer already; close() that one first")
        self._buffers = [buffer for _, buffer in module.named_buffers()] if broadcast_buffers else []
        order = {id(param): idx for idx, param in enumerate(self._params)}
        registered = [order[id(param)] for param in named_parameters(module).values() if id(param) in order]
        self._initial_order = registered[::-1]  # gradients of the last layers tend to come first
        self._sparse = sparse_parameters(module, self._params)
        self._fixed = {
            "buffers": [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in module.named_buffers()],
            "bucket_mb": repr(self.config.bucket_mb),
            "broadcast_buffers": broadcast_buffers,
        }
        self._meetings = 0
        self._trained: set[int] = set()
        self._prepare_engine()
        if self._group.size() > 1:
            self._broadcast([*module.parameters(), *module.buffers()])

        this = weakref.ref(self)  # the hooks must not keep what owns them
        make_hooks: Any = PythonReducer if self._kind() == "python" else _native.require("GradReducer").GradReducer
        callbacks = [_weakly(weakref.WeakMethod(method)) for method in (self._prepare, self._learned)]
        if env.ENV.debug:
            callbacks += [_weakly(weakref.WeakMethod(method)) for method in (self._sending, self._synchronised)]
        self._hooks = make_hooks(self._params, model.names, *callbacks)
        self._hooks.set_engine(self._engine)
        self._set_buckets(self._initial_order, ())
        self._watch = ModuleWatch(module, {id(param) for param in self._params})
        self._forward_hooks = ForwardHooks(module, self, self._before_forward, self._note_backward, always=broadcast_buffers)
        for param in self._params:
            _reduced[param] = this

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave the gradients this rank's own, to be accumulated. What counts is where backward runs."""
        before, self._hooks.enabled = self._hooks.enabled, False
        try:
            yield
        finally:
            self._hooks.enabled = before

    def wait(self) -> None:
        """Raises the errors of synchronisation, and synchronises what no hook has reached.

        The end of a backward pass has waited already, so calling this is needed in two cases only: gradients were accumulated
        under `no_sync` alone and are to be averaged now; or a rank's backward pass may reach no parameter at all. Then every rank
        has to call it once in each step: it takes part with what this rank has, unless a backward pass has done so since the last
        call.

        Raises:
            SyncError, SyncTimeoutError: see docs/errors.md.
        """
        self._check()
        if not self._closed:
            self._hooks.wait()

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Lets ``optimizer.step()`` raise what is wrong: pending errors, and gradients that were not synchronised.

        Returns:
            A handle whose ``remove()`` undoes it.

        Raises:
            TypeError: it is no optimizer.
            ValueError: it has none of the module's parameters.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"attach: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        mine = {id(param) for param in self._params}
        if not any(id(param) in mine for group in optimizer.param_groups for param in group["params"]):
            raise ValueError("attach: the optimizer has none of the parameters of this GradReducer's module")
        this = weakref.ref(self)

        def before_step(*_: Any) -> None:
            reducer = this()
            if reducer is not None:
                reducer._before_step()

        return optimizer.register_step_pre_hook(before_step)

    def reset(self) -> None:
        """Makes it work again after an error, from the next backward pass on. To be called on every rank."""
        super().reset()
        self._hooks.set_engine(None)

    def close(self) -> None:
        """Ends the engine and takes all hooks away: the module's gradients are this rank's own from now on."""
        if self._closed:
            return
        self._hooks.close()
        self._forward_hooks.remove()
        for param in self._params:
            _reduced.pop(param, None)
        super().close()

    # Called by the hooks on the module and on the optimizer.

    def _before_forward(self, module: nn.Module) -> None:
        if not (self._hooks.enabled and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        self._check()
        if self._buffers and module.training and self._group.size() > 1:
            self._broadcast(self._buffers)

    def _note_backward(self) -> None:
        if self._hooks.enabled:
            self._hooks.note_backward()

    def _before_step(self) -> None:
        if self._closed:
            return
        self._check()
        idx = self._hooks.unsynchronised()
        if idx >= 0:
            raise GsyncError(
                "optimizer.step() with gradients that were accumulated under no_sync() and not synchronised since, such as that "
                f"of {self._names[idx]!r}; the last backward pass of a step belongs outside of no_sync(), or call wait()"
            )

    def _check(self) -> None:
        """Raises pending errors, and what would leave a gradient unsynchronised."""
        if self._closed:
            return
        self._raise_failure()
        try:
            self._hooks.check()
        except SyncError:
            self._end_checks()  # the others may be waiting there
            raise
        self._watch.check()
        idx = self._hooks.unhooked()
        if idx >= 0:
            raise GsyncError(
                f"parameter {self._names[idx]!r} was moved to another device or dtype after the GradReducer was made, and lost "
                "its hook; make the reducer after moving the module"
            )

    # Called at the begin of a step, and at the end of the first one.

    def _prepare(self) -> None:
        """An engine is missing, or a parameter that was frozen is to be trained."""
        self._raise_failure()
        if self._engine is None:
            self._prepare_engine()
            self._hooks.set_engine(self._engine)
        else:
            self._meetings += 1
            if self._meeting is not None:
                with self._failing():
                    self._meeting.agree(self._trained_now(), f"{self._generation}/trained/{self._meetings}")
            model, group = self._read()
            self._feedback.attach(model, group, self._find_path(model, group)[1])  # residuals for what is trained from now on
            self._hand_over(self._engine, model)
        self._set_buckets(self._initial_order, ())

    def _prepare_engine(self) -> None:
        model, group = self._read()
        self._meetings = 0
        with self._failing():
            self._make_engine(model, group, self._fixed | self._trained_now())

    def _learned(self, order: list[int], repeated: list[int]) -> None:
        """Takes the order in which gradients became ready on rank 0."""
        if self._meeting is not None:
            with self._failing():
                key = f"order/{self._meetings}"
                order, repeated = self._meeting.of_first_rank(key, [order, repeated], self._generation)
        known = set(order)
        self._set_buckets([*order, *(idx for idx in self._initial_order if idx not in known)], repeated, learning=False)

    # Called under GSYNC_DEBUG.

    def _sending(self, number: int) -> None:
        if self._checks is not None:
            self._checks.before_bucket(number, [self._params[idx] for idx in self._buckets[number].parameters])

    def _synchronised(self) -> None:
        members = [self._params[idx] for bucket in self._buckets for idx in bucket.parameters]
        if self._checks is not None:
            self._checks.end_of_step([p.grad for p in members if p.requires_grad and p.grad is not None])

    def _set_buckets(self, order: list[int], late: Any, learning: bool = True) -> None:
        """Buckets of what is trained now, and of what was."""
        self._trained |= {idx for idx, param in enumerate(self._params) if param.requires_grad}
        chosen = [idx for idx in order if idx in self._trained]
        self._buckets: list[ReducerBucket] = make_buckets(
            chosen, self._params, self._sparse, set(late), self._bucket_bytes(chosen)
        )
        self._hooks.set_buckets(self._buckets, learning)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error of the ranks' meeting is told again by every later call, and to the other ranks."""
        try:
            yield
        except SyncError as error:
            self._failure = error
            if self._engine is not None:
                self._engine.abort(str(error))
            raise

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Sets tensors to those of rank 0."""
        distinct = list({id(tensor): tensor.detach() for tensor in tensors}.values())
        try:
            # Version counters stay: a second forward pass before backward must not take the first one's buffers for changed.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(distinct)):
                dist._broadcast_coalesced(self._group, distinct, _BROADCAST_BYTES, 0)
        except RuntimeError as error:
            raise as_sync_error("gsync: the broadcast from rank 0 failed", error) from error

    def _trained_now(self) -> dict[str, list[str]]:
        pairs = zip(self._names, self._params, strict=True)
        return {"requires_grad": [f"{name} {param.requires_grad}" for name, param in pairs]}

    @property
    def _names(self) -> list[str]:
        return self._read()[0].names

    def _bucket_bytes(self, chosen: list[int]) -> int:
        """As configured; or as measured, or 25 MiB, less for small models: two payloads are in flight, whatever their size."""
        if self.config.bucket_mb is not None:
            return int(self.config.bucket_mb * 2**20)
        measured = self._tuner.bucket_mb if self._tuner is not None else None
        most = _BUCKET_BYTES if measured is None else measured << 20
        total = sum(self._params[idx].nbytes for idx in chosen)
        return max(FIRST_BUCKET_BYTES, min(most, total // _LEAST_BUCKETS))

    def _kind(self) -> str:
        native = _native.C
        return "native" if native is not None and isinstance(self._engine, native.Engine) else "python"

    def _read(self) -> tuple[Model, Any]:
        assert self._model is not None
        return self._model, self._group

    def _traced_module(self) -> nn.Module | None:
        return self._watch.module()


def _weakly(method: weakref.WeakMethod[Any]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        alive = method()
        if alive is None:
            raise GsyncError("the GradReducer was deleted in a backward pass")
        alive(*args)

    return call


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"GradReducer: expected a torch.nn.Module, got {type(module).__name__}")
    inner = getattr(module, "_orig_mod", module)
    if isinstance(inner, DistributedDataParallel):
        raise TypeError(
            "GradReducer takes the place of DistributedDataParallel: give it ddp.module and broadcast_buffers=True, "
            "or use gsync.register(ddp)"
        )
    for name, child in module.named_modules():
        if isinstance(child, DistributedDataParallel) or type(child).__name__ == "FullyShardedDataParallel":
            raise TypeError(f"GradReducer: submodule {name!r} is a {type(child).__name__}, which synchronises its own gradients")

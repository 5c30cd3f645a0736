"""`SyncState`: one model's synchronisation, from its configuration to its engine.

It may be built before torch.distributed is initialised. What it needs it finds at the first bucket: the DDP instance it was
registered on, and from that the parameters' names and the process group. Then it makes the engine.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .checkpoint import Feedback
from .config import SyncConfig, make_config
from .engine import Engine, check_device
from .errors import GsyncError, SyncError
from .gradient_list import fill_nan_gradients
from .groups import find_group
from .model import Model, read_model
from .surface import Surface


class SyncState(Surface):
    """Synchronises the gradients of one model; the state of `gsync.hook`.

    Args:
        config: a `SyncConfig`; or give its fields as keywords.
        process_group: the group to average over. Default: the one of the DDP instance. Another than that one raises.
        module: the DDP instance, or the module inside it. Default: found at the first bucket, by a search of all objects that
            Python's garbage collector knows (about 0.2 s, once).
        scaler: a GradScaler whose scale residuals follow; with error_feedback only.

    Raises:
        TypeError, ValueError: see `SyncConfig`; or `module` has no parameter to train, or `bucket_mb` is given, or a scaler
            without error_feedback.
    """

    def __init__(
        self,
        config: SyncConfig | None = None,
        process_group: Any = None,
        module: torch.nn.Module | None = None,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        self.config = _check_door(make_config(config, options))
        self._given_group = process_group
        self._module: weakref.ref[torch.nn.Module] | None = None
        if module is not None:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
            read_model(_inner(module), self.config)
            self._module = weakref.ref(module)
        self._is_copy = False
        self._set_up(scaler)

    def reset(self) -> None:
        """Makes a failed state work again, from the next backward pass on. To be called on every rank, after the error."""
        super().reset()
        _reset_ddp(self._module)

    def close(self) -> None:
        """Ends the engine. The model goes on with a plain mean over the group; `gsync.register` starts gsync again."""
        super().close()

    # What the hook and `register` call.

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Ties the state to a DDP instance and checks all that can be checked on this rank alone."""
        self._module = weakref.ref(ddp)
        self._model = None
        model, group = self._read()
        check_device(self.config, model, group)

    def rearm(self, config: SyncConfig, scaler: Any = None) -> None:
        """Starts a closed state again with another configuration, and without residuals."""
        self._feedback = Feedback(config, scaler)
        self.config = _check_door(config)
        self._closed = False
        self._generation += 1
        self._model = self._path = self._tuner = None
        self._totals = []
        check_device(config, *self._read())

    def engine_for(self, params: list[torch.Tensor]) -> Engine:
        """The engine, made at the first bucket; `params` are the bucket's."""
        if self._engine is not None and self._model is not None and (not params or self._model.has(params[0])):
            return self._engine
        try:
            self._raise_failure()
            return self._start(params)
        except BaseException as error:
            self._failure = error if isinstance(error, SyncError) else None
            fill_nan_gradients(self._model.alive() if self._model is not None else params)
            raise

    def submit(self, bucket: Any) -> Any:
        """Hands a bucket to the engine; returns a future of its buffer."""
        engine = self.engine_for(bucket.parameters())
        return engine.submit(bucket) if self._checks is None else self._checks.submit(bucket)

    def provide_engine(self) -> Any:
        """What the native hook asks for: the engine, or for a closed state the group to take a plain mean over."""
        return self.group() if self._closed else self.engine_for([])

    def group(self) -> Any:
        """The process group, found if need be."""
        return self._group if self._group is not None else self._read()[1]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._read()[0].device

    @property
    def is_idle_copy(self) -> bool:
        """Whether this is a copy, of another state, that serves no model."""
        return self._is_copy and self._module is None

    def _start(self, params: list[torch.Tensor]) -> Engine:
        self._model = None
        model, group = self._read()
        if params and not model.has(params[0]):
            raise ValueError("this SyncState belongs to another model; every model needs its own")
        if self._engine is not None:  # parameters that were frozen or missing at the start
            self._feedback.attach(model, group, self._find_path(model, group)[1])
            self._hand_over(self._engine, model)
            return self._engine
        module = self._module  # weakly, as the engine must not keep the model
        assert module is not None
        return self._make_engine(model, group, _buckets_of_ddp(module()), lambda: _reset_ddp(module))

    def _read(self) -> tuple[Model, Any]:
        """Model and group; finds the DDP instance where it was not given."""
        if self._module is None:
            self._module = weakref.ref(_find_ddp(self))
        module = self._module()
        if module is None:
            raise GsyncError("the model of this SyncState does not exist any more")
        group = self._given_group
        if isinstance(module, DistributedDataParallel):
            find_group()
            if group is not None and group is not module.process_group:
                raise ValueError(
                    f"process_group: given group {group.group_name!r}, but the DDP instance was made with "
                    f"{module.process_group.group_name!r}"
                )
            group = module.process_group
        self._group = find_group(group)
        if self._model is None:
            self._model = read_model(_inner(module), self.config)
        return self._model, self._group

    def _traced_module(self) -> torch.nn.Module | None:
        return self._module() if self._module is not None else None

    # Pickled and copied without model, group and engine: a copy is a state that has not been used.

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "step": self._step_now(), "seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config = state["config"]
        self._given_group = self._module = None
        self._set_up()
        self._step, self._seed = state["step"], state["seed"]
        self._is_copy = True


def _check_door(config: SyncConfig) -> SyncConfig:
    if config.bucket_mb is not None:
        raise ValueError(f"bucket_mb={config.bucket_mb}: DDP makes the buckets here; give DDP bucket_cap_mb instead")
    return config


def _reset_ddp(reference: weakref.ref[torch.nn.Module] | None) -> None:
    """Lets DDP forget that it still waits for the buckets of a failed backward pass."""
    module = reference() if reference is not None else None
    if isinstance(module, DistributedDataParallel):
        module.reducer._reset_state()


def _buckets_of_ddp(module: torch.nn.Module | None) -> dict[str, Any]:
    """What DDP cuts its buckets by. Where ranks differ in it, so do their payloads, and Gloo then ends the process."""
    if not isinstance(module, DistributedDataParallel):
        return {}
    found = {"find_unused_parameters of DDP": module.find_unused_parameters, "static_graph of DDP": module.static_graph}
    if module.find_unused_parameters and not module.static_graph:  # else the first bucket has all, and rank 0 cuts the others
        found["bucket_cap_mb of DDP"] = module.bucket_bytes_cap / 2**20
    return found


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _find_ddp(state: SyncState) -> DistributedDataParallel:
    """The DDP instance that `state` was registered on."""
    found = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel) and _holds(candidate, state):
            found.append(candidate)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            "this SyncState was not registered on a DistributedDataParallel instance that still exists; "
            "call ddp.register_comm_hook(state, gsync.hook), or give SyncState module="
        )
    raise ValueError(
        f"this SyncState was registered on {len(found)} DistributedDataParallel instances; every model needs its own"
    )


def _holds(ddp: DistributedDataParallel, state: SyncState) -> bool:
    return any(held is state for _, held in getattr(ddp, "_comm_hooks", ()))

"""`SyncState`: one model's synchronisation, from its configuration to its engine.

It may be built before torch.distributed is initialised. What it needs it finds at the first bucket: the DDP instance it was
registered on, and from that the parameters' names and the process group. Then it makes the engine.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .config import SyncConfig, make_config
from .engine import Engine, check_device, choose, make_engine
from .errors import GsyncError, SyncError
from .groups import Meeting, find_group, timeout_of
from .model import Model, read_model
from .python_engine import fill_nan_gradients
from .stats import SyncStats

_STATE_KEYS = ("version", "rank", "world_size", "seed", "step", "residuals")


class SyncState:
    """Synchronises the gradients of one model; the state of `gsync.hook`.

    Args:
        config: a `SyncConfig`; or give its fields as keywords.
        process_group: the group to average over. Default: the one of the DDP instance. Another than that one raises.
        module: the DDP instance, or the module inside it. Default: found at the first bucket, by a search of all objects that
            Python's garbage collector knows (about 0.2 s, once).

    Raises:
        TypeError, ValueError: see `SyncConfig`; or `module` has no parameter to train, or `bucket_mb` is given.
    """

    def __init__(
        self, config: SyncConfig | None = None, process_group: Any = None, module: torch.nn.Module | None = None, **options: Any
    ) -> None:
        self.config = _check_door(make_config(config, options))
        self._given_group = process_group
        self._module: weakref.ref[torch.nn.Module] | None = None
        if module is not None:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
            read_model(_inner(module), self.config)
            self._module = weakref.ref(module)
        self._set_up()

    def _set_up(self) -> None:
        self._engine: Engine | None = None
        self._failure: SyncError | None = None  # of the ranks' meeting, when there was no engine yet
        self._group: Any = None
        self._meeting: Meeting | None = None
        self._model: Model | None = None
        self._generation = 0
        self._closed = self._is_copy = False
        self._step, self._seed = 0, self.config.seed
        self._totals: list[dict[str, Any]] = []

    # What everybody may call; the same for every way in.

    @property
    def closed(self) -> bool:
        """Whether `close` was called, and the model goes on with a plain mean."""
        return self._closed

    def stats(self) -> SyncStats:
        """What synchronisation cost since the last reset. On CUDA it waits for the device."""
        return SyncStats.of(*self._totals, *([self._engine.stats()] if self._engine is not None else []))

    def reset_stats(self) -> None:
        """Sets the totals of `stats` to zero."""
        self._totals = []
        if self._engine is not None:
            self._engine.reset_stats()

    def grad_norm(self) -> torch.Tensor:
        """[] fp64: the 2-norm of all gradients as synchronised in the last step, the same bits on every rank.

        Never waits for a device.

        Raises:
            GsyncError: no step has been synchronised yet.
        """
        sums = self._started().sum_of_squares()
        if sums.device.type == "cpu":  # added in the order of names
            return sums.cumsum(0)[-1].sqrt()
        return sums.sum().sqrt()

    def found_nonfinite(self) -> torch.Tensor:
        """[] bool: whether a synchronised gradient of the last step is Inf or NaN. Never waits for a device.

        Raises:
            GsyncError: no step has been synchronised yet.
        """
        return self._started().found_nonfinite()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients are synchronised, in the order of names."""
        model = self._model or self._read()[0]
        return model.alive()

    def state_dict(self, consolidate: bool = False) -> dict[str, Any]:
        """This rank's own state in plain numbers, for ``torch.load(weights_only=True)``. No collective.

        Raises:
            ValueError: consolidate=True, which adds up residuals; no codec of this version has them.
        """
        if consolidate:
            raise ValueError("consolidate=True adds up residuals over ranks, and no codec of this version has them; leave it out")
        rank, world_size = (self._group.rank(), self._group.size()) if self._group is not None else (-1, -1)  # -1: not known yet
        return {
            "version": 1,
            "rank": rank,
            "world_size": world_size,
            "seed": self._seed,
            "step": self._step_now(),
            "residuals": {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`, of any rank and world size: step and seed are taken.

        Raises:
            ValueError: it is not a `state_dict` of a `SyncState`.
        """
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise ValueError(f"load_state_dict: expected a state_dict of gsync, but {', '.join(missing)} is missing")
        if state["version"] != 1:
            raise ValueError(f"load_state_dict: version {state['version']}, expected 1; it is of a newer gsync")
        self._step, self._seed = int(state["step"]), int(state["seed"])
        if self._engine is not None:
            self._engine.set_step(self._step)

    def scale_residuals(self, factor: float) -> None:
        """Multiplies all residuals by `factor`, for a change of the loss's scale. Codecs of this version have none: checks only.

        Raises:
            ValueError: `factor` is not a finite number above 0.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
            raise ValueError(f"scale_residuals: factor={factor!r}, expected a finite number above 0")

    def reset(self) -> None:
        """Makes a failed state work again, from the next backward pass on. To be called on every rank, after the error."""
        if self._engine is not None:
            self._step = self._engine.step
            self._totals.append(self._engine.stats())
            self._engine.close()
        self._engine = self._failure = None
        self._generation += 1
        _reset_ddp(self._module)

    def close(self) -> None:
        """Ends the engine. The model goes on with a plain mean over the group; `gsync.register` starts gsync again."""
        if self._engine is not None:
            self._step = self._engine.step
            self._totals.append(self._engine.stats())
            self._engine.close()
        self._engine = None
        self._closed = True

    # What the hook and `register` call.

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Ties the state to a DDP instance and checks all that can be checked on this rank alone."""
        self._module = weakref.ref(ddp)
        self._model = None
        model, group = self._read()
        check_device(self.config, model, group)

    def rearm(self, config: SyncConfig) -> None:
        """Starts a closed state again with another configuration."""
        self.config = _check_door(config)
        self._closed = False
        self._generation += 1
        self._model = None
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
            self._engine.set_parameters(*model.columns())
            return self._engine
        check_device(self.config, model, group)
        timeout_s = self.config.timeout_s or timeout_of(group, model.device)
        kind = choose(self.config, model.device)
        if group.size() > 1:
            if self._meeting is None:
                self._meeting = Meeting(group, timeout_s)
            self._meeting.agree(_description(self.config, model, kind), self._generation)
        module = self._module  # weakly, as the engine must not keep the model
        engine = make_engine(
            kind, self.config, model, group, self._meeting, self._generation, timeout_s, lambda: _reset_ddp(module)
        )
        engine.set_parameters(*model.columns())
        engine.set_step(self._step)
        self._engine = engine
        return engine

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

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _started(self) -> Engine:
        self._raise_failure()
        if self._engine is None:
            raise GsyncError("no backward pass has been synchronised yet")
        return self._engine

    def _step_now(self) -> int:
        return self._engine.step if self._engine is not None else self._step

    # Pickled and copied without model, group and engine: a copy is a state that has not been used.

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "step": self._step_now(), "seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config = state["config"]
        self._given_group = self._module = None
        self._set_up()
        self._step, self._seed = state["step"], state["seed"]
        self._is_copy = True

    def __repr__(self) -> str:
        phase = "closed" if self._closed else "not started" if self._engine is None else f"step {self._step_now()}"
        return f"SyncState({self.config}, {phase})"


def _check_door(config: SyncConfig) -> SyncConfig:
    if config.bucket_mb is not None:
        raise ValueError(f"bucket_mb={config.bucket_mb}: DDP makes the buckets here; give DDP bucket_cap_mb instead")
    return config


def _reset_ddp(reference: weakref.ref[torch.nn.Module] | None) -> None:
    """Lets DDP forget that it still waits for the buckets of a failed backward pass."""
    module = reference() if reference is not None else None
    if isinstance(module, DistributedDataParallel):
        module.reducer._reset_state()


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


def _description(config: SyncConfig, model: Model, kind: Any) -> dict[str, Any]:
    """What must be the same on every rank."""
    from . import __version__

    options = {name: repr(getattr(config, name)) for name in ("codec", "exchange", "average", "slice_mb", "transport")}
    return {"version of gsync": __version__, "engine": str(kind), "parameters": model.description(), **options}

"""gsync under Accelerate.

from gsync.integrations.accelerate import register
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sync = register(accelerator, model, codec="int8", error_feedback=True)
...
accelerator.save_state("checkpoint")      # on every rank, gsync's state with it; load_state brings it back
sync.close()
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gsync.config import SyncConfig
from gsync.errors import GsyncError, GsyncWarning
from gsync.hook import register as register_ddp
from gsync.state import SyncState

from .saved import FILE_NAME, read_state, take_state, write_state


def _library() -> Any:
    try:
        import accelerate
    except ImportError as error:
        raise GsyncError(f"gsync.integrations.accelerate needs Accelerate (pip install accelerate): {error}") from error
    return accelerate


def register(accelerator: Any, model: Any, config: SyncConfig | None = None, **options: Any) -> SyncState:
    """Lets gsync synchronise the gradients of a model that `accelerator.prepare` returned, and saves its state with the rest.

    Gradient accumulation (`accelerator.accumulate`) is as under DDP. With error_feedback residuals follow the accelerator's
    GradScaler, and the state is collective to save: every rank calls `accelerator.save_state`, as Accelerate wants it anyway. It
    lies in the checkpoint's folder as gsync.pt, for a second model gsync_1.pt, and so on. A state that was closed is not saved.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: what its `prepare` returned, compiled or not.
        config: a `SyncConfig`; or give its fields as keywords.

    Returns:
        The `SyncState`. To clip by the norm that synchronisation has computed, call
        ``gsync.clip_grad_norm_(sync, max_norm, scaler=accelerator.scaler)`` where `accelerator.sync_gradients`.

    Raises:
        GsyncError: Accelerate is not installed.
        TypeError: `accelerator` is none.
        ValueError: `model` is not one that it has prepared, is not wrapped in DistributedDataParallel, or has a hook.
    """
    if not isinstance(accelerator, _library().Accelerator):
        raise TypeError(f"register: expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    ddp = getattr(model, "_orig_mod", model)
    ways = [each for each in (model, ddp, getattr(ddp, "module", None)) if each is not None]
    places = [idx for idx, prepared in enumerate(accelerator._models) if any(prepared is each for each in ways)]
    if not places:  # Accelerate keeps what it was given to prepare: the module inside
        raise ValueError("register: expected a model that accelerator.prepare returned; this one is not among them")
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(
            "register: expected a model that Accelerate wraps in DistributedDataParallel; under distributed_type="
            f"{accelerator.distributed_type.value} it is a {type(model).__name__}"
        )
    use_scaler = config.error_feedback if config is not None else options.get("error_feedback", False)
    sync = register_ddp(model, config, scaler=accelerator.scaler if use_scaler else None, **options)
    name = FILE_NAME if places[0] == 0 else FILE_NAME.replace(".", f"_{places[0]}.")
    _save_with(accelerator, weakref.ref(sync), name)
    return sync


def _save_with(accelerator: Any, reference: weakref.ref[SyncState], name: str) -> None:
    """Hooks into `save_state` and `load_state` of the accelerator, which may live longer than the state."""

    def alive() -> SyncState | None:
        sync = reference()
        return None if sync is None or sync.closed else sync

    def save(models: list[Any], weights: list[Any], output_dir: Any) -> None:
        sync = alive()
        if sync is None:
            return
        state = take_state(sync)
        on_each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if on_each_node else accelerator.is_main_process:
            write_state(state, os.path.join(output_dir, name))

    def load(models: list[Any], input_dir: Any) -> None:
        sync, path = alive(), os.path.join(input_dir, name)
        if sync is None:
            return
        if os.path.exists(path):
            sync.load_state_dict(read_state(path))
        else:
            warnings.warn(f"gsync: there is no {path!r}: residuals and step stay as they are", GsyncWarning, stacklevel=3)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

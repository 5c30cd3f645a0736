"""The way in for DistributedDataParallel: `register`, or `SyncState` and `hook` where something else registers hooks."""

# No "from __future__ import annotations" here: DDP compares the annotations of its hooks with the classes themselves.
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _native, env
from .config import SyncConfig, make_config
from .engine import choose
from .errors import GsyncError
from .state import SyncState

HOOK_NAME = "gsync.hook"


def register(
    ddp_model: DistributedDataParallel, config: SyncConfig | None = None, scaler: Any = None, **options: Any
) -> SyncState:
    """Lets gsync synchronise the gradients of a DDP model, from the next backward pass on.

    Every rank of the model's process group must do it. A model whose `SyncState` was closed is started again.

    Args:
        ddp_model: the DistributedDataParallel instance, or what torch.compile made of it.
        config: a `SyncConfig`; or give its fields as keywords.
        scaler: a GradScaler to follow: residuals are in the loss's units, and are multiplied when its scale changes. With
            error_feedback only.

    Returns:
        The `SyncState`. DDP keeps it, so that it need not be kept.

    Raises:
        TypeError: `ddp_model` is no DDP instance, or see `SyncConfig`.
        ValueError: the model has a hook already, or is not one that gsync can serve.
    """
    config = make_config(config, options)
    ddp = getattr(ddp_model, "_orig_mod", ddp_model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"register: expected a torch.nn.parallel.DistributedDataParallel, got {type(ddp_model).__name__}")
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            'torch._dynamo.config.optimize_ddp="python_reducer" takes the buckets away from DDP; use "ddp_optimizer"'
        )
    # A deep copy of a DDP model has the hooks in its books, but not in its reducer.
    ddp._comm_hooks = [
        (held, state) for held, state in ddp._comm_hooks if not (isinstance(state, SyncState) and state.is_idle_copy)
    ]
    for held, state in ddp._comm_hooks:
        if isinstance(state, SyncState) and state.closed:
            state.rearm(config, scaler)
            return state
        name = getattr(held, "__qualname__", repr(held))
        raise ValueError(
            f"the model has a communication hook already ({name}); DDP takes one, and keeps it. "
            "A gsync state can be closed and registered again with other options"
        )
    state = SyncState(config, module=ddp, scaler=scaler)
    state.bind(ddp)
    try:
        if choose(config, state.device)[0] == "native" and not env.ENV.debug:
            ddp._check_comm_hook(hook)
            _native.require("register").register_ddp_hook(ddp.reducer, _provider(weakref.ref(state)))
            ddp._comm_hooks.append((hook, state))
        else:
            ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        if "register" not in str(error):
            raise
        raise ValueError(f"the model has a communication hook already, one built into torch: {error}") from error
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(HOOK_NAME)
    return state


def hook(state: SyncState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Synchronises one bucket: the communication hook for ``ddp.register_comm_hook(SyncState(...), gsync.hook)``.

    Args:
        state: a `SyncState`, registered on one model.
        bucket: DDP's. Its buffer holds the mean when the future is done.

    Returns:
        A future of the bucket's buffer.

    Raises:
        SyncError, SyncTimeoutError: see docs/errors.md.
        TypeError, ValueError: something was used wrongly; nothing was sent.
    """
    if not isinstance(state, SyncState):
        raise TypeError(f"gsync.hook: the state must be a gsync.SyncState, got {type(state).__name__}")
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            f"gsync.hook: expected a dist.GradBucket, got {type(bucket).__name__}; "
            'torch._dynamo.config.optimize_ddp="python_reducer" is not supported, use "ddp_optimizer"'
        )
    if state.closed:
        return plain_mean(state.group(), bucket)
    return state.submit(bucket)


def _provider(reference: "weakref.ref[SyncState]") -> Callable[[], Any]:
    """Gives the native hook its engine. Weakly: a cycle through DDP's reducer in C++ would never be collected."""

    def provide() -> Any:
        state = reference()
        if state is None:
            raise GsyncError("the SyncState of this model is gone: something has emptied the model's _comm_hooks, which keeps it")
        return state.provide_engine()

    return provide


def plain_mean(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook: divide, then sum over the group."""
    buffer = bucket.buffer().div_(group.size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])

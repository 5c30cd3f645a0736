"""What every engine can do, whichever it is: the native one (`gsync._C.Engine`) or the one in Python (`gsync.python_engine`).

An engine belongs to one `SyncState`. It takes DDP's buckets in order, exchanges them, and writes the mean back into each bucket's
own buffer. Steps are counted by it: a step is one synchronised backward pass, from the bucket with index 0 to the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import _native, backends
from .config import SyncConfig
from .groups import Meeting, as_sync_error, is_gloo
from .hosts import Place
from .lanes import Lanes
from .model import Model
from .python_engine import PythonEngine
from .spans import Span


class Engine(Protocol):
    """The engine as `SyncState` and the hook use it. All errors of synchronisation are `gsync.SyncError`."""

    def set_parameters(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        codecs: Sequence[str],
        block_sizes: Sequence[int] = (),
        residuals: Sequence[tuple[torch.Tensor, torch.Tensor] | None] = (),
        exchanges: Sequence[str] = (),
    ) -> None:
        """Tells the model's parameters, each with its name and codec, in the order of names. Holds them weakly.

        May be called again, from the next bucket on.

        Args:
            block_sizes: of the block codecs, 0: their own; empty: 0 for all.
            residuals: sender's and reducer's of each (gsync/residuals.py), which every step then changes; empty: none.
            exchanges: of each; empty: the engine's for all.
        """

    def call_at(self, step: int, callback: Callable[[], None]) -> None:
        """Calls `callback` once: before the first bucket of step `step`, or of the first one after it; no bucket is under way.

        What it raises fails the engine.
        """

    def time_steps(self) -> None:
        """Times steps from now on. On CUDA it costs two events a step."""

    def take_step_times(self) -> tuple[list[float], list[float]]:
        """Ends that; waits for the device.

        Returns:
            In ms: of each step, from the hand-over of the first bucket to the end of the last; of each bucket, summed over the
            steps, from the hand-over of the first to its own (on CUDA empty).
        """

    def last_buckets(self) -> list[list[int]]:
        """Of each bucket of the last finished step, the positions of its parameters in the order of names."""

    def transport(self, level: str = "all") -> Any:
        """What moves bytes over "all" ranks, where hosts have several also over the "inner" or "outer" ones; None for one rank.

        Its `all_reduce(payload)`, `all_to_all(out, payload)` and `all_gather(out, payload)` return something to `wait()` for. To
        be used while no bucket is under way.
        """

    def follow_loss_scale(self, scale: torch.Tensor, unit: torch.Tensor) -> None:
        """Multiplies residuals by scale / unit at the start of each step where these differ, and sets `unit` to `scale`."""

    def submit(self, bucket: Any) -> Any:
        """Starts the exchange of a bucket and returns a future of its buffer. Raises at once if the engine has failed."""

    def stats(self) -> dict[str, Any]:
        """Totals since the last reset; the entries are those of `SyncStats`."""

    def reset_stats(self) -> None:
        """Sets the totals to zero."""

    def start_trace(self, capacity: int) -> None:
        """Keeps up to `capacity` spans from now on: when each slice is packed, exchanged, unpacked. Waits for the device."""

    def take_trace(self) -> tuple[list[Span], int]:
        """Ends that; returns the spans, and how many found no room. Waits for the device."""

    def sum_of_squares(self) -> torch.Tensor:
        """[num_params] fp64: of each parameter's gradient in the last finished step, in the order of names."""

    def found_nonfinite(self) -> torch.Tensor:
        """[] bool: whether the last finished step has Inf or NaN in a gradient."""

    def raise_pending(self) -> None:
        """Raises the error of an engine that has failed, and gives warnings that its thread had to keep."""

    def abort(self, reason: str) -> None:
        """Makes the engine fail, and with it, at once, those of the other ranks."""

    def close(self) -> None:
        """Ends the engine. Waits for nothing."""

    @property
    def failed(self) -> bool:
        """Whether an error has ended the engine."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    @property
    def step(self) -> int:
        """Steps finished so far."""

    def set_step(self, step: int) -> None:
        """Counts steps from `step` on."""

    def set_seed(self, seed: int) -> None:
        """Seed of stochastic rounding, from the next bucket on; 0 at the start."""


def choose(config: SyncConfig, device: torch.device) -> tuple[str, str]:
    """Which engine serves a device, "native" or "python", and the backend that computes.

    Raises:
        ValueError, GsyncError: the backend asked for cannot serve the device.
    """
    has_native = _native.C is not None and hasattr(_native.C, "Engine") and _native.C.has_kernels(device.type)
    if config.backend in ("auto", "native") and has_native:
        return "native", "native"
    return "python", backends.resolve(config.backend, device)


def check_device(config: SyncConfig, model: Model, group: Any) -> None:
    """Checks the options that depend on the device and the group.

    Raises:
        ValueError: an option cannot act there.
    """
    device = model.device
    engine, backend = choose(config, device)
    if device.type != "cuda":
        for name in ("stream_priority", "nccl_min_ctas", "nccl_max_ctas"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}={getattr(config, name)} acts on CUDA only; the model is on {device}")
        if config.transport == "nccl":
            raise ValueError(f"transport='nccl' needs a model on CUDA; this one is on {device}")
        return
    if engine == "python":
        if config.is_auto:
            raise ValueError(f"codec='auto' on CUDA needs gsync's CUDA kernels, which time a step; backend {backend!r} does not")
        for name in ("nccl_min_ctas", "nccl_max_ctas", "timeout_s"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"{name}={getattr(config, name)} needs a communicator of gsync's own, and backend {backend!r} "
                    "uses the process group's"
                )
        if config.transport == "nccl":
            raise ValueError(
                f"transport='nccl' needs gsync's CUDA kernels; backend {backend!r} uses the process group's transport"
            )
    elif config.transport == "nccl":
        reason = why_not_nccl(model, group)
        if reason and os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
            raise ValueError(
                f"transport='nccl': {reason}; set NCCL_LAUNCH_ORDER_IMPLICIT=1 if NCCL is 2.26 or newer, or use 'auto'"
            )


def why_not_nccl(model: Model, group: Any) -> str:
    """Why a communicator of gsync's own could deadlock with others on the device; "" if it cannot."""
    if group._get_backend(model.device).name() != "nccl":
        return f"the process group's backend on {model.device} is {group._get_backend(model.device).name()}"
    if group.size() != dist.get_world_size():
        return "the group does not span the world, so that other groups may communicate at the same time"
    return f"{model.communicates} communicates in the backward pass" if model.communicates else ""


def uses_nccl(config: SyncConfig, model: Model, group: Any) -> bool:
    """Whether the native engine moves bytes over a NCCL communicator of its own."""
    if model.device.type != "cuda" or config.transport == "process_group":
        return False
    return config.transport == "nccl" or not why_not_nccl(model, group)


def why_not_hierarchical(kind: tuple[str, str], config: SyncConfig, model: Model, group: Any) -> str:
    """Why the ranks of a host, and those between hosts, cannot have communicators of their own; "" if they can."""
    device = model.device
    if device.type == "cpu":
        name = group._get_backend(device).name()
        return "" if is_gloo(group, device) else f"the process group's backend on cpu is {name}, expected gloo"
    if kind[0] == "native" and uses_nccl(config, model, group):
        return ""
    return "on CUDA it needs transport 'nccl' and gsync's CUDA kernels"


def make_engine(
    kind: tuple[str, str],
    config: SyncConfig,
    model: Model,
    group: Any,
    meeting: Meeting | None,
    exchange: str,
    place: Place,
    generation: int,
    timeout_s: float,
    on_failure: Callable[[], None],
) -> Engine:
    """Makes the engine. Collective over the group where it makes groups of its own.

    Args:
        exchange: what `config.exchange` comes to.
        place: where this rank stands among hosts, where there may be hierarchical.
        on_failure: makes DDP ready for the next forward pass, where the engine kept it from ending a backward pass.

    Raises:
        SyncError, SyncTimeoutError: another rank did not come.
    """
    engine, backend = kind
    device, rank, world_size = model.device, group.rank(), group.size()
    encoding: dict[str, Any] = {name: getattr(config, name) for name in ("rounding", "start_step", "measure_every")}
    scale = 1.0 / world_size if config.average else 1.0
    slice_bytes = max(1, int(config.slice_mb * 2**20))
    own_groups = device.type == "cpu" and is_gloo(group, device)
    # Lanes over all ranks; under hierarchical also over those of the host, and over those of the same local rank.
    levels: dict[str, list[Any]] = {}
    has_levels = place.ranks_per_host > 1
    if meeting is not None and own_groups and has_levels:
        # Under hierarchical alone they carry sparse gradients, one after the other.
        levels["all"] = meeting.private_gloo(generation) if config.is_auto else 2 * meeting.private_gloo(generation, 1)
        levels["inner"] = meeting.private_gloo(generation, of=f"host{place.host}/", ranks=place.inner)
        levels["outer"] = meeting.private_gloo(generation, of=f"local{place.local_rank}/", ranks=place.outer)
    elif meeting is not None:
        levels["all"] = meeting.private_gloo(generation) if own_groups else [group, group]
    if engine == "python":
        return PythonEngine(
            {name: Lanes(first, second, own_groups) for name, (first, second) in levels.items()},
            device,
            place,
            rank,
            world_size,
            exchange,
            scale,
            slice_bytes,
            model.label,
            backend,
            own_groups,
            config.stream_priority,
            on_failure,
            **encoding,
        )
    native = _native.C
    assert native is not None
    transport: Any = None
    position = (place.local_rank, place.ranks_per_host, place.host, place.num_hosts)
    if meeting is not None and uses_nccl(config, model, group):
        try:
            transport = native.NcclTransport(
                meeting.store(generation), rank, world_size, str(device), timeout_s, config.nccl_min_ctas, config.nccl_max_ctas
            )
            if has_levels:
                inner = transport.split(place.host, place.local_rank, place.ranks_per_host)
                outer = transport.split(place.local_rank, place.host, place.num_hosts)
                transport = native.HierarchicalTransport(transport, inner, outer, *position)
        except RuntimeError as error:
            raise as_sync_error(f"gsync: {model.label} on rank {rank} of {world_size}: no NCCL communicator", error) from error
    elif levels:
        made = {"all": native.C10dTransport(*levels.pop("all"), rank, world_size, timeout_s, str(device), own_groups)}
        for name, ranks in (("inner", place.inner), ("outer", place.outer)):
            if name in levels:
                lanes = levels.pop(name)
                made[name] = native.C10dTransport(
                    *lanes, ranks.index(rank), len(ranks), timeout_s, str(device), own_groups, list(ranks)
                )
                del lanes
        transport = made["all"] if len(made) == 1 else native.HierarchicalTransport(*made.values(), *position)
    arguments = (str(device), world_size, rank, exchange, scale, slice_bytes, timeout_s, config.stream_priority, model.label)
    return native.Engine(transport, *arguments, **encoding)

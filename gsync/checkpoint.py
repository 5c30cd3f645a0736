"""Error feedback of one state across its life: residuals from the first bucket on, in checkpoints, and under a loss scale.

A state may be loaded before model and group are known; then it is kept, and applied when they are.

    residuals of a checkpoint, by parameter name
        of one rank     {"sender": [shape], "reducer": [numel], "first": int}      see gsync/residuals.py
                        {"sender": [numel], "sender_first": int, ...}              of a shard, under hierarchical
        consolidated    {"error": [shape]}: the sum of all ranks' residuals, which a world shares out among the ranks that hold a
                        residual of an element: all of them, under hierarchical one on each host
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .config import SyncConfig
from .errors import GsyncWarning
from .hosts import Place
from .model import Model
from .residuals import Residual, Residuals

_BATCH_NUMEL = 1 << 22  # elements that one collective of `consolidate` adds up
_KEYS = ("version", "rank", "world_size", "seed", "step", "consolidated", "loss_scale", "residuals")


class Feedback:
    """Residuals, and what was loaded for them before there were any.

    Args:
        config: without error_feedback there are none, ever.
        scaler: a GradScaler to follow, or None.

    Raises:
        TypeError: `scaler` is no GradScaler.
        ValueError: a scaler is given without error_feedback.
    """

    def __init__(self, config: SyncConfig, scaler: Any = None) -> None:
        self._is_on = config.error_feedback
        self._residuals: Residuals | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._scaler = _check_scaler(config, scaler)

    @property
    def num_bytes(self) -> int:
        """Bytes of the residuals held now."""
        return self._residuals.num_bytes if self._residuals is not None else 0

    def attach(self, model: Model, group: Any, place: Place) -> None:
        """Makes the residuals of a model, zeros or what was loaded. Nothing on a group of one rank, which encodes nothing."""
        if self._is_on and group.size() > 1:
            if self._residuals is None:
                self._residuals = Residuals(place, model.device)
            self._residuals.cover(model)
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            if message := _load(self._residuals, loaded, group.rank(), group.size()):
                warnings.warn(f"load_state_dict: {message}", GsyncWarning, stacklevel=4)
            if self._residuals is not None and self._scaler is None:  # from here on in the units of the loss itself
                self._residuals.scale(1 / float(self._residuals.unit))
                self._residuals.unit.fill_(1)

    def hand_to(self, engine: Any, model: Model) -> None:
        """Tells an engine the parameters of a model, with their residuals, and the loss scale to follow."""
        params, names, codecs, block_sizes = model.columns()
        columns = self._residuals.columns(names) if self._residuals is not None else []
        engine.set_parameters(params, names, codecs, block_sizes, columns)
        if self._residuals is not None and self._scaler is not None:
            engine.follow_loss_scale(_scale_tensor(self._scaler, model.device), self._residuals.unit)

    def scale(self, factor: float) -> None:
        """Multiplies all residuals.

        Raises:
            ValueError: `factor` is not a finite number above 0.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
            raise ValueError(f"scale_residuals: factor={factor!r}, expected a finite number above 0")
        if self._residuals is not None:
            self._residuals.scale(factor)
        elif self._loaded is not None:
            entries = {
                name: {key: value * factor if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
                for name, entry in self._loaded["residuals"].items()
            }
            self._loaded = {**self._loaded, "residuals": entries}

    def to_state(self, group: Any, seed: int, step: int, consolidate: bool) -> dict[str, Any]:
        """A `state_dict`. Collective over `group` with `consolidate`, else not.

        Raises:
            ValueError: consolidate without error_feedback: there is nothing to add up.
        """
        if consolidate and not self._is_on:
            raise ValueError(
                "consolidate=True adds up residuals over ranks, and without error_feedback there are none; leave it out"
            )
        rank, world_size = (group.rank(), group.size()) if group is not None else (-1, -1)  # -1: not known yet
        head = {"version": 1, "rank": rank, "world_size": world_size, "seed": seed, "step": step, "consolidated": consolidate}
        if self._residuals is None:
            if self._loaded is not None:  # not applied yet, so that it goes on as it is
                return {**self._loaded, "seed": seed, "step": step}
            return {**head, "loss_scale": 1.0, "residuals": {}}
        table = self._residuals.table
        entries: dict[str, dict[str, Any]] = {}
        if consolidate:
            for name, error in _sum_over_ranks(table, group).items():
                entries[name] = {"error": table[name].shaped(error).clone()}
        else:
            for name, kept in table.items():
                if kept.is_shard:
                    entries[name] = {"sender": kept.sender.clone(), "sender_first": kept.sender_first}
                else:
                    entries[name] = {"sender": kept.shaped(kept.sender).clone()}
                entries[name] |= {"reducer": kept.reducer.clone(), "first": kept.first}
        return {**head, "loss_scale": float(self._residuals.unit), "residuals": entries}

    def load(self, state: Mapping[str, Any]) -> None:
        """Keeps a `state_dict` until `attach`.

        Raises:
            ValueError: it is not a `state_dict` of gsync.
        """
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise ValueError(f"load_state_dict: expected a state_dict of gsync, but {', '.join(missing)} is missing")
        if state["version"] != 1:
            raise ValueError(f"load_state_dict: version {state['version']}, expected 1; it is of a newer gsync")
        keys = {"error"} if state["consolidated"] else {"sender", "reducer", "first"}
        for name, entry in state["residuals"].items():
            if not isinstance(entry, Mapping) or set(entry) - {"sender_first"} != keys:
                raise ValueError(f"load_state_dict: residuals[{name!r}] should have {', '.join(sorted(keys))}")
        self._loaded = state


def _load(residuals: Residuals | None, state: Mapping[str, Any], rank: int, world_size: int) -> str:
    """Sets residuals to those of a state, and those it does not have to zero. Returns what was dropped, in words, or ""."""
    entries = state["residuals"]
    if residuals is None:
        if not entries:
            return ""
        why = "a group of one rank encodes nothing" if world_size == 1 else "error_feedback is off"
        return f"the residuals of {len(entries)} parameters are dropped: {why}"
    for kept in residuals.table.values():
        kept.sender.zero_()
        kept.reducer.zero_()
    residuals.unit.fill_(state["loss_scale"])
    if not entries:
        return ""
    if not state["consolidated"] and (state["rank"], state["world_size"]) != (rank, world_size):
        return (
            f"the residuals of rank {state['rank']} of {state['world_size']} are dropped on rank {rank} of {world_size}; seed "
            "and step are taken. state_dict(consolidate=True) makes one that carries over"
        )
    reasons: dict[str, list[str]] = {}
    for name in sorted({*entries, *residuals.table}):
        if name not in residuals.table:
            reason = "dropped, since they have no parameter any more"
        elif name not in entries:
            reason = "zero, since the state has none"
        else:
            reason = _load_one(residuals.table[name], entries[name], residuals.place.num_hosts)
        if reason:
            reasons.setdefault(reason, []).append(name)
    return "; ".join(f"residuals of {_listed(names)} are {reason}" for reason, names in reasons.items())


def _load_one(kept: Residual, entry: Mapping[str, Any], num_holders: int) -> str:
    """`num_holders`: ranks that hold a sender residual of the same element."""
    if "error" in entry:
        error = entry["error"]
        if tuple(error.shape) != kept.shape:
            return f"dropped, since the shape was {tuple(error.shape)} and is {kept.shape}"
        flat = torch.empty(kept.numel, device=kept.sender.device)
        kept.shaped(flat).copy_(error)
        kept.sender.copy_(flat[kept.sender_first :][: kept.sender.numel()]).div_(num_holders)
        return ""
    source = entry["sender"]
    if ("sender_first" in entry) is not kept.is_shard:
        return "dropped, since the exchange was another"
    if kept.is_shard:
        if (entry["sender_first"], source.numel()) != (kept.sender_first, kept.sender.numel()):
            return "dropped, since this rank encodes other elements now"
        kept.sender.copy_(source)
        same_order = True
    else:
        if tuple(source.shape) != kept.shape:
            return f"dropped, since the shape was {tuple(source.shape)} and is {kept.shape}"
        kept.shaped(kept.sender).copy_(source)
        same_order = tuple(source.stride()) == kept.stride or source.numel() == 0
    if not same_order or (entry["first"], entry["reducer"].numel()) != (kept.first, kept.reducer.numel()):
        return "dropped as far as this rank reduces, since it reduces other elements now"
    kept.reducer.copy_(entry["reducer"])
    return ""


def _sum_over_ranks(table: Mapping[str, Residual], group: Any) -> dict[str, torch.Tensor]:
    """Of each parameter the sum of all ranks' sender and reducer residuals, flat."""
    totals = {}
    names = sorted(table)
    while names:
        batch: list[str] = []
        numel = 0
        while names and (not batch or numel + table[names[0]].numel <= _BATCH_NUMEL):
            numel += table[names[0]].numel
            batch.append(names.pop(0))
        flat = table[batch[0]].sender.new_zeros(numel)
        parts = dict(zip(batch, flat.split([table[name].numel for name in batch]), strict=True))
        for name, part in parts.items():
            kept = table[name]
            part[kept.sender_first :][: kept.sender.numel()] += kept.sender
            part[kept.first :][: kept.reducer.numel()] += kept.reducer
        dist.all_reduce(flat, group=group)
        totals.update(parts)
    return totals


def _check_scaler(config: SyncConfig, scaler: Any) -> Any:
    if scaler is None:
        return None
    if not hasattr(scaler, "is_enabled") or (scaler.is_enabled() and not hasattr(scaler, "_scale")):
        raise TypeError(f"scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}")
    if not config.error_feedback:
        raise ValueError(
            "scaler: it scales residuals, and without error_feedback there are none; "
            "for clipping give it to gsync.clip_grad_norm_"
        )
    return scaler if scaler.is_enabled() else None


def _scale_tensor(scaler: Any, device: torch.device) -> torch.Tensor:
    """The tensor in which a GradScaler keeps its scale, from its first use on for all its life."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    scale: torch.Tensor = scaler._scale
    if scale.device != device:
        raise ValueError(f"scaler: it scales losses on {scale.device}, the model is on {device}")
    return scale


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

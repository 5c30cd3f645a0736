"""What a trainer saves of a state and loads again: the same dictionary on every rank, also for another world size."""

from __future__ import annotations

import os
from typing import Any

import torch

from gsync.errors import GsyncError
from gsync.state import SyncState

FILE_NAME = "gsync.pt"


def take_state(sync: SyncState) -> dict[str, Any]:
    """Returns what to save. With error_feedback it is consolidated: collective, for every rank, between steps.

    A run goes on from what it saves, its residuals shared out evenly, as a run that is resumed from it does. So both have the
    same bits, no error is lost, and one copy of the residuals is enough for all ranks.

    Raises:
        GsyncError: not every rank came.
    """
    if not sync.config.error_feedback:
        return sync.state_dict()
    try:
        state = sync.state_dict(consolidate=True)
    except RuntimeError as error:
        raise GsyncError(
            "the residuals of all ranks could not be added up to be saved; every rank has to save, not rank 0 alone, which then "
            f"writes the file: {error}"
        ) from error
    sync.load_state_dict(state)
    return state


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state with its tensors on the CPU."""
    residuals = {
        name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
        for name, entry in state["residuals"].items()
    }
    return {**state, "residuals": residuals}


def write_state(state: dict[str, Any], path: str) -> None:
    """Writes the file whole or not at all."""
    torch.save(on_cpu(state), f"{path}.new")
    os.replace(f"{path}.new", path)


def read_state(path: str) -> dict[str, Any]:
    """Reads what `write_state` wrote."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

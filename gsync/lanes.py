"""The collectives of the Python engine."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Lanes:
    """The collectives of one engine. `private`: the lanes are the engine's own, and can be aborted.

    all_reduce and all_to_all go on lane 0, all_gather on lane 1, so that the order in each is fixed whatever the timing.
    """

    def __init__(self, lane0: Any, lane1: Any, private: bool) -> None:
        self._lane0, self._lane1, self.private = lane0, lane1, private

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._lane0.allreduce([tensor])

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return self._lane0.alltoall_base(out, tensor, [], [])

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return self._lane1._allgather_base(out, tensor)

    def abort(self) -> None:
        """Closes the connections, so that the other ranks fail at once instead of waiting."""
        lanes = {self._lane0, self._lane1} if self.private else ()
        for lane in lanes:
            with contextlib.suppress(RuntimeError):  # a lane that is dead already
                lane.abort()

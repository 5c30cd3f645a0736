"""A module under GradReducer, as the main job knows models under DDP."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import nn

import gsync


class Reduced(nn.Module):
    """Has what the job uses of DistributedDataParallel: forward, `module`, `process_group`, `no_sync`.

    Attributes:
        bucket_mb: for the reducer; None for its default.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None, bucket_mb: float | None) -> None:
        super().__init__()
        self.module, self.process_group, self.bucket_mb = module, process_group, bucket_mb
        self._reducer: gsync.GradReducer | None = None

    def reduce(self, config: gsync.SyncConfig) -> gsync.GradReducer:
        """Gives the module a GradReducer. Collective."""
        self._reducer = gsync.GradReducer(self.module, config, self.process_group)
        return self._reducer

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Leaves gradients this rank's own."""
        return self._reducer.no_sync() if self._reducer is not None else contextlib.nullcontext()

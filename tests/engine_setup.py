"""Engines for tests: native engines over private Gloo groups, and buckets to hand to them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gsync import _native


def make_lane(tag: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return a Gloo group over the default group's store that nobody else knows."""
    store = dist.distributed_c10d._get_default_store()
    return dist.ProcessGroupGloo(dist.PrefixStore(tag, store), rank, world_size, timedelta(seconds=timeout_s))


def make_transport(rank: int, world_size: int, timeout_s: float = 20.0) -> Any:
    """Return a transport of two new lanes, which it alone holds."""
    number = dist.distributed_c10d._get_default_store().add(f"engines/{rank}", 1)
    return _native.C.C10dTransport(
        main=make_lane(f"engine{number}/0", rank, world_size, timeout_s),
        gather=make_lane(f"engine{number}/1", rank, world_size, timeout_s),
        rank=rank,
        size=world_size,
        timeout_s=timeout_s,
    )


def make_engine(
    module: torch.nn.Module,
    rank: int,
    world_size: int,
    codec: str = "fp32",
    exchange: str = "all_reduce",
    timeout_s: float = 20.0,
    slice_bytes: int = 25 << 20,
    codecs: Sequence[str] | None = None,
) -> Any:
    """Return an engine for the parameters of `module`, taking the mean."""
    transport = make_transport(rank, world_size, timeout_s) if world_size > 1 else None
    engine = _native.C.Engine(
        transport,
        device="cpu",
        world_size=world_size,
        rank=rank,
        exchange=exchange,
        scale=1.0 / world_size,
        slice_bytes=slice_bytes,
        timeout_s=timeout_s,
        label="test",
    )
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    engine.set_parameters([parameter for _, parameter in named], [name for name, _ in named], codecs or [codec] * len(named))
    return engine


def make_ddp(module: torch.nn.Module, engine: Any = None, **options: Any) -> DistributedDataParallel:
    """Return `module` under DDP, synchronised by `engine` through the native hook."""
    ddp = DistributedDataParallel(module, **options)
    if engine is not None:
        _native.C.register_ddp_hook(ddp.reducer, lambda: engine)
    return ddp


class Listed(torch.nn.Module):
    """Parameters of the given lengths; the gradient of each is its row of `inputs`."""

    def __init__(self, numels: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels])

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sum((part * row).sum() for part, row in zip(self.parts, inputs, strict=True))
        assert isinstance(total, torch.Tensor)
        return total.real if total.is_complex() else total


def rows(
    numels: Sequence[int], rank: int, step: int = 0, dtype: torch.dtype = torch.float32, spread: float = 1.0
) -> list[torch.Tensor]:
    """Return this rank's gradients for a step: any rank can make any other's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(torch.randn(numel, generator=generator, dtype=torch.float32) * spread).to(dtype) for numel in numels]

"""What the tests of GradReducer share: models, data, and the gradients that a single process would have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from ddp_cases import ENGINES, why_no_engine
from torch.nn.parallel import DistributedDataParallel

import gsync


def each_engine() -> list[Any]:
    """The engines as parameters of a test; those that are not built here are skipped."""
    return [
        pytest.param(name, marks=pytest.mark.skip(reason=why_no_engine(name)) if why_no_engine(name) else ()) for name in ENGINES
    ]


class Layouts(nn.Module):
    """Parameters in several memory orders: channels_last, transposed, with a gap, a scalar, an empty one."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.linear = nn.Linear(13, 7)
        self.transposed = nn.Parameter(torch.randn(7, 19).t())
        self.gap = nn.Parameter(torch.randn(7, 8)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.view(-1, 3, 5, 4)).flatten(1)[:, :13]
        z = self.linear(y) @ self.transposed.t() * self.scale
        return z[:, :4].square().sum() + (self.linear(y) @ self.gap).sin().sum() + z.sum() + self.nothing.sum()

    @staticmethod
    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(6, 60, generator=torch.Generator().manual_seed(100 * rank + step))


def pair(
    make: Callable[[], nn.Module], backend: str, bucket_mb: float | None = None, **options: Any
) -> tuple[nn.Module, gsync.GradReducer, DistributedDataParallel]:
    """A model with a reducer, and an equal one under DDP with gsync."""
    ours, theirs = make(), DistributedDataParallel(make())
    gsync.register(theirs, backend=backend, **options)
    return ours, gsync.GradReducer(ours, backend=backend, bucket_mb=bucket_mb, **options), theirs


def alone(module: nn.Module, world_size: int, loss: Callable[[nn.Module, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the mean of `loss(module, rank)` over the ranks, by name; from a copy of the module without hooks."""
    copied = copy.deepcopy(module)
    copied.zero_grad()
    total = sum(loss(copied, rank) for rank in range(world_size)) / world_size
    assert isinstance(total, torch.Tensor)
    total.backward()
    return {name: param.grad for name, param in copied.named_parameters() if param.grad is not None}


def assert_gradients(module: nn.Module, expected: dict[str, torch.Tensor], rtol: float = 1e-6) -> None:
    """The gradients of `module` are `expected`, none missing and none more; rtol: relative to the norm of each."""
    got = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        mine, wanted = (t.coalesce().to_dense() if t.is_sparse else t for t in (got[name], gradient))
        if wanted.numel():
            error = (mine - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
            assert error <= rtol, f"{name}: {error}"

"""What the tests of the DDP door share: small models, and comparisons between ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import _native

CODECS = ("fp32", "fp16", "bf16")
EXCHANGES = ("all_reduce", "scatter_gather")

# The engines by the backend that asks for them: "native" the one in C++, "reference" the one in Python.
ENGINES = ("native", "reference")


def why_no_engine(backend: str) -> str:
    """Why an engine cannot be tested here, or ""."""
    if backend == "native" and not hasattr(_native.C, "Engine"):
        return _native.MISSING or "the extension has no engine"
    return ""


class Scalars(nn.Module):
    """One parameter whose gradient is the input."""

    def __init__(self, numel: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Branches(nn.Module):
    """Two 1x1 linears a, b; the forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, which: str = "ab") -> torch.Tensor:
        total = torch.zeros(())
        for name in which:
            total = total + getattr(self, name)(x).sum()
        return total


def mlp(seed: int = 1, width: int = 67) -> nn.Sequential:
    """A model whose parameters have awkward sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(31, width), nn.ReLU(), nn.Linear(width, 129), nn.ReLU(), nn.Linear(129, 7))


def batch(rank: int, step: int, width: int = 31) -> torch.Tensor:
    """An input that differs by rank and step."""
    return torch.randn(5, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def wrap(
    module: nn.Module, backend: str, process_group: Any = None, ddp: dict[str, Any] | None = None, **options: Any
) -> tuple[DistributedDataParallel, gsync.SyncState]:
    """`module` under DDP with gsync."""
    wrapped = DistributedDataParallel(module, process_group=process_group, **(ddp or {}))
    return wrapped, gsync.register(wrapped, backend=backend, **options)


def stock(module: nn.Module, **ddp: Any) -> DistributedDataParallel:
    """A copy of `module` under plain DDP."""
    return DistributedDataParallel(copy.deepcopy(module), **ddp)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def assert_same_bits(left: Any, right: Any) -> None:
    """Two tensors, or lists of them, are equal bit for bit."""
    left, right = (value if isinstance(value, (list, tuple)) else [value] for value in (left, right))
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
        a, b = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
        assert torch.equal(a, b), f"{(a != b).sum()} bytes differ"


def assert_same_on_all_ranks(tensors: Any, group: Any = None) -> None:
    """Tensors, or lists of them, are equal bit for bit on all ranks of the group."""
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    mine = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    world_size = dist.get_world_size(group)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        assert torch.equal(theirs, mine), f"{(theirs != mine).sum()} bytes differ from those of rank {rank}"


def norm_of(module: nn.Module) -> float:
    """The 2-norm of all gradients, in fp64."""
    total = 0.0
    for gradient in gradients(module):
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        real = torch.view_as_real(values) if values.is_complex() else values
        total += real.double().square().sum().item()
    return total**0.5

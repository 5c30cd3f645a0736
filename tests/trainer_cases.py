"""What the tests of the trainers share: a small task, and what holds after training with gsync."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import assert_same_on_all_ranks
from torch.utils.data import TensorDataset

FEEDBACK = {"codec": "int8", "error_feedback": True}
NUM_BATCHES, BATCH_SIZE = 4, 8  # of a rank in an epoch


def data(world_size: int) -> TensorDataset:
    """Inputs [samples, 16] and classes [samples], for NUM_BATCHES batches on each rank."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(world_size * NUM_BATCHES * BATCH_SIZE, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def net() -> nn.Sequential:
    """The same on every rank; int8 leaves an error in its weights that shows in the next losses."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def assert_trained(sync: Any, module: nn.Module, steps: int) -> None:
    """gsync has synchronised `steps` steps and nothing else, and all ranks have the same model."""
    stats = sync.stats()
    numel = sum(parameter.numel() for parameter in module.parameters())
    assert stats.steps == steps
    assert stats.wire_bytes > 0 and (sync.config.codec != "int8" or stats.wire_bytes < 2 * numel * steps)  # less than bf16 sends
    assert_same_on_all_ranks([parameter.detach() for parameter in module.parameters()])


def mean_over_ranks(losses: list[float]) -> list[float]:
    """The losses of all ranks, averaged."""
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return [value / dist.get_world_size() for value in total.tolist()]

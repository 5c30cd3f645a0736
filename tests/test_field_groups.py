"""The mean is over the group given, beside whatever other groups do, through both doors."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import Scalars, assert_same_on_all_ranks
from field_cases import engines, every_door, options_of
from ranks import run_on_ranks


def _groups(rank, world_size, backend):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    odd = dist.new_group([1, 3])
    singles = [dist.new_group([r]) for r in range(world_size)]
    x = torch.full((700,), rank + 1.0)
    for options in (options_of("fp32"), options_of("bf16", exchange="scatter_gather"), options_of("int8", error_feedback=True)):
        cases = [(halves[rank // 2], [1.5, 1.5, 3.5, 3.5][rank]), (singles[rank], rank + 1.0)]
        if rank % 2:
            cases.append((odd, 3.0))
        for group, mean in cases:
            for door in every_door(lambda: Scalars(700), backend, process_group=group, **options):
                for _ in range(2):
                    door.zero_grad()
                    door(x).backward()
                    assert door.module.weight.grad.tolist() == pytest.approx([mean] * 700, rel=1e-6)
                assert door.sync.state_dict()["world_size"] == group.size()
                assert door.sync.state_dict()["rank"] == group.rank()
                assert (door.sync.stats().wire_bytes == 0) == (group.size() == 1)


@engines
def test_the_mean_is_over_the_group_and_ranks_are_its_own(backend):
    """Case 82. Two halves, one rank alone, and ranks 1 and 3, which are 0 and 1 of their group."""
    run_on_ranks(_groups, 4, timeout_s=120, args=(backend,))


class _Summed(torch.autograd.Function):
    """Adds up over the ranks of a tensor-parallel group, forward and backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Parallel(nn.Module):
    """Three layers; each one's output is summed over a group while the layers before it are still to come."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.group = group

    def forward(self, x):
        for layer in self.layers:
            x = _Summed.apply(layer(x), self.group).tanh()
        return x.square().sum()


def _grid(rank, world_size, backend):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # tensor parallel
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # data parallel
    row, column = rows[rank // 2], columns[rank % 2]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank // 2))  # the same along a row
    for options in (options_of("fp32"), options_of("int8")):
        for door in every_door(lambda: Parallel(row), backend, process_group=column, bucket_mb=1e-4, **options):
            expected = None
            for _ in range(100):
                door.zero_grad()
                door(x).backward()
                got = torch.cat([layer.weight.grad.flatten() for layer in door.module.layers])
                expected = got.clone() if expected is None else expected
                assert torch.equal(got, expected)
            assert_same_on_all_ranks(got, column)
            # Over the data-parallel group only: against stock, without overlap.
            plain = Parallel(row)
            plain(x).backward()
            mine = torch.cat([layer.weight.grad.flatten() for layer in plain.layers])
            dist.all_reduce(mine, group=column)
            bound = 1e-6 if options["codec"] == "fp32" else 0.01
            assert (got - mine / 2).abs().max() <= bound * mine.abs().max()


@engines
def test_beside_the_collectives_of_tensor_parallelism(backend):
    """Case 83. A 2 x 2 grid, the model's own sums in backward, 100 steps: right, and no hang."""
    run_on_ranks(_grid, 4, timeout_s=150, args=(backend,))

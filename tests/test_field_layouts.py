"""Sparse, oddly laid out and mixed parameters: each gradient is right, in its own form."""

import pytest
import torch
import torch.nn as nn
from ddp_cases import assert_same_on_all_ranks
from field_cases import ONE_ROUNDING, engines, every_door, modes
from ranks import run_on_ranks
from reducer_cases import alone

import gsync
from gsync.layout import BLOCK_SIZES, CODEC_KINDS


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 2, sparse=True, padding_idx=5)
        self.dense = nn.Linear(2, 4)

    def forward(self, index):
        rows = self.table(torch.tensor(index))
        return self.dense(rows).square().sum() + rows.sum()


def _padding(rank, world_size, backend):
    for options in modes():
        options.pop("exempt", None)  # the table is exempt
        for door in every_door(Padded, backend, **options):
            for index in ([[0, 3], [1, 3]], [[5, 5], [2, 5]], [[5], [5]]):
                door.zero_grad()
                door(index[rank]).backward()
                got = door.module.table.weight.grad
                assert got.is_sparse and got.dtype == torch.float32
                expected = alone(door.module, world_size, lambda m, r, index=index: m(index[r]))
                assert torch.allclose(got.to_dense(), expected["table.weight"].to_dense(), rtol=1e-6)
                expected.pop("table.weight")
                bound = 4 * ONE_ROUNDING[options["codec"]] + 1e-5
                for name, wanted in expected.items():
                    mine = door.module.get_parameter(name).grad
                    assert (mine - wanted).abs().max() <= max(bound, 2.0**-7) * wanted.abs().max().clamp_min(1e-30) * 2, name
                assert_same_on_all_ranks(got.coalesce().values())


@engines
def test_sparse_rows_stay_sparse_beside_dense_layers(backend):
    """Case 86. Also where one rank's batch, or every rank's, is padding only; never densified, never narrowed."""
    run_on_ranks(_padding, 2, timeout_s=90, args=(backend,))


def _sparse_parameter(rank, world_size, backend):
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"parameter 'odd' has layout torch\.sparse_coo; expected torch\.strided"):
        gsync.GradReducer(model, backend=backend)
    meta = nn.ModuleDict({"here": nn.Linear(2, 2), "there": nn.Linear(2, 2, device="meta")})
    with pytest.raises(ValueError, match=r"parameter 'there\.weight' is on meta; expected cpu or cuda"):
        gsync.GradReducer(meta, backend=backend)


@engines
def test_parameters_that_cannot_be_synchronised_are_named(backend):
    """Cases 87 and 93. A parameter that is sparse itself, or that has no data."""
    run_on_ranks(_sparse_parameter, 1, args=(backend,))


class Laid(nn.Module):
    """channels_last and transposed weights whose magnitudes differ by row, and an expanded gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Parameter(torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(300, 7).t())
        self.flat = nn.Parameter(torch.randn(11, 30))

    def forward(self, x):
        image = torch.arange(1, 5).pow(4).view(4, 1, 1, 1) * x[:54].view(1, 6, 3, 3)
        return (self.conv * image).sum() + (self.turned * x[:2100].view(7, 300)).sum() + self.flat.sum()


def _layouts(rank, world_size, backend):
    each = [torch.randn(2100, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    for options in modes():
        codec = options["codec"]
        block = BLOCK_SIZES.get(CODEC_KINDS[codec], 1)
        for door in every_door(Laid, backend, **options):
            for _ in range(2):
                door.zero_grad()
                door(each[rank]).backward()
                expected = alone(door.module, world_size, lambda m, r: m(each[r]))
                sizes = alone(door.module, world_size, lambda m, r: m(each[r].abs()))  # no sum of ranks is smaller than its parts
                for name, param in door.module.named_parameters():
                    assert param.grad.stride() == param.stride(), name
                    order = sorted(range(param.dim()), key=lambda d: -param.stride(d))
                    got, wanted, size = (t.permute(order).reshape(-1) for t in (param.grad, expected[name], sizes[name]))
                    # Blocks lie in the order of the parameter's memory; two roundings of each.
                    largest = torch.cat([b.abs().max().expand(b.numel()) for b in size.split(block)]) * world_size
                    assert ((got - wanted).abs() <= 2.1 * ONE_ROUNDING[codec] * largest + 1e-6).all(), (options, name)


@engines
def test_gradients_keep_the_layout_of_their_parameter(backend):
    """Case 89. Values, strides, and the blocks that share a scale follow the memory of the parameter."""
    run_on_ranks(_layouts, 2, timeout_s=90, args=(backend,))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in dtypes])

    def forward(self, x):
        return sum((part * x.to(part.dtype)).sum().double() for part in self.parts)


def _mixed(rank, world_size, backend):
    fine = 1 + 2.0**-40  # an fp64 number, nothing narrower
    for bucket_mb in (1e-4, 25):
        for door in every_door(Mixed, backend, bucket_mb=bucket_mb, codec="fp32"):
            door(torch.full((300,), (rank + 1.0) * fine, dtype=torch.float64)).backward()
            for part in door.module.parts:
                assert part.grad.dtype == part.dtype
                exact = 1.5 * fine if part.dtype == torch.float64 else 1.5
                assert part.grad.double().tolist() == pytest.approx([exact] * 300, rel=1e-6)
    for door in every_door(Mixed, backend, codec="int8", exempt=()):
        door(torch.full((300,), rank + 1.0)).backward()
        for part in door.module.parts:
            assert part.grad.dtype == part.dtype and part.grad.double().tolist() == pytest.approx([1.5] * 300, rel=1e-6)


@engines
def test_mixed_dtypes_do_not_share_memory_of_one(backend):
    """Case 91. fp32, bf16, fp16 and fp64 in one model: each comes back in its own dtype."""
    run_on_ranks(_mixed, 2, args=(backend,))


@pytest.mark.gpu
def test_gpu_and_cpu_in_one_model_are_refused():
    """Case 93. One reducer serves one device; the error names both."""
    from gsync.model import read_model

    module = nn.ModuleDict({"cpu": nn.Linear(2, 2), "gpu": nn.Linear(2, 2).cuda()})
    with pytest.raises(ValueError, match=r"on 2 devices \(cpu, cuda:0\)"):
        read_model(module, gsync.SyncConfig())

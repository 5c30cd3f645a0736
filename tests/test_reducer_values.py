"""The mean that GradReducer makes: against the DDP door, and against one process that has the whole batch."""

# ruff: noqa: B023 (what captures a loop variable is called in the same round)

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import (
    CODECS,
    EXCHANGES,
    Branches,
    Scalars,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    norm_of,
)
from ranks import run_on_ranks
from reducer_cases import Layouts, alone, assert_gradients, each_engine, pair

import gsync

engines = pytest.mark.parametrize("backend", each_engine())


def _same_as_ddp(rank, world_size, backend, codec, options):
    for make, data in ((Layouts, Layouts.batch), (lambda: mlp(width=300), batch)):
        for bucket_mb in (1e-4, 0.05, None):
            ours, reducer, theirs = pair(make, backend, bucket_mb, codec=codec, exchange="scatter_gather", **options)
            for step in range(3):
                for model in (ours, theirs):
                    model.zero_grad(set_to_none=step % 2 == 0)
                    model(data(rank, step)).sum().backward()
                assert_same_bits(gradients(ours), gradients(theirs))
                assert_same_on_all_ranks([*gradients(ours), reducer.grad_norm(), reducer.found_nonfinite()])
                assert reducer.grad_norm().item() == pytest.approx(norm_of(ours), rel=1e-9)
            assert [g.stride() for g in gradients(ours)] == [p.grad.stride() for p in make().parameters() if _has_grad(p)]
            if bucket_mb == 1e-4:
                assert len(reducer._buckets) > 3
            reducer.close()


def _has_grad(param):
    param.grad = torch.zeros_like(param)
    return True


@engines
@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_as_through_ddp_for_any_bucket_size_and_layout(backend, codec):
    run_on_ranks(_same_as_ddp, 2, 120, args=(backend, codec, {}))


@engines
@pytest.mark.parametrize("options", [{"codec": "int8"}, {"codec": "int4", "error_feedback": True, "exempt": ()}])
def test_same_bits_as_through_ddp_with_block_codecs_and_residuals(backend, options):
    options = dict(options)
    run_on_ranks(_same_as_ddp, 2, 120, args=(backend, options.pop("codec"), options))


def _whole_batch(rank, world_size, backend):
    for exchange in EXCHANGES:
        for make, data in ((mlp, batch), (Layouts, Layouts.batch)):
            model = make()
            reducer = gsync.GradReducer(model, codec="fp32", exchange=exchange, backend=backend, bucket_mb=0.01)
            for step in range(3):
                model.zero_grad()
                model(data(rank, step)).square().sum().backward()
                assert_gradients(model, alone(model, world_size, lambda m, r: m(data(r, step)).square().sum()))
            assert reducer.stats().steps == 3 and reducer.stats().buckets == 3 * len(reducer._buckets)
            reducer.close()


@engines
@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_is_that_of_one_process_with_the_whole_batch(backend, world_size):
    run_on_ranks(_whole_batch, world_size, 90, args=(backend,))


class Mixed(nn.Module):
    """fp32, fp64, fp16, bf16 and complex parameters."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(11, dtype=dtype)) for dtype in dtypes])

    def forward(self, x):
        return sum(((part * x.to(part.dtype)).abs() ** 2).sum().double() for part in self.parts)


def _mixed(rank, world_size, backend):
    for exchange in EXCHANGES:
        model = Mixed()
        reducer = gsync.GradReducer(model, codec="fp32", exchange=exchange, backend=backend, bucket_mb=1e-5)
        for step in range(2):
            model.zero_grad()
            model(torch.arange(11.0) + rank + step).backward()
            expected = alone(model, world_size, lambda m, r: m(torch.arange(11.0) + r + step))
            for name, param in model.named_parameters():
                bound = 2.0**-7 if param.dtype in (torch.float16, torch.bfloat16) else 1e-6
                assert_gradients(nn.ParameterDict({"p": _with_grad(param)}), {"p": expected[name]}, bound)
        assert len({model.get_parameter(reducer._names[b.parameters[0]]).dtype for b in reducer._buckets}) == 6
        reducer.close()


def _with_grad(param):
    copied = nn.Parameter(param.detach().clone())
    copied.grad = param.grad
    return copied


@engines
def test_dtypes_are_synchronised_each_in_buckets_of_its_own(backend):
    run_on_ranks(_mixed, 2, args=(backend,))


def _accumulation(rank, world_size, backend):
    for codec in CODECS:
        for set_to_none in (True, False):
            model = Scalars(5)
            reducer = gsync.GradReducer(model, codec=codec, backend=backend)
            x = torch.full((5,), rank + 1.0)
            for _ in range(4):
                model.zero_grad(set_to_none=set_to_none)
                with reducer.no_sync():
                    model(x).backward()
                    assert model.weight.grad.tolist() == [rank + 1.0] * 5
                model(x).backward()
                assert model.weight.grad.tolist() == [3.0] * 5
                model(x).backward()  # the mean of what has accumulated, as DDP does: 3 + mean(1, 2)
                assert model.weight.grad.tolist() == [4.5] * 5
            with reducer.no_sync():
                loss = model(x)
            loss.backward()  # outside: what counts is where backward is called
            assert model.weight.grad.tolist() == [6.0] * 5
            loss = model(x)
            with reducer.no_sync():
                loss.backward()
            assert model.weight.grad.tolist() == [6.0 + rank + 1] * 5
            reducer.wait()
            assert model.weight.grad.tolist() == [7.5] * 5
            reducer.close()


@engines
def test_accumulated_gradients_are_averaged_once(backend):
    run_on_ranks(_accumulation, 2, args=(backend,))


def _unused(rank, world_size, backend):
    for exchange in EXCHANGES:
        for codec in CODECS:
            model = Branches()
            reducer = gsync.GradReducer(model, codec=codec, exchange=exchange, backend=backend, bucket_mb=1e-6)
            x = torch.full((2, 1), 2.0 * (rank + 1))

            def values():
                return [None if p.grad is None else p.grad.item() for p in (model.a.weight, model.b.weight)]

            for _ in range(3):
                model.zero_grad()
                model(x, "a").backward()
                assert values() == [6.0, None]  # nobody used b
                model.zero_grad()
                model(x, "ab" if rank == 0 else "a").backward()
                assert values() == [6.0, 2.0]  # rank 0 only: (4 + 0) / 2
                model.zero_grad()
                model(x, "a" if rank == 0 else "b").backward()
                assert values() == [2.0, 4.0]
                model.zero_grad(set_to_none=False)
                model(x, "a").backward()
                assert values() == [6.0, 0.0]
            # A gradient from a backward pass before counts, though this one does not reach the parameter.
            model.zero_grad()
            with reducer.no_sync():
                model(x, "b" if rank == 1 else "a").backward()
            model(x, "a").backward()
            assert values() == [8.0, 4.0]
            # A rank whose loss reaches no parameter at all takes part in wait().
            model.zero_grad()
            reducer.wait()
            if rank == 0:
                model(x, "ab").backward()
            reducer.wait()
            assert values() == [2.0, 2.0]
            assert_same_on_all_ranks(gradients(model))
            reducer.close()


@engines
def test_unused_parameters(backend):
    run_on_ranks(_unused, 2, args=(backend,))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(10, 3, sparse=True)
        self.bag = nn.EmbeddingBag(6, 3, sparse=True, mode="sum")
        self.linear = nn.Linear(3, 2)

    def forward(self, rank, use_bag=True):
        rows = self.table(torch.tensor([rank, 4, 4]))
        total = self.linear(rows + 1).square().sum() + rows.sum()
        return total + self.bag(torch.tensor([[rank, 5]])).sin().sum() if use_bag else total


def _sparse(rank, world_size, backend):
    model = Sparse()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model(rank).backward()
        assert model.table.weight.grad.is_sparse and model.bag.weight.grad.is_sparse
        assert_gradients(model, alone(model, world_size, lambda m, r: m(r)))
        assert reducer.grad_norm().item() == pytest.approx(norm_of_dense(model), rel=1e-6)
        model.zero_grad()
        model(rank, use_bag=rank == 0 and step == 1).backward()
        expected = alone(model, world_size, lambda m, r: m(r, use_bag=r == 0 and step == 1))
        assert_gradients(model, expected)


def norm_of_dense(model):
    return (
        sum(g.to_dense().double().square().sum() if g.is_sparse else g.double().square().sum() for g in gradients(model))
        .sqrt()
        .item()
    )


@engines
def test_sparse_gradients_stay_sparse(backend):
    run_on_ranks(_sparse, 2, args=(backend,))


def _sub_groups(rank, world_size, backend):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Scalars(3)
    reducer = gsync.GradReducer(model, process_group=groups[rank // 2], backend=backend)
    model(torch.full((3,), rank + 1.0)).backward()
    assert model.weight.grad.tolist() == [[1.5] * 3, [3.5] * 3][rank // 2]
    reducer.close()
    if rank < 2:
        with pytest.raises(ValueError, match="does not belong"):
            gsync.GradReducer(model, process_group=dist.GroupMember.NON_GROUP_MEMBER, backend=backend)


@engines
def test_mean_is_over_the_group_given(backend):
    run_on_ranks(_sub_groups, 4, args=(backend,))


def _world_size_one(rank, world_size, backend):
    model = mlp()
    reducer = gsync.GradReducer(model, codec="bf16", backend=backend)
    expected = alone(model, world_size, lambda m, r: m(batch(r, 0)).square().sum())
    for _ in range(2):
        model.zero_grad()
        model(batch(0, 0)).square().sum().backward()
        assert_gradients(model, expected, 0.0)  # nothing travels, so nothing is encoded
    assert reducer.grad_norm().item() == pytest.approx(norm_of(model))
    branches = Branches()
    reducer = gsync.GradReducer(branches, backend=backend)
    branches(torch.ones(1, 1), "a").backward()
    assert branches.b.weight.grad is None
    reducer.wait()


@engines
def test_one_rank_keeps_its_gradients_bit_for_bit(backend):
    run_on_ranks(_world_size_one, 1, args=(backend,))


def _sum(rank, world_size, backend):
    model = Scalars(3)
    gsync.GradReducer(model, average=False, backend=backend)
    model(torch.full((3,), rank + 1.0)).backward()
    assert model.weight.grad.tolist() == [3.0] * 3


@engines
def test_sum_instead_of_mean(backend):
    run_on_ranks(_sum, 2, args=(backend,))

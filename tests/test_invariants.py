"""Promises that hold for every model: results do not depend on buckets, engines do not disturb each other, runs repeat."""

import pytest
import torch
import torch.distributed as dist
from ddp_cases import CODECS, ENGINES, assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp, why_no_engine, wrap
from ranks import run_on_ranks


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def _gradients_after(backend, steps=3, cap=25, **options):
    """Gradients of each step, and the sums of squares of the last."""
    model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": cap}, **options)
    every = []
    for step in range(steps):
        model.zero_grad()
        model(batch(dist.get_rank(), step)).square().sum().backward()
        every += [gradient.clone() for gradient in gradients(model)]
    return every, sync.grad_norm(), sync.stats()


def _independent_of_buckets(backend):
    """Under scatter_gather, gradients and norm are the same bits whatever the buckets and slices."""
    for codec in CODECS:
        options = {"codec": codec, "exchange": "scatter_gather"}
        expected, norm, stats = _gradients_after(backend, **options)
        for cap, slice_mb in ((0.01, 25), (0.03, 25), (25, 0.02), (0.03, 0.01)):
            got, other_norm, other = _gradients_after(backend, cap=cap, slice_mb=slice_mb, **options)
            assert_same_bits(got, expected)
            assert_same_bits(other_norm, norm)
            assert other.buckets > stats.buckets or cap == 25


def _repeats(backend):
    for codec in CODECS:
        for exchange in ("all_reduce", "scatter_gather"):
            first, norm, _ = _gradients_after(backend, cap=0.02, codec=codec, exchange=exchange)
            again, other_norm, _ = _gradients_after(backend, cap=0.02, codec=codec, exchange=exchange)
            assert_same_bits(first, again)
            assert_same_bits(norm, other_norm)


def _many_engines(backend):
    """Three models trained in turn, each with its engine, and collectives of the program in between."""
    codecs = ("fp32", "fp16", "bf16")
    models = [wrap(mlp(seed), backend, ddp={"bucket_cap_mb": 0.02}, codec=codec) for seed, codec in enumerate(codecs)]
    alone = []
    for seed, codec in enumerate(codecs):
        model, _ = wrap(mlp(seed), backend, ddp={"bucket_cap_mb": 0.02}, codec=codec)
        for step in range(4):
            model.zero_grad()
            model(batch(dist.get_rank(), step)).square().sum().backward()
        alone.append([gradient.clone() for gradient in gradients(model)])
    for step in range(4):
        total = sum(model(batch(dist.get_rank(), step)).square().sum() for model, _ in models)
        for model, _ in models:
            model.zero_grad()
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        total.backward()  # buckets of all three under way at once
        work.wait()
    for (model, sync), expected in zip(models, alone, strict=True):
        assert_same_bits(gradients(model), expected)
        assert_same_on_all_ranks([*gradients(model), sync.grad_norm()])


def _world(rank, world_size, backend):
    _independent_of_buckets(backend)
    _repeats(backend)
    _many_engines(backend)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_do_not_depend_on_layout_or_company(engine, world_size):
    run_on_ranks(_world, world_size, timeout_s=240, args=(engine,))

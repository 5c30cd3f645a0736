"""The mean that DDP gets through gsync, for both engines: against stock DDP, at the edges of the number range, between ranks."""

import pytest
import torch
import torch.distributed as dist
from ddp_cases import (
    CODECS,
    ENGINES,
    EXCHANGES,
    Branches,
    Scalars,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    norm_of,
    stock,
    why_no_engine,
    wrap,
)
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def _fp32_equals_stock(backend, exchange):
    """Also over gradient accumulation, bucket rebuild and slices."""
    for as_view in (False, True):
        ddp = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": as_view}
        ours, sync = wrap(mlp(), backend, ddp=ddp, codec="fp32", exchange=exchange, slice_mb=0.01)
        theirs = stock(mlp(), **ddp)
        for step in range(5):
            for model in (ours, theirs):
                model.zero_grad()
                with model.no_sync():
                    model(batch(dist.get_rank(), 2 * step)).square().sum().backward()
                model(batch(dist.get_rank(), 2 * step + 1)).square().sum().backward()
            assert_same_bits(gradients(ours), gradients(theirs))
            assert sync.grad_norm().item() == pytest.approx(norm_of(theirs), rel=1e-12)
        stats = sync.stats()
        assert (stats.steps, stats.nonfinite_steps) == (5, 0)
        assert stats.gradient_bytes == 5 * 4 * sum(p.numel() for p in ours.parameters())
        assert stats.wire_bytes >= stats.gradient_bytes  # 2 (W-1)/W times the payload, which has flags and padding
        assert "5 steps" in str(stats) and stats.to_dict()["steps"] == 5


def _range(backend, world_size):
    rank = dist.get_rank()

    def mean_of(value, **options):
        model, sync = wrap(Scalars(3), backend, **options)
        model(torch.full((3,), float(value))).backward()
        assert_same_on_all_ranks([model.module.weight.grad, sync.grad_norm(), sync.found_nonfinite()])
        return model.module.weight.grad, sync

    for exchange in EXCHANGES:
        got, _ = mean_of(40000.0, codec="fp16", exchange=exchange)
        assert got.tolist() == [40000.0] * 3
        got, sync = mean_of([7e4, 0.0][rank % 2], codec="fp16", exchange=exchange)
        assert got.tolist() == pytest.approx([3.5e4] * 3, rel=2**-11)
        assert not sync.found_nonfinite()
        got, _ = mean_of(1e-4, codec="fp16", exchange=exchange)
        assert got.tolist() == pytest.approx([1e-4] * 3, rel=0.005)
        for codec in CODECS:
            got, _ = mean_of(rank + 1, codec=codec, exchange=exchange)
            assert got.tolist() == [(world_size + 1) / 2] * 3
            got, _ = mean_of(rank + 1, codec=codec, exchange=exchange, average=False)
            assert got.tolist() == [world_size * (world_size + 1) / 2] * 3
            for bad in (float("inf"), float("nan")):
                got, sync = mean_of([1.0, bad][rank == 1], codec=codec, exchange=exchange)
                assert not got.isfinite().any()
                assert sync.found_nonfinite() and not sync.grad_norm().isfinite()
                assert sync.stats().nonfinite_steps == 1
            got, _ = mean_of(0.0, codec=codec, exchange=exchange)
            assert_same_bits(got, torch.zeros(3))


def _vanishing(backend):
    model, sync = wrap(Scalars(8), backend, codec="fp16")
    with pytest.warns(gsync.GsyncWarning, match="bf16"):
        for _ in range(3):
            model(torch.full((8,), 1e-9)).backward()
            sync.stats()
    assert torch.equal(model.module.weight.grad, torch.zeros(8))


def _two_ranks(rank, world_size, backend):
    for exchange in EXCHANGES:
        _fp32_equals_stock(backend, exchange)
    _range(backend, world_size)
    _vanishing(backend)
    _accumulation(backend)
    _unused(backend)
    _static_graph(backend)
    _uneven_inputs(backend)
    _no_average_of_nothing(backend)


def _accumulation(backend):
    """grad = rank + 1 twice: 3.0 each time, for 6 iterations, whichever memory the gradients are in."""
    for codec in CODECS:
        for exchange in EXCHANGES:
            for as_view in (False, True):
                model, _ = wrap(Scalars(5), backend, ddp={"gradient_as_bucket_view": as_view}, codec=codec, exchange=exchange)
                x = torch.full((5,), dist.get_rank() + 1.0)
                for _ in range(6):
                    model.zero_grad(set_to_none=False)
                    with model.no_sync():
                        model(x).backward()
                    model(x).backward()
                    assert model.module.weight.grad.tolist() == [3.0] * 5
                # Without zero_grad: the mean of what was there before and of what came.
                model(x).backward()
                assert model.module.weight.grad.tolist() == [4.5] * 5


def _unused(backend):
    """Unused everywhere: None. Used on one rank: the mean with zero. Used under no_sync only: synchronised too."""
    rank = dist.get_rank()
    x = torch.full((1, 1), rank + 1.0)
    for codec in CODECS:
        model, sync = wrap(Branches(), backend, ddp={"find_unused_parameters": True}, codec=codec)
        a, b = model.module.a.weight, model.module.b.weight
        model(x, "a").backward()
        assert a.grad.item() == 1.5 and b.grad is None
        model.zero_grad()
        model(x, "ab"[rank]).backward()
        assert (a.grad.item(), b.grad.item()) == (0.5, 1.0)
        assert sync.grad_norm().item() == pytest.approx(1.25**0.5)
        model.zero_grad()
        with model.no_sync():
            model(x, "a").backward()
        model(x, "b").backward()
        assert (a.grad.item(), b.grad.item()) == (1.5, 1.5)


def _static_graph(backend):
    for codec in CODECS:
        model, sync = wrap(mlp(), backend, ddp={"static_graph": True, "bucket_cap_mb": 0.02}, codec=codec)
        reference = stock(mlp(), static_graph=True, bucket_cap_mb=0.02)
        for step in range(4):
            for each in (model, reference):
                each.zero_grad()
                each(batch(dist.get_rank(), step)).square().sum().backward()
            for ours, theirs in zip(gradients(model), gradients(reference), strict=True):
                # Two roundings of 8 bits: of each rank's gradient, and of their sum.
                bound = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}[codec]
                assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
        assert sync.stats().steps == 4


def _uneven_inputs(backend):
    """Two batches on rank 0, four on rank 1: a rank that has joined adds zeros."""
    rank = dist.get_rank()
    for codec in CODECS:
        for exchange in EXCHANGES:
            model, _ = wrap(Scalars(), backend, codec=codec, exchange=exchange)
            means = []
            with model.join():
                for _ in range(2 + 2 * rank):
                    model.zero_grad()
                    model(torch.ones(1)).backward()
                    means.append(model.module.weight.grad.item())
            assert means == [1.0, 1.0, 0.5, 0.5][: len(means)]


def _no_average_of_nothing(backend):
    """A group of one rank only scales: nothing is encoded."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model, sync = wrap(Scalars(4), backend, process_group=group, codec="bf16")
    value = 1.0 + 2.0**-20  # not a bf16 number
    model(torch.full((4,), value)).backward()
    assert model.module.weight.grad.tolist() == [value] * 4
    assert sync.grad_norm().item() == pytest.approx(2 * value)
    assert not sync.found_nonfinite()
    assert sync.stats().wire_bytes == 0


def _more_ranks(rank, world_size, backend):
    for codec in CODECS:
        for exchange in EXCHANGES:
            ours, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, codec=codec, exchange=exchange, slice_mb=0.01)
            reference = mlp()
            for step in range(3):
                ours.zero_grad()
                ours(batch(rank, step)).square().sum().backward()
                assert_same_on_all_ranks([*gradients(ours), sync.grad_norm(), sync.found_nonfinite()])
                assert sync.grad_norm().item() == pytest.approx(norm_of(ours), rel=1e-12)
                # Against the mean in fp64. Roundings to the wire type: one for each rank's gradient and those of the sum; under
                # scatter_gather just one of the sum. In fp32: 1/W, the product with it, and the sums.
                exact = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
                size = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
                for other in range(world_size):
                    reference.zero_grad()
                    reference(batch(other, step)).square().sum().backward()
                    for total, absolute, gradient in zip(exact, size, gradients(reference), strict=True):
                        total += gradient.double() / world_size
                        absolute += gradient.double().abs() / world_size
                bits = {"fp32": 24, "fp16": 11, "bf16": 8}[codec]
                roundings = 2 if exchange == "scatter_gather" else world_size
                for got, total, absolute in zip(gradients(ours), exact, size, strict=True):
                    relative = roundings * 2.0**-bits + (2 + world_size) * 2.0**-24
                    bound = relative * absolute + roundings * (2.0**-25 if codec == "fp16" else 2.0**-149)
                    assert ((got.double() - total).abs() <= bound * (1 + roundings * 2.0**-bits)).all()
    if world_size == 4:
        _range(backend, world_size)
        _subgroups(backend)


def _subgroups(backend):
    """The mean is over the group given: two halves, then ranks 1 and 3, whose ranks in the group are 0 and 1."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    odd = dist.new_group([1, 3])
    x = torch.full((3,), rank + 1.0)
    for codec in CODECS:
        for exchange in EXCHANGES:
            model, sync = wrap(Scalars(3), backend, process_group=halves[rank // 2], codec=codec, exchange=exchange)
            model(x).backward()
            assert model.module.weight.grad.tolist() == [[1.5, 3.5][rank // 2]] * 3
            assert sync.state_dict()["world_size"] == 2 and sync.state_dict()["rank"] == rank % 2
            if rank % 2 == 1:
                model, _ = wrap(Scalars(3), backend, process_group=odd, codec=codec, exchange=exchange)
                model(x).backward()
                assert model.module.weight.grad.tolist() == [3.0] * 3
    # A group of gsync's own, with tensor-parallel sums of the model in its backward pass.
    model, _ = wrap(Scalars(3), backend, process_group=halves[rank // 2], codec="bf16")
    for _ in range(20):
        model.zero_grad()
        loss = model(x)
        loss.register_hook(lambda gradient: _summed(gradient, odd) if rank % 2 else gradient)
        loss.backward()
        # The odd ranks' gradients were doubled on the way.
        assert model.module.weight.grad.tolist() == [[(1 + 2 * 2) / 2, (3 + 2 * 4) / 2][rank // 2]] * 3


def _summed(gradient, group):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def test_mean_at_two_ranks(engine):
    run_on_ranks(_two_ranks, 2, timeout_s=180, args=(engine,))


@pytest.mark.parametrize("world_size", [3, 4])
def test_all_ranks_get_the_same_bits_within_the_bound(engine, world_size):
    run_on_ranks(_more_ranks, world_size, timeout_s=240, args=(engine,))


def _scaler_world(rank, world_size, backend):
    """A GradScaler sees one rank's overflow on all ranks and recovers; clipping takes the scale into account."""
    torch.manual_seed(0)
    model, sync = wrap(mlp(), backend, codec="fp16")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        norm = gsync.clip_grad_norm_(sync, 0.1, scaler=scaler)
        scaler.unscale_(optimizer)
        if step != 1:
            assert torch.nn.utils.get_total_norm(gradients(model)).item() == pytest.approx(min(0.1, norm.item()), rel=1e-3)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == (step != 1)
        scales.append(scaler.get_scale())
        assert_same_on_all_ranks(list(model.parameters()))
    assert scales == [1024.0, 512.0, 512.0, 512.0]

    plain, theirs = DistributedDataParallel(mlp()), mlp()
    sync = gsync.register(plain, codec="fp32", backend=backend)
    plain(batch(rank, 0)).square().sum().backward()
    for parameter, source in zip(theirs.parameters(), plain.parameters(), strict=True):
        parameter.grad = source.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    got = gsync.clip_grad_norm_(sync, 0.5)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, other in zip(gradients(plain), gradients(theirs), strict=True):
        assert torch.allclose(ours, other, rtol=1e-5, atol=0)
    assert gsync.clip_grad_norm_(sync, float("inf")).item() == pytest.approx(expected.item(), rel=1e-5)
    for wrong in (0, -1.0, float("nan"), "1", None, True):
        with pytest.raises(ValueError, match="max_norm"):
            gsync.clip_grad_norm_(sync, wrong)


def test_scaler_and_clipping(engine):
    run_on_ranks(_scaler_world, 2, timeout_s=90, args=(engine,))

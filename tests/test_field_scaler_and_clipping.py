"""Loss scales, infinities on one rank, and norms: every rank sees the same, skips together, and goes on."""

import pytest
import torch
import torch.nn as nn
from ddp_cases import Scalars, assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp, norm_of
from field_cases import DOORS, Door, engines, engines_and_worlds, every_door, feedback_modes, modes, options_of
from ranks import run_on_ranks

import gsync
from gsync.layout import BLOCK_SIZES, CODEC_KINDS


class TwoVectors(nn.Module):
    """Two parameters of several blocks each; the gradient of each is the input."""

    def __init__(self, numel=600):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(numel)), nn.Parameter(torch.ones(numel))

    def forward(self, x, y):
        return (self.first * x).sum() + (self.second * y).sum()


def _bad_element(rank, world_size, backend):
    """Element 300 of `first` on rank 1; each parameter in a bucket of its own."""
    good, spot = torch.randn(600, generator=torch.Generator().manual_seed(rank)), 300
    for options in modes():
        kind = CODEC_KINDS[options["codec"]]
        block = BLOCK_SIZES.get(kind, 1)
        begin, end = spot // block * block, min(spot // block * block + block, 600)
        for door in every_door(TwoVectors, backend, bucket_mb=1e-4, **options):
            optimizer = torch.optim.SGD(door.module.parameters(), 0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for _ in range(2):  # the first step has other buckets, and under all_reduce another order of summation
                door.zero_grad()
                door(good, good).backward()
            expected = [gradient.clone() for gradient in gradients(door.module)]
            for bad in (float("inf"), float("nan")):
                door.zero_grad()
                before, scale = [p.detach().clone() for p in door.module.parameters()], scaler.get_scale()
                x = good.clone()
                x[spot] = bad if rank == 1 else x[spot]
                scaler.scale(door(x, good)).backward()
                assert door.sync.found_nonfinite()
                first, second = gradients(door.module)
                assert not first[begin:end].isfinite().any()
                outside = torch.cat([first[:begin], first[end:]]) / scale
                assert_same_bits([outside, second / scale], [torch.cat([expected[0][:begin], expected[0][end:]]), expected[1]])
                assert_same_on_all_ranks([first, second, door.sync.grad_norm()])
                scaler.step(optimizer)
                scaler.update()
                assert_same_bits([p.detach() for p in door.module.parameters()], before)
                assert scaler.get_scale() == scale / 2
            assert door.sync.stats().nonfinite_steps == 2


@engines_and_worlds
def test_inf_on_one_rank_is_seen_by_every_rank(backend, world_size):
    """Case 22. Its block is not finite anywhere, other blocks and buckets are as ever; every rank skips and halves the scale."""
    run_on_ranks(_bad_element, world_size, timeout_s=120, args=(backend,))


def _one_overflow(rank, world_size, backend):
    for options in feedback_modes():
        for door in every_door(lambda: Scalars(700), backend, **options):
            for step in range(10):
                x = torch.randn(700, generator=torch.Generator().manual_seed(10 * step + rank))
                door.zero_grad()
                door(x * float("inf") if step == 0 and rank == 0 else x).backward()
                assert bool(door.sync.found_nonfinite()) == (step == 0)
                assert bool(door.module.weight.grad.isfinite().all()) == (step != 0)
            for entry in door.sync.state_dict()["residuals"].values():
                assert entry["sender"].isfinite().all() and entry["reducer"].isfinite().all()


@engines
def test_one_overflow_is_over_with_its_step(backend):
    """Case 23. Residuals keep no Inf and no NaN: the step after is finite again."""
    run_on_ranks(_one_overflow, 2, args=(backend,))


def _amp(rank, world_size, backend):
    for kind in DOORS:
        losses = {}
        for codec in ("fp32", "fp16"):
            door = Door(kind, mlp(7), backend, codec=codec)
            optimizer = torch.optim.SGD(door.module.parameters(), 0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            losses[codec] = []
            for step in range(50):
                optimizer.zero_grad()
                x = batch(rank, step % 5)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = (door(x).float() - x[:, :7].tanh()).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(door.module.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses[codec].append(loss.item())
            assert door.sync.stats().nonfinite_steps == 0
            assert_same_on_all_ranks([p.detach() for p in door.module.parameters()])
            door.close()
        assert losses["fp16"][-1] < 0.6 * losses["fp16"][0]
        assert losses["fp16"][-1] == pytest.approx(losses["fp32"][-1], rel=0.05)


@engines
def test_amp_learns_as_without_compression(backend):
    """Case 24. autocast, GradScaler, unscale_, clip, step under fp16, 50 steps: the loss falls as in fp32."""
    run_on_ranks(_amp, 2, args=(backend,))


def _one_reduction(rank, world_size, backend):
    for codec in ("fp32", "int8"):
        model = Scalars(300)
        reducer = gsync.GradReducer(model, backend=backend, **options_of(codec))
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        reducer.attach(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            model(torch.full((300,), rank + 1.0)).backward()
            if step % 2 == 0:
                reducer.wait()
            norm = gsync.clip_grad_norm_(reducer, 1.0)
            assert norm.item() == pytest.approx(1.5 * 300**0.5, rel=1e-6)
            optimizer.step()
            assert reducer.stats().steps == step + 1 and reducer.stats().buckets == step + 1
            moved = before - model.weight.detach()
            assert moved.norm().item() == pytest.approx(1.0, rel=1e-4)
        assert_same_on_all_ranks(model.weight.detach())
        reducer.close()


@engines
def test_waiting_before_clipping_reduces_once(backend):
    """Case 26. backward has synchronised already; wait() and step() send nothing more."""
    run_on_ranks(_one_reduction, 2, args=(backend,))


class Odd(nn.Module):
    """Sizes that fill no block and no bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (7, 129, 1000, 1, 0)])

    def forward(self, x):
        return sum((part * x[: part.numel()]).sum() for part in self.parts)


def _norms(rank, world_size, backend):
    for options in modes():
        for bucket_mb in (1e-4, 25):
            for door in every_door(Odd, backend, bucket_mb=bucket_mb, **options):
                x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
                for scaled in (False, True):
                    door.zero_grad()
                    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
                    loss = door(x)
                    (scaler.scale(loss) if scaler else loss).backward()
                    exact = norm_of(door.module)
                    assert door.sync.grad_norm().item() == pytest.approx(exact, rel=1e-12)
                    assert torch.nn.utils.get_total_norm(gradients(door.module)).item() == pytest.approx(exact, rel=1e-5)
                    norm = gsync.clip_grad_norm_(door.sync, 1.0, scaler=scaler)
                    assert norm.item() == pytest.approx(exact / (256.0 if scaled else 1.0), rel=1e-9)
                    assert norm_of(door.module) == pytest.approx(256.0 if scaled else 1.0, rel=1e-4)
                    assert_same_on_all_ranks([*gradients(door.module), norm])


@engines
def test_the_norm_is_that_of_the_averaged_gradients(backend):
    """Case 27. Padding of buckets and blocks does not count, with and without a loss scale."""
    run_on_ranks(_norms, 2, args=(backend,))


def _unequal_scales(rank, world_size, backend):
    means = []
    for kind in DOORS:
        door = Door(kind, Scalars(), backend, codec="fp32")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * (rank + 1))
        scaler.scale(door(torch.ones(1))).backward()
        assert door.module.weight.grad.item() == 1536.0
        assert_same_on_all_ranks(door.module.weight.grad)
        scaler.unscale_(torch.optim.SGD(door.module.parameters(), 0.1))
        means.append(door.module.weight.grad.item())
        door.close()
    return means


@engines
def test_unequal_loss_scales_are_beyond_repair(backend):
    """Case 21. What is synchronised is equal on all ranks; what each rank divides it by is its own affair."""
    assert run_on_ranks(_unequal_scales, 2, args=(backend,)) == [[1.5, 1.5], [0.75, 0.75]]

"""Whatever buckets there are, rebuilt, large, empty or unequal: the mean belongs to the parameter, and repeats bit for bit."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from blockcodec_cases import Simulation, codecs_by
from ddp_cases import Scalars, assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp
from field_cases import DOORS, Door, engines, engines_and_worlds, every_door, modes, options_of
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync


def _twelve():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(200, 200) for _ in range(12)))


def _rebuilt(rank, world_size, backend):
    for options in (options_of("int8", error_feedback=True), options_of("int4", error_feedback=True)):
        expected = []
        plain = _twelve()
        if rank == 0:
            simulation = Simulation(world_size, codecs_by(plain, {"*": options["codec"]}), True)
            for step in range(4):
                each = []
                for other in range(world_size):
                    plain.zero_grad()
                    plain(batch(other, step, 200)).square().mean().backward()
                    each.append([gradient.clone() for gradient in gradients(plain)])
                names = [name for name, _ in plain.named_parameters()]
                expected.append([simulation.mean(name, group, step) for name, *group in zip(names, *each, strict=True)])
        for door in every_door(_twelve, backend, bucket_mb=1, **options):
            for step in range(4):
                door.zero_grad()
                door(batch(rank, step, 200)).square().mean().backward()
                assert_same_on_all_ranks(gradients(door.module))
                if rank == 0:
                    assert_same_bits(gradients(door.module), expected[step])
            assert door.sync.stats().buckets > door.sync.stats().steps == 4


@engines
def test_residuals_follow_their_parameter_through_a_rebuild(backend):
    """Case 29. One bucket in DDP's first iteration, two afterwards: the bits of the codec applied in one process."""
    run_on_ranks(_rebuilt, 2, timeout_s=120, args=(backend,))


def _start_step(rank, world_size, backend):
    for ddp in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        for accumulate_first in (False, True):
            if accumulate_first and "static_graph" in ddp:
                continue  # refused by DDP: case 50
            for kind in DOORS:
                if kind == "reducer" and ddp:
                    continue
                runs = {}
                for name, options in (
                    ("bf16", {"codec": "bf16", "exchange": "scatter_gather"}),
                    ("late", {"codec": "int4", "error_feedback": True, "start_step": 2}),
                ):
                    door = Door(kind, mlp(), backend, ddp=dict(ddp), bucket_mb=0.02, **options)
                    if accumulate_first:
                        with door.no_sync():
                            door(batch(rank, 9)).square().sum().backward()
                    runs[name] = []
                    for step in range(4):
                        door.zero_grad()
                        door(batch(rank, step)).square().sum().backward()
                        runs[name].append([gradient.clone() for gradient in gradients(door.module)])
                    assert door.sync.stats().steps == 4
                    door.close()
                for step in range(4):
                    same = all(torch.equal(a, b) for a, b in zip(runs["bf16"][step], runs["late"][step], strict=True))
                    assert same == (step < 2), (ddp, accumulate_first, kind, step)


@engines
def test_compression_starts_at_the_step_promised(backend):
    """Case 31. start_step counts synchronised backward passes, however DDP goes about its buckets."""
    run_on_ranks(_start_step, 2, timeout_s=120, args=(backend,))


class Swapped(nn.Module):
    """Two equal layers that rank 1 uses in the other order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, swap):
        first, second = (self.b, self.a) if swap else (self.a, self.b)
        return second(first(x).tanh()).square().sum()


def _order(rank, world_size, backend):
    plain = Swapped()
    for step in range(3):
        expected = []
        for other in range(world_size):
            plain.zero_grad()
            plain(batch(other, step, 16), other == 1).backward()
            expected.append([g.clone() for g in gradients(plain)])
        expected = [sum(each) / world_size for each in zip(*expected, strict=True)]
        for door in every_door(Swapped, backend, bucket_mb=1e-4, codec="fp32"):
            for _ in range(3):
                door.zero_grad()
                door(batch(rank, step, 16), rank == 1).backward()
                for got, wanted in zip(gradients(door.module), expected, strict=True):
                    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)


@engines
def test_layers_used_in_another_order_are_not_mixed(backend):
    """Case 32. Buckets leave in one order on every rank, whatever order gradients come in."""
    run_on_ranks(_order, 2, args=(backend,))


def _oversized(rank, world_size, backend):
    numel = 4000 * 4000 if backend == "native" else 1000 * 1000
    for options in (options_of("bf16"), options_of("int8")):
        for door in every_door(lambda: Scalars(numel), backend, bucket_mb=1, slice_mb=1, **options):
            for _ in range(2):
                door.zero_grad()
                door(torch.tensor(rank + 1.0)).backward()
                got = door.module.weight.grad
                assert float(got.min()) == pytest.approx(1.5, rel=1e-6) and float(got.max()) == pytest.approx(1.5, rel=1e-6)


@engines
def test_a_parameter_larger_than_its_bucket(backend):
    """Case 34. 61 MiB with buckets and slices of 1 MiB; 4 MiB for the engine in Python."""
    run_on_ranks(_oversized, 2, timeout_s=120, args=(backend,))


class Empties(nn.Module):
    """Parameters without elements beside one with, or alone in a bucket of their dtype."""

    def __init__(self):
        super().__init__()
        self.none = nn.Linear(4, 0)
        self.empty = nn.Parameter(torch.empty(0))
        self.alone = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return self.none(x).sum() + self.empty.sum() + self.alone.sum() + (self.weight * x).sum()


def _empty(rank, world_size, backend):
    for options in modes():
        for bucket_mb in (1e-6, 25):
            for door in every_door(Empties, backend, bucket_mb=bucket_mb, **options):
                for _ in range(2):
                    door.zero_grad()
                    door(torch.full((4,), rank + 1.0)).backward()
                    module = door.module
                    assert module.weight.grad.flatten().tolist() == pytest.approx([1.5] * 8, rel=0.02)
                    assert [p.grad.numel() for p in (module.empty, module.alone, module.none.weight)] == [0, 0, 0]
                    assert not door.sync.found_nonfinite()


@engines
def test_parameters_without_elements(backend):
    """Case 37. A layer with no outputs, an empty parameter, and a bucket that holds only that."""
    run_on_ranks(_empty, 2, timeout_s=90, args=(backend,))


def _frozen(rank, world_size, backend):
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        gsync.GradReducer(mlp().requires_grad_(False), backend=backend)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        gsync.GradReducer(nn.Sequential(), backend=backend)
    ddp = DistributedDataParallel(mlp())
    ddp.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        gsync.register(ddp, backend=backend)
    for kind in DOORS:
        module = mlp().requires_grad_(False)
        module[4].bias.requires_grad_(True)
        door = Door(kind, module, backend, codec="fp32")
        door(batch(0, 0)).sum().backward()
        assert [p.grad is None for p in module.parameters()] == [True] * 5 + [False]
        assert module[4].bias.grad.tolist() == [5.0] * 7
        door.close()


@engines
def test_models_with_nothing_or_little_to_train(backend):
    """Case 39. Nothing: a ValueError that says so. One trained parameter among frozen ones: synchronised."""
    run_on_ranks(_frozen, 2, args=(backend,))


def _repeats(rank, world_size, backend):
    torch.use_deterministic_algorithms(True)
    try:
        every = [*modes(), options_of("int4", error_feedback=True, rounding="stochastic", seed=3)]
        for options in every if backend == "native" else every[-3:]:
            for kind in DOORS:
                runs = []
                for _ in range(2):
                    torch.manual_seed(7)
                    door = Door(kind, mlp(3, width=41), backend, bucket_mb=0.01, **options)
                    optimizer = torch.optim.SGD(door.module.parameters(), 1e-3)
                    for step in range(20):
                        optimizer.zero_grad()
                        door(batch(rank, step)).square().sum().backward()
                        optimizer.step()
                    runs.append([p.detach().clone() for p in door.module.parameters()])
                    assert_same_on_all_ranks(runs[-1])
                    door.close()
                assert_same_bits(runs[0], runs[1])
    finally:
        torch.use_deterministic_algorithms(False)


@engines_and_worlds
def test_training_repeats_bit_for_bit(backend, world_size):
    """Case 42. The same seed twice, 20 steps, every mode: the same bits, on all ranks."""
    run_on_ranks(_repeats, world_size, timeout_s=180, args=(backend,))


def _random_streams(rank, world_size, backend):
    for kind in DOORS:
        door = Door(kind, mlp(), backend, codec="int4", rounding="stochastic", seed=5)
        random.seed(rank)
        np.random.seed(rank)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        for step in range(4):
            door(batch(rank, step)).sum().backward()
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()
        assert door.sync.state_dict()["seed"] == 5 and door.sync.state_dict()["step"] == 4
        door.close()
    # The masks of dropout are those of a run without gsync.
    masks = []
    for kind in (None, *DOORS):
        torch.manual_seed(11 + rank)
        module = nn.Sequential(nn.Linear(31, 40), nn.Dropout(0.5))
        model = module if kind is None else Door(kind, module, backend, codec="int4", rounding="stochastic", seed=5)
        torch.manual_seed(12 + rank)
        drawn = []
        for step in range(4):
            y = model(batch(rank, step))
            drawn.append(y == 0)
            y.sum().backward()
        masks.append(torch.stack(drawn))
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    everyone = [torch.empty_like(masks[0]) for _ in range(world_size)]
    dist.all_gather(everyone, masks[0])
    assert not torch.equal(everyone[0], everyone[1])


@engines
def test_random_streams_are_the_users(backend):
    """Case 44. Stochastic rounding has a stream of its own: torch's, Python's and NumPy's stay, and dropout's masks."""
    run_on_ranks(_random_streams, 2, args=(backend,))


@pytest.mark.gpu
def test_gpu_random_state_is_untouched(tmp_path):
    """Case 44. On a GPU."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        door = Door("reducer", Scalars(3000).cuda(), "native", codec="int4", exempt=(), rounding="stochastic", seed=5)
        before = torch.cuda.get_rng_state()
        for _ in range(4):
            door(torch.ones(3000, device="cuda")).backward()
        assert torch.equal(torch.cuda.get_rng_state(), before)
        door.close()
    finally:
        dist.destroy_process_group()

"""Gradients through the block codecs and error feedback: equal on all ranks, and to the operations simulated in one process."""

import pytest
import torch
import torch.distributed as dist
from blockcodec_cases import BLOCK_CODECS, NEAREST, STOCHASTIC, Simulation, codecs_by, local_gradients, train
from ddp_cases import (
    ENGINES,
    Branches,
    Scalars,
    assert_same_bits,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    norm_of,
    why_no_engine,
    wrap,
)
from ranks import run_on_ranks

from gsync import ops


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def _against_the_operations(rank, world_size, backend, sync_options, patterns, feedback=False, **options):
    """Three steps over several buckets and slices, DDP's rebuild included."""
    plain = mlp()
    simulation = Simulation(world_size, codecs_by(plain, patterns), feedback, **options)
    model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, slice_mb=0.02, **sync_options)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        assert_same_on_all_ranks([*gradients(model), sync.grad_norm(), sync.found_nonfinite()])
        if rank == 0:  # the others have the same
            everyone = local_gradients(plain, world_size, step)
            for name, parameter in model.module.named_parameters():
                assert_same_bits(parameter.grad, simulation.mean(name, everyone[name], step))
        assert sync.grad_norm().item() == pytest.approx(norm_of(model), rel=1e-12)


def _bits(rank, world_size, backend):
    for codec in BLOCK_CODECS:
        for feedback in (False, True):
            options = {"codec": codec, "exempt": (), "error_feedback": feedback}
            _against_the_operations(rank, world_size, backend, options, {"*": codec}, feedback)
    # Biases are exempt; stochastic rounding; blocks of another size.
    exempt = {"*.bias": "bf16", "*": "int8"}
    options = {"codec": "int8", "error_feedback": True, "block_size": 64, **STOCHASTIC}
    _against_the_operations(rank, world_size, backend, options, exempt, True, block_size=64, **STOCHASTIC)
    options = {"codec": "int4", "exempt_codec": "fp32", "exempt": ["0.*"]}
    _against_the_operations(rank, world_size, backend, options, {"0.*": "fp32", "*": "int4"})
    # Several codecs in one message.
    mixed = {"0.*": "fp8_e4m3", "2.*": "fp16", "*": "int4"}
    options = {"codec": mixed, "exempt": (), "error_feedback": True}
    _against_the_operations(rank, world_size, backend, options, mixed, True)
    # Residuals and stochastic rounding under the codecs without a scale.
    for codec in ("bf16", "fp16"):
        for rounding in (NEAREST, STOCHASTIC):
            options = {"codec": codec, "error_feedback": True, **rounding}
            _against_the_operations(rank, world_size, backend, options, {"*": codec}, True, **rounding)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_has_the_bits_of_the_operations(engine, world_size):
    run_on_ranks(_bits, world_size, timeout_s=240, args=(engine,))


def _wire_bytes(rank, world_size, backend):
    """In one bucket all of them are those of `payload_bytes`, exempt parameters included."""
    shapes = {name: parameter.shape for name, parameter in mlp().named_parameters()}
    for codec in (*BLOCK_CODECS, "bf16"):
        codecs = [codec if len(shape) > 1 else "bf16" for shape in shapes.values()]
        whole = ops.payload_bytes([shape.numel() for shape in shapes.values()], codecs, None, world_size, list(shapes))
        options = {"codec": codec, "exchange": "scatter_gather"}
        stats = train(rank, backend, range(3), options, {"bucket_cap_mb": 25})[1].stats()
        assert stats.wire_bytes == 3 * 2 * (world_size - 1) * whole // world_size
        assert stats.gradient_bytes == 3 * 4 * sum(shape.numel() for shape in shapes.values())
    assert whole < 0.55 * stats.gradient_bytes / 3


def test_wire_bytes_are_counted_to_the_byte(engine):
    run_on_ranks(_wire_bytes, 3, timeout_s=60, args=(engine,))


def _layouts(rank, world_size, backend):
    for options in (
        {"codec": "int8", "exempt": (), "error_feedback": True},
        {"codec": "int4", "error_feedback": True, **STOCHASTIC},
        {"codec": "bf16", "error_feedback": True},
        {"codec": {"0.*": "fp8_e5m2", "*": "int4"}, "exempt": ()},
    ):
        expected, sync = train(rank, backend, range(4), options, {"bucket_cap_mb": 25})
        state = sync.state_dict()["residuals"]
        for cap, slice_mb in ((0.01, 25), (0.03, 0.01), (25, 0.02)):
            got, other = train(rank, backend, range(4), {**options, "slice_mb": slice_mb}, {"bucket_cap_mb": cap})
            assert_same_bits(got, expected)
            assert_same_bits(other.grad_norm(), sync.grad_norm())
            assert other.state_dict()["residuals"].keys() == state.keys()
            for name, entry in other.state_dict()["residuals"].items():
                assert_same_bits([entry["sender"], entry["reducer"]], [state[name]["sender"], state[name]["reducer"]])
        # The same without DDP's rebuild, and however else DDP goes about it.
        for how in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
            got, _ = train(rank, backend, range(4), options, {"bucket_cap_mb": 0.02, how: True})
            assert_same_bits(got, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_and_residuals_do_not_depend_on_buckets(engine, world_size):
    run_on_ranks(_layouts, world_size, timeout_s=240, args=(engine,))


BLOCKS = {"fp8_e4m3": 256, "fp8_e5m2": 256, "int8": 256, "int4": 64}


def _nonfinite(rank, world_size, backend):
    """One element of one rank: its block is not finite on any rank, the others are as they were, and the next step is clean."""
    numel = 2000
    for codec in BLOCK_CODECS:
        for feedback in (False, True):
            options = {"codec": codec, "exempt": (), "error_feedback": feedback}
            model, sync = wrap(Scalars(numel), backend, **options)
            good, sound = wrap(Scalars(numel), backend, **options)
            x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
            for step, bad in enumerate((float("inf"), float("nan"), None)):
                spoilt = x.clone()
                if bad is not None and rank == 1:
                    spoilt[700] = bad
                model.zero_grad()
                good.zero_grad()
                model(spoilt).backward()
                good(x).backward()
                first = 700 // BLOCKS[codec] * BLOCKS[codec]
                block = torch.arange(numel).ge(first) & torch.arange(numel).lt(first + BLOCKS[codec])
                got, expected = model.module.weight.grad, good.module.weight.grad
                assert_same_on_all_ranks([got, sync.grad_norm(), sync.found_nonfinite()])
                assert got[block].isfinite().any() == (bad is None)
                assert_same_bits(got[~block], expected[~block])
                assert bool(sync.found_nonfinite()) == (bad is not None)
                assert not sound.found_nonfinite()
                if step == 0 and feedback:  # the residuals of that block are as before: zeros
                    assert not sync.state_dict()["residuals"]["weight"]["sender"][block].any() or rank != 1
            assert sync.stats().nonfinite_steps == 2


def test_inf_or_nan_spoils_its_block_on_every_rank_and_nothing_else(engine):
    run_on_ranks(_nonfinite, 2, timeout_s=90, args=(engine,))


# Relative error of the sum of 40 steps; normal gradients, error feedback.
BOUNDS = {"bf16": 0.001, "int8": 0.0025, "int4": 0.04, "fp8_e4m3": 0.008, "fp8_e5m2": 0.016}


def _forty_steps(rank, world_size, backend):
    numel = 8192
    for codec, bound in BOUNDS.items():
        exempt = {"exempt": ()} if codec in BLOCK_CODECS else {}
        model, _ = wrap(Scalars(numel), backend, codec=codec, error_feedback=True, **exempt)
        plain, _ = wrap(Scalars(numel), backend, codec=codec, exchange="scatter_gather", **exempt)
        got, without, exact = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))
        for step in range(40):
            each = [torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(world_size)]
            exact += torch.stack(each).double().mean(0)
            for module, total in ((model, got), (plain, without)):
                module.zero_grad()
                module(each[rank]).backward()
                total += module.module.weight.grad.double()
        error = float((got - exact).norm() / exact.norm())
        assert error <= bound, (codec, error)
        assert error < 0.5 * float((without - exact).norm() / exact.norm()), codec


def test_error_feedback_keeps_the_sum_of_40_steps(engine):
    run_on_ranks(_forty_steps, 2, timeout_s=120, args=(engine,))


def _start(rank, world_size, backend):
    for feedback in (False, True):
        options = {"codec": "int4", "error_feedback": feedback}
        early, _ = train(rank, backend, range(3), {"codec": "bf16", "exchange": "scatter_gather"})
        got, sync = train(rank, backend, range(5), {**options, "start_step": 3})
        assert_same_bits(got[: len(early)], early)
        late, _ = train(rank, backend, range(3, 5), options)
        assert_same_bits(got[len(early) :], late)
        assert sync.stats().steps == 5


def test_bf16_until_start_step(engine):
    run_on_ranks(_start, 2, timeout_s=60, args=(engine,))


def _random(rank, world_size, backend):
    options = {"codec": "int4", "exempt": (), "rounding": "stochastic"}
    first, _ = train(rank, backend, range(2), {**options, "seed": 3})
    model, _ = wrap(mlp(), backend, **options)
    loss = model(batch(rank, 0)).square().sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    again, _ = train(rank, backend, range(2), {**options, "seed": 3})
    assert_same_bits(first, again)
    other, _ = train(rank, backend, range(2), {**options, "seed": 4})
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.numel() > 100)
    assert_same_on_all_ranks(other)


def test_stochastic_rounding_repeats_with_its_seed_and_leaves_the_random_state_alone(engine):
    run_on_ranks(_random, 2, timeout_s=60, args=(engine,))


def _unused(rank, world_size, backend):
    """What nobody used keeps its residuals; what one rank used gets the mean with zero, and only that rank's residual."""
    model, sync = wrap(Branches(), backend, ddp={"find_unused_parameters": True}, codec="int4", exempt=(), error_feedback=True)
    a, b = model.module.a.weight, model.module.b.weight
    x = torch.full((1, 1), 1.0 + 0.01 * rank)
    model(x, "ab").backward()
    before = sync.state_dict()["residuals"]
    model.zero_grad()
    model(x, "a").backward()
    after = sync.state_dict()["residuals"]
    assert b.grad is None and a.grad.isfinite().all()
    for which in ("sender", "reducer"):
        assert_same_bits(after["b.weight"][which], before["b.weight"][which])
    model.zero_grad()
    model(x, "ab"[rank]).backward()
    last = sync.state_dict()["residuals"]
    unused = "ba"[rank] + ".weight"
    assert_same_bits(last[unused]["sender"], after[unused]["sender"])
    assert a.grad.item() == pytest.approx(0.5, rel=0.2) and b.grad.item() == pytest.approx(0.505, rel=0.2)
    assert_same_on_all_ranks([a.grad, b.grad])


def test_residuals_of_unused_parameters_stay(engine):
    run_on_ranks(_unused, 2, timeout_s=60, args=(engine,))


def _uneven(rank, world_size, backend):
    """Rank 0 has two batches, rank 1 four: the rank that has joined adds zeros, and what its residuals hold."""
    model, _ = wrap(Scalars(600), backend, codec="int4", exempt=(), error_feedback=True)
    sums = torch.zeros(600, dtype=torch.float64)
    with model.join():
        for _ in range(2 + 2 * rank):
            model.zero_grad()
            model(torch.linspace(0.1, 1.0, 600)).backward()
            sums += model.module.weight.grad.double()
    # Four steps: the sum is exact but for the last step's residuals, each within the bound of one encoding.
    exact = torch.linspace(0.1, 1.0, 600, dtype=torch.float64) * (2 + (1 if rank else 0))
    assert (sums - exact).abs().max() < 3 * 0.0725


def test_a_rank_that_has_joined_sends_its_residuals(engine):
    run_on_ranks(_uneven, 2, timeout_s=60, args=(engine,))


def _alone(rank, world_size, backend):
    """A group of one rank encodes nothing, so it keeps no residuals."""
    group = [dist.new_group([r]) for r in range(world_size)][rank]
    model, sync = wrap(Scalars(300), backend, process_group=group, codec="int4", exempt=(), error_feedback=True)
    x = torch.randn(300)
    model(x).backward()
    assert_same_bits(model.module.weight.grad, x)
    assert sync.stats().residual_bytes == 0 and sync.state_dict()["residuals"] == {}


def test_one_rank_keeps_its_gradients(engine):
    run_on_ranks(_alone, 2, timeout_s=60, args=(engine,))

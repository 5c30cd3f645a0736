"""Residuals across checkpoints, worlds, models, errors and loss scales."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from blockcodec_cases import STOCHASTIC, train
from ddp_cases import ENGINES, Scalars, assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp, why_no_engine, wrap
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync

# The exchange is given, since under "auto" it depends on the hosts, which a state learns at its first bucket.
OPTIONS = {"codec": "int4", "error_feedback": True, "exchange": "scatter_gather", **STOCHASTIC}


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def saved(state):
    """A state as it comes back from a file that only holds plain things."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_state(left, right):
    assert {k: v for k, v in left.items() if k != "residuals"} == {k: v for k, v in right.items() if k != "residuals"}
    assert left["residuals"].keys() == right["residuals"].keys()
    for name, entry in left["residuals"].items():
        other = right["residuals"][name]
        assert entry["first"] == other["first"]
        assert_same_bits([entry["sender"], entry["reducer"]], [other["sender"], other["reducer"]])


def _resume(rank, world_size, backend):
    """Five steps in one go; and after each number of steps, saved, loaded into a new model and gone on with."""
    whole, last = train(rank, backend, range(5), OPTIONS)
    per_step = len(whole) // 5
    for done in (1, 2, 3):  # before and after DDP has rebuilt its buckets
        _, sync = train(rank, backend, range(done), OPTIONS)
        state = saved(sync.state_dict())
        assert (state["rank"], state["world_size"], state["seed"], state["step"]) == (rank, world_size, 7, done)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rest, resumed = train(rank, backend, range(done, 5), OPTIONS, loaded=state)
        assert_same_bits(rest, whole[done * per_step :])
        assert_same_state(resumed.state_dict(), last.state_dict())
    # Into a state that knows its model only at its first bucket, and that has another seed of its own.
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
    late = gsync.SyncState(backend=backend, **{**OPTIONS, "seed": 99})
    late.load_state_dict(state)
    assert_same_state(late.state_dict(), state)
    model.register_comm_hook(late, gsync.hook)
    for step in range(3, 5):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
    assert_same_bits(gradients(model), whole[-per_step:])
    # What was saved does not change when training goes on, nor does loading alias it.
    before = copy.deepcopy(state)
    late.load_state_dict(state)
    model(batch(rank, 5)).square().sum().backward()
    assert_same_state(state, before)
    # A state that was used is loaded again, in the middle of training.
    late.load_state_dict(state)
    for step in range(3, 5):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
    assert_same_bits(gradients(model), whole[-per_step:])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_world_goes_on_bit_for_bit(engine, world_size):
    run_on_ranks(_resume, world_size, timeout_s=120, args=(engine,))


def _others(rank, world_size, backend):
    _, sync = train(rank, backend, range(2), OPTIONS)
    state = sync.state_dict()
    # Another rank's: step and seed.
    theirs = {**state, "rank": 1 - rank}
    _model, other = wrap(mlp(), backend, **OPTIONS)
    with pytest.warns(gsync.GsyncWarning, match=f"residuals of rank {1 - rank} of 2 are dropped on rank {rank} of 2"):
        other.load_state_dict(theirs)
    assert other.state_dict()["step"] == 2
    assert not any(entry["sender"].any() or entry["reducer"].any() for entry in other.state_dict()["residuals"].values())
    with pytest.warns(gsync.GsyncWarning, match="residuals of rank 0 of 7 are dropped"):
        other.load_state_dict({**state, "rank": 0, "world_size": 7})
    # Without error feedback there is no place for them; nor in a group of one rank.
    _plain, off = wrap(mlp(), backend, codec="int4")
    with pytest.warns(gsync.GsyncWarning, match="the residuals of 6 parameters are dropped: error_feedback is off"):
        off.load_state_dict(state)
    with pytest.raises(ValueError, match="without error_feedback there are none"):
        off.state_dict(consolidate=True)

    # A changed model: by name, and in words.
    class Changed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i, part in enumerate(mlp()):
                if i != 2:
                    self.add_module(str(i), part if i != 4 else torch.nn.Linear(67, 7))
            self.new = torch.nn.Linear(3, 3)

    _changed, third = wrap(Changed(), backend, **OPTIONS)
    with pytest.warns(gsync.GsyncWarning) as caught:
        third.load_state_dict(state)
    text = str(caught[0].message)
    assert "residuals of 2.bias, 2.weight are dropped, since they have no parameter any more" in text
    assert "residuals of new.bias, new.weight are zero, since the state has none" in text
    assert "residuals of 4.weight are dropped, since the shape was (7, 129) and is (7, 67)" in text
    loaded = third.state_dict()["residuals"]
    assert_same_bits(loaded["0.weight"]["sender"], state["residuals"]["0.weight"]["sender"])
    assert_same_bits(loaded["0.weight"]["reducer"], state["residuals"]["0.weight"]["reducer"])
    assert not loaded["4.weight"]["sender"].any() and loaded["4.bias"]["sender"].any()
    # Blocks of another size: another share is this rank's.
    _fourth_model, fourth = wrap(mlp(), backend, **{**OPTIONS, "block_size": 128})
    with pytest.warns(gsync.GsyncWarning, match="dropped as far as this rank reduces"):
        fourth.load_state_dict(state)
    assert_same_bits(fourth.state_dict()["residuals"]["0.weight"]["sender"], state["residuals"]["0.weight"]["sender"])
    # Copies have no residuals, and do not touch those of the original.
    for twin in (copy.deepcopy(sync), pickle.loads(pickle.dumps(sync))):
        assert twin.state_dict()["residuals"] == {} and twin.state_dict()["step"] == 2
    broken = {**state, "residuals": {"0.weight": torch.zeros(3)}}
    for wrong, words in (
        ({}, "version, rank"),
        ({**state, "version": 2}, "version 2, expected 1"),
        (broken, r"residuals\['0.weight'\] should have first, reducer, sender"),
        ({**state, "consolidated": True}, "should have error"),
    ):
        with pytest.raises(ValueError, match=words):
            sync.load_state_dict(wrong)


def test_what_does_not_fit_is_dropped_and_said(engine):
    run_on_ranks(_others, 2, timeout_s=60, args=(engine,))


def _error_of(rank, sync, world_size):
    """Of each parameter the sum of this rank's residuals, reducer's included, in the parameter's shape."""
    errors = {}
    for name, entry in sync.state_dict()["residuals"].items():
        flat = entry["sender"].reshape(-1).clone()
        flat[entry["first"] : entry["first"] + entry["reducer"].numel()] += entry["reducer"]
        errors[name] = flat.view(entry["sender"].shape)
    return errors


def _consolidate(rank, world_size, backend, state):
    """Trains and consolidates, or loads what another world consolidated."""
    if state is None:
        _, sync = train(rank, backend, range(3), OPTIONS)
        mine = _error_of(rank, sync, world_size)
        whole = sync.state_dict(consolidate=True)
        assert whole["consolidated"] and whole["step"] == 3
        for name, entry in whole["residuals"].items():
            total = mine[name].clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(entry["error"], total, rtol=0, atol=1e-6)
            assert_same_on_all_ranks(entry["error"])
            assert entry["error"].any()
        return saved(whole)
    model, sync = wrap(mlp(), backend, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync.load_state_dict(state)
    for name, entry in sync.state_dict()["residuals"].items():
        assert_same_bits(entry["sender"], state["residuals"][name]["error"] / world_size)
        assert not entry["reducer"].any()
    # No error is lost: the sum of what the new world holds is that of the old one.
    for name, entry in sync.state_dict(consolidate=True)["residuals"].items():
        torch.testing.assert_close(entry["error"], state["residuals"][name]["error"], rtol=1e-5, atol=1e-7)
    model(batch(rank, 3)).square().sum().backward()
    assert_same_on_all_ranks(gradients(model))
    assert sync.state_dict()["step"] == 4
    return None


def test_a_consolidated_state_carries_over_to_another_world(engine):
    states = run_on_ranks(_consolidate, 3, timeout_s=60, args=(engine, None))
    run_on_ranks(_consolidate, 2, timeout_s=60, args=(engine, states[2]))


def _after_an_error(rank, world_size, backend):
    """reset() keeps residuals; a closed state that is registered again starts without."""
    model, sync = wrap(mlp(), backend, **OPTIONS)
    model(batch(rank, 0)).square().sum().backward()
    before = sync.state_dict()
    assert sync.stats().residual_bytes > 4 * sum(p.numel() for p in model.parameters())
    sync.reset()
    assert_same_state(sync.state_dict(), before)
    model.zero_grad()
    model(batch(rank, 1)).square().sum().backward()
    assert sync.state_dict()["step"] == 2
    whole, _ = train(rank, backend, range(2), OPTIONS)
    assert_same_bits(gradients(model), whole[-6:])
    sync.close()
    assert gsync.register(model, backend=backend, **OPTIONS) is sync
    assert sync.state_dict()["residuals"] == {}
    model(batch(rank, 2)).square().sum().backward()
    assert sync.state_dict()["residuals"]["0.weight"]["sender"].any()


def test_residuals_outlive_reset_but_not_another_configuration(engine):
    run_on_ranks(_after_an_error, 2, timeout_s=60, args=(engine,))


def _scaled(rank, world_size, backend):
    """A loss scale changes nothing but the unit: scaled runs give the scaled bits, as scales are powers of two."""
    options = {"codec": "int8", "exempt": (), "error_feedback": True, "exchange": "scatter_gather"}
    plain, _ = wrap(Scalars(700), backend, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, sync = wrap(Scalars(700), backend, scaler=scaler, **options)
    by_hand, own = wrap(Scalars(700), backend, **options)
    before = 1024.0
    for step, scale in enumerate((1024.0, 1024.0, 512.0, 4096.0)):
        x = torch.randn(700, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (plain, model, by_hand):
            each.zero_grad()
        plain(x).backward()
        if scale != before:
            own.scale_residuals(scale / before)
            scaler.update(scale)
        before = scale
        scaler.scale(model(x)).backward()
        (by_hand(x) * scale).backward()
        for each in (model, by_hand):
            assert_same_bits(each.module.weight.grad, plain.module.weight.grad * scale)
    state = saved(sync.state_dict())
    assert state["loss_scale"] == 4096.0
    # Loaded under another scale, residuals are in its unit from their first use on.
    for given, unit in (
        (torch.amp.GradScaler("cpu", init_scale=2.0), 2.0),
        (None, 1.0),
        (torch.amp.GradScaler(enabled=False), 1.0),
    ):
        other, resumed = wrap(Scalars(700), backend, scaler=given, **options)
        resumed.load_state_dict(state)
        x = torch.randn(700, generator=torch.Generator().manual_seed(rank))
        plain_again, first = wrap(Scalars(700), backend, **options)
        first.load_state_dict(state)
        mine, theirs = (each["residuals"]["weight"]["sender"] for each in (first.state_dict(), state))
        assert_same_bits(mine * 4096.0, theirs)
        plain_again(x).backward()
        (other(x) * unit).backward()
        assert_same_bits(other.module.weight.grad, plain_again.module.weight.grad * unit)
    for factor in (0, -1.0, float("inf"), float("nan"), "2", None, True):
        with pytest.raises(ValueError, match="scale_residuals: factor="):
            sync.scale_residuals(factor)
    with pytest.raises(ValueError, match="without error_feedback there are none"):
        wrap(Scalars(3), backend, codec="bf16", scaler=scaler)
    with pytest.raises(TypeError, match=r"scaler: expected a .*GradScaler, got int"):
        wrap(Scalars(3), backend, scaler=3, **options)


def test_residuals_follow_the_loss_scale(engine):
    run_on_ranks(_scaled, 2, timeout_s=60, args=(engine,))


def _inf_step(rank, world_size, backend):
    """GradScaler sees the overflow, skips and backs off; training goes on with finite gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, sync = wrap(mlp(), backend, codec="int4", error_feedback=True, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        assert bool(sync.found_nonfinite()) == (step == 1)
        scaler.step(optimizer)
        scaler.update()
        assert_same_on_all_ranks(list(model.parameters()))
    assert scaler.get_scale() == 512.0 and sync.state_dict()["loss_scale"] == 512.0
    assert all(entry["sender"].isfinite().all() for entry in sync.state_dict()["residuals"].values())


def test_a_step_that_overflows_leaves_residuals_finite(engine):
    run_on_ranks(_inf_step, 2, timeout_s=60, args=(engine,))


class Shapes(torch.nn.Module):
    """A channels_last convolution, a complex parameter and an expanded one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv = torch.nn.Conv2d(5, 9, 3).to(memory_format=torch.channels_last)
        self.spectrum = torch.nn.Parameter(torch.randn(11, 13, dtype=torch.complex64))

    def forward(self, x):
        return self.conv(x).square().sum() + (self.spectrum * x.sum()).abs().square().sum()


def _shapes(rank, world_size, backend):
    """Residuals come in the shape of their parameter, whatever its memory looks like, and resume."""

    def run(steps, state=None):
        model, sync = wrap(Shapes(), backend, codec="int4", exempt=(), error_feedback=True)
        if state is not None:
            sync.load_state_dict(state)
        for step in steps:
            model.zero_grad()
            model(torch.randn(2, 5, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        return [g.clone() for g in gradients(model)], sync

    whole, sync = run(range(3))
    _, half = run(range(2))
    state = saved(half.state_dict())
    assert state["residuals"]["conv.weight"]["sender"].shape == (9, 5, 3, 3)
    assert state["residuals"]["conv.weight"]["sender"].is_contiguous(memory_format=torch.channels_last)
    assert state["residuals"]["spectrum"]["sender"].shape == (11, 13, 2)
    rest, resumed = run(range(2, 3), state)
    assert_same_bits(
        [torch.view_as_real(g) if g.is_complex() else g for g in rest],
        [torch.view_as_real(g) if g.is_complex() else g for g in whole],
    )
    assert_same_state(resumed.state_dict(), sync.state_dict())
    # Into another memory format: the sender's by place, the reducer's not, as it holds other elements.
    state["residuals"]["conv.weight"]["sender"] = state["residuals"]["conv.weight"]["sender"].contiguous()
    with pytest.warns(gsync.GsyncWarning, match="residuals of conv.weight are dropped as far as this rank reduces"):
        resumed.load_state_dict(state)
    loaded, had = (each.state_dict()["residuals"]["conv.weight"]["sender"] for each in (resumed, half))
    assert torch.equal(loaded, had)


def test_residuals_have_the_shape_of_their_parameter(engine):
    run_on_ranks(_shapes, 2, timeout_s=60, args=(engine,))


def _different(rank, world_size, backend):
    for options, words in (
        (({"seed": 1}, {"seed": 2}), "seed is 2, on rank 0 it is 1"),
        (({"block_size": 32}, {"block_size": 64}), "block_size is '64', on rank 0 it is '32'"),
        (({"exempt": ["0.*"]}, {"exempt": ["2.*"]}), "on rank 0 it is 0.bias"),
    ):
        model, _ = wrap(mlp(), backend, codec="int4", rounding="stochastic", **options[rank])
        with pytest.raises(ValueError, match=words):
            model(batch(rank, 0)).square().sum().backward()


def test_ranks_with_different_options_are_told(engine):
    run_on_ranks(_different, 2, timeout_s=60, args=(engine,))

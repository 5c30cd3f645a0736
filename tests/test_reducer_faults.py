"""A rank that dies, is late, or raises under GradReducer: an error on every rank in time, NaN, processes that end."""

# ruff: noqa: B023 (what captures a loop variable is called in the same round)

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from ddp_cases import assert_same_on_all_ranks, batch, gradients, mlp
from ranks import run_on_ranks, watch_ranks
from reducer_cases import alone, assert_gradients, each_engine
from torch.utils.checkpoint import checkpoint

import gsync

GROUP_TIMEOUT_S = 4.0
MARGIN_S = 2.0

engines = pytest.mark.parametrize("backend", each_engine())


def _fault(kind):
    if kind == "die":
        os._exit(9)
    if kind == "sleep":
        time.sleep(GROUP_TIMEOUT_S + MARGIN_S + 1)
    if kind == "raise":
        raise ZeroDivisionError("in backward")


def _train(rank, world_size, backend, kind, exchange):
    """Three steps, small buckets; in the third, rank 1 has its fault between its first bucket and its last."""
    model = mlp(width=200)
    reducer = gsync.GradReducer(model, backend=backend, exchange=exchange, bucket_mb=0.001)
    assert len(reducer._buckets) > 2
    if rank == 1:
        model[2].weight.register_hook(lambda _: _fault(kind) if reducer.stats().steps == 2 else None)
    result = {}
    for step in range(3):
        model.zero_grad()
        loss = model(batch(rank, step)).square().sum()
        started = time.monotonic()
        try:
            loss.backward()
        except Exception as error:
            result = {"error": type(error).__name__, "message": str(error), "step": step}
            result["seconds"] = time.monotonic() - started
            expected = alone(model, world_size, lambda m, r: m(batch(r, step)).square().sum())
            pairs = [(param.grad, expected[name]) for name, param in model.named_parameters() if param.grad is not None]
            # Each is the mean, or marked.
            result["marked"] = [bool(g.isnan().all()) for g, _ in pairs]
            result["right"] = [bool(torch.allclose(g, mean, rtol=0.02, atol=0.1)) for g, mean in pairs]
            break
        assert all(g.isfinite().all() for g in gradients(model))
    again = []
    for call in (
        reducer.grad_norm,
        reducer.wait,
        lambda: model(batch(rank, 0)),
        lambda: model.forward(batch(rank, 0)).sum().backward(),
    ):
        try:
            call()
            again.append("no error")
        except gsync.SyncError as error:
            again.append(str(error))
    result["again"] = again
    result["next"] = [bool(g.isnan().all()) for g in gradients(model)]
    return result


@engines
@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_a_rank_that_dies(backend, exchange):
    outcomes = watch_ranks(_train, 3, 60, args=(backend, "die", exchange), group_timeout_s=GROUP_TIMEOUT_S)
    assert outcomes[1].exit_code == 9
    for rank in (0, 2):
        result = outcomes[rank].value
        assert outcomes[rank].exit_code == 0, outcomes[rank]
        assert result["error"] in ("SyncError", "SyncTimeoutError"), result
        assert result["step"] == 2 and result["seconds"] < GROUP_TIMEOUT_S + MARGIN_S
        assert "of step 2 on" in result["message"] and f"rank {rank} of 3" in result["message"] and "bucket" in result["message"]
        assert any(result["marked"]) and all(a or b for a, b in zip(result["marked"], result["right"], strict=True)), result
        assert result["next"] == [True] * 6 and all(text != "no error" for text in result["again"]), result


@engines
def test_a_rank_that_is_late(backend):
    outcomes = watch_ranks(_train, 2, 60, args=(backend, "sleep", "all_reduce"), group_timeout_s=GROUP_TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        result = outcome.value
        assert outcome.exit_code == 0, outcome
        assert result["error"] == "SyncTimeoutError" if rank == 0 else result["error"].startswith("Sync")
        assert rank == 1 or result["seconds"] < GROUP_TIMEOUT_S + MARGIN_S
        assert result["step"] == 2 and any(result["marked"]) and result["next"] == [True] * 6
        assert all(a or b for a, b in zip(result["marked"], result["right"], strict=True)), result


@engines
def test_a_rank_that_raises_in_backward(backend):
    outcomes = watch_ranks(_train, 2, 60, args=(backend, "raise", "all_reduce"), group_timeout_s=GROUP_TIMEOUT_S)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    first, second = (outcome.value for outcome in outcomes)
    assert second["error"] == "ZeroDivisionError"
    # The rank that raised finds out itself at its next call, and lets the other know, which need not wait for its time-out.
    assert "the backward pass before this one ended by an exception" in second["again"][1], second
    assert all(text != "no error" for text in second["again"][1:])
    assert first["error"].startswith("Sync") and first["seconds"] < MARGIN_S, first
    assert any(first["marked"]) and all(a or b for a, b in zip(first["marked"], first["right"], strict=True)), first
    assert first["next"] == [True] * 6 and second["next"] and all(second["next"])


def _recover(rank, world_size, backend):
    """A time-out, caught and reset on every rank: then the mean is right again; in the first step, and in a later one."""
    for bad_step in (0, 2):
        model = mlp()
        reducer = gsync.GradReducer(model, backend=backend, codec="fp32", timeout_s=2.0, bucket_mb=0.02)
        for step in range(5):
            model.zero_grad()
            if step == bad_step:
                if rank == 1:
                    time.sleep(5.0)
                with pytest.raises(gsync.SyncError):
                    model(batch(rank, step)).square().sum().backward()
                dist.barrier()
                reducer.reset()
                model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
            assert_gradients(model, alone(model, world_size, lambda m, r: m(batch(r, step)).square().sum()))
            assert_same_on_all_ranks(gradients(model))
        assert reducer.stats().steps == 5
    return True


@engines
def test_after_reset_the_mean_is_right_again(backend):
    outcomes = watch_ranks(_recover, 2, 90, args=(backend,), group_timeout_s=30)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.value is True and outcome.exit_code == 0


def _late_at_construction(rank, world_size, backend):
    if rank == 1:
        time.sleep(4)
        return 0.0
    started = time.monotonic()
    with pytest.raises(gsync.SyncTimeoutError, match=r"rank 0 waited 1\.5 s for rank 1"):
        gsync.GradReducer(mlp(), backend=backend, timeout_s=1.5)
    return time.monotonic() - started


@engines
def test_a_rank_that_makes_no_reducer(backend):
    outcomes = watch_ranks(_late_at_construction, 2, 60, args=(backend,), group_timeout_s=30)
    assert outcomes[0].error is None, outcomes[0].error
    assert outcomes[0].value < 1.5 + MARGIN_S and [outcome.exit_code for outcome in outcomes] == [0, 0]


class Toggled(torch.nn.Module):
    """A checkpointed block that is used once, or twice; and a layer that is frozen at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.block, self.frozen = (torch.nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.on_gradient = lambda gradient: None

    def forward(self, x, times=1):
        x = self.frozen(self.first(x))
        x.register_hook(lambda gradient: self.on_gradient(gradient))
        for _ in range(times):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x.square().sum()


def unfreeze(model):
    model.frozen.requires_grad_(True)  # and no value: a hook's would take the gradient's place


def _turn(rank, world_size, backend, kind):
    """Three steps that are alike, then one that is not."""
    model = Toggled()
    reducer = gsync.GradReducer(model, codec="fp32", backend=backend, bucket_mb=1e-6)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    model.zero_grad()
    if kind == "frozen":  # the graph has it; the step that began with the block's gradients does not
        model.frozen.requires_grad_(True)
        loss = model(x)
        model.frozen.requires_grad_(False)
        model.on_gradient = lambda gradient: unfreeze(model)
    else:
        loss = model(x, times=2)
    with pytest.raises(gsync.SyncError) as caught:
        loss.backward()
    assert model.first.weight.grad is None or model.first.weight.grad.isnan().all()
    reducer.reset()
    model.frozen.requires_grad_(False)
    model.on_gradient = lambda gradient: None
    model.zero_grad()
    model(x).backward()
    assert_same_on_all_ranks(gradients(model))
    assert all(gradient.isfinite().all() for gradient in gradients(model))
    return str(caught.value)


@engines
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("frozen", "parameter 'frozen.*' was unfrozen while the backward pass was under way"),
        ("twice", "parameter 'block.*' got a second gradient in one backward pass, after the first had been sent"),
    ],
)
def test_a_backward_pass_that_is_not_like_those_before_is_an_error(backend, kind, words):
    for message in run_on_ranks(_turn, 2, args=(backend, kind)):
        assert re.search(words, message), message

"""A rank that dies, is late, or raises: an error on every rank in time, NaN in what was not synchronised, processes that end."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ddp_cases import ENGINES, assert_same_bits, batch, gradients, mlp, why_no_engine, wrap
from ranks import watch_ranks
from torch.nn.parallel import DistributedDataParallel

import gsync

GROUP_TIMEOUT_S = 4.0
MARGIN_S = 2.0


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    reason = why_no_engine(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def _fault(kind, sync):
    if kind == "die":
        os._exit(9)
    if kind == "sleep":
        time.sleep(GROUP_TIMEOUT_S + MARGIN_S + 1)
    if kind == "abort":
        sync._engine.abort("the test asked for it")
    if kind == "raise":
        raise ZeroDivisionError("in the hook")


def _mean(world_size, step):
    """The gradients that all ranks should have."""
    model = mlp(width=200)
    sum(model(batch(rank, step)).square().sum() for rank in range(world_size)).div(world_size).backward()
    return gradients(model)


def _train(rank, world_size, backend, kind, exchange, by_hook):
    """Three steps, small buckets; in the third, rank 1 has its fault while its second bucket is under way."""
    model = DistributedDataParallel(mlp(width=200), bucket_cap_mb=0.02, gradient_as_bucket_view=exchange == "scatter_gather")
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        if rank == 1 and sum(index == 0 for index in seen) == 3 and bucket.index() == 1:
            _fault(kind, sync)
        return gsync.hook(state, bucket)

    if by_hook:
        sync = gsync.SyncState(backend=backend, exchange=exchange)
        model.register_comm_hook(sync, hook)
    else:
        sync = gsync.register(model, backend=backend, exchange=exchange)
        if rank == 1:
            model.module[0].weight.register_hook(lambda _: _fault(kind, sync) if sync.stats().steps == 2 else None)
    result = {}
    for step in range(3):
        model.zero_grad()
        result = {}
        loss = model(batch(rank, step)).square().sum()
        started = time.monotonic()
        try:
            loss.backward()
        except Exception as error:
            result = {"error": type(error).__name__, "message": str(error), "step": step}
            result["seconds"] = time.monotonic() - started
            result["nan"] = [bool(g.isnan().all()) for g in gradients(model)]
            pairs = zip(gradients(model), _mean(world_size, step), strict=True)
            result["right"] = [bool(torch.allclose(got, mean, rtol=0.02, atol=0.1)) for got, mean in pairs]
            break
        assert all(g.isfinite().all() for g in gradients(model))
    try:
        sync.grad_norm()
        result["again"] = "no error"
    except gsync.SyncError as error:
        result["again"] = type(error).__name__
    try:
        with model.no_sync():
            model(batch(rank, 0))
        model(batch(rank, 0)).sum().backward()
    except gsync.SyncError:
        result["next"] = [bool(g.isnan().all()) for g in gradients(model)]
    except RuntimeError as error:  # DDP itself: the backward pass before did not come to its end
        result["next"] = str(error)
    return result


def _assert_marked(result):
    assert any(result["nan"]), result
    assert all(nan or right for nan, right in zip(result["nan"], result["right"], strict=True)), result


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_a_rank_that_dies_is_told_by_the_others_at_once(engine, exchange):
    outcomes = watch_ranks(
        _train, 3, 60, args=(engine, "die", exchange, exchange == "all_reduce"), group_timeout_s=GROUP_TIMEOUT_S
    )
    assert outcomes[1].exit_code == 9
    for rank in (0, 2):
        result = outcomes[rank].value
        assert outcomes[rank].exit_code == 0, outcomes[rank]
        assert result["error"] in ("SyncError", "SyncTimeoutError"), result
        assert result["step"] == 2 and result["seconds"] < GROUP_TIMEOUT_S + MARGIN_S
        assert "of step 2 on" in result["message"] and f"rank {rank} of 3" in result["message"] and "bucket" in result["message"]
        _assert_marked(result)
        assert result["again"] == result["error"] and result["next"] == [True] * 6, result


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_a_rank_that_is_late_is_an_error_on_every_rank(engine, exchange):
    outcomes = watch_ranks(
        _train, 2, 60, args=(engine, "sleep", exchange, exchange == "all_reduce"), group_timeout_s=GROUP_TIMEOUT_S
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, outcome
        assert outcome.value["error"] in ("SyncTimeoutError", "SyncError"), outcome.value
        assert outcome.value["step"] == 2
        _assert_marked(outcome.value)
        if rank == 0:
            assert outcome.value["error"] == "SyncTimeoutError"
            assert outcome.value["seconds"] < GROUP_TIMEOUT_S + MARGIN_S


def test_a_rank_that_raises_in_the_hook_is_an_error_on_every_rank(engine):
    outcomes = watch_ranks(_train, 2, 60, args=(engine, "raise", "all_reduce", True), group_timeout_s=GROUP_TIMEOUT_S)
    assert outcomes[1].value["error"] == "ZeroDivisionError"
    assert outcomes[0].value["error"] in ("SyncTimeoutError", "SyncError")  # the latter where rank 1 has ended meanwhile
    assert outcomes[0].value["seconds"] < GROUP_TIMEOUT_S + MARGIN_S
    _assert_marked(outcomes[0].value)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]


def test_an_engine_that_fails_on_one_rank_is_an_error_on_every_rank_at_once(engine):
    outcomes = watch_ranks(_train, 2, 60, args=(engine, "abort", "all_reduce", True), group_timeout_s=GROUP_TIMEOUT_S)
    for outcome in outcomes:
        assert outcome.value["error"] == "SyncError" and outcome.value["seconds"] < MARGIN_S, outcome.value
        _assert_marked(outcome.value)
        assert outcome.exit_code == 0
    assert "the test asked for it" in outcomes[1].value["message"]


def _recover(rank, world_size, backend):
    """A time-out in the third step, and in the first; caught and reset on every rank; then the mean is right again."""
    values = []
    for bad_step in (2, 0):
        model, sync = wrap(mlp(), backend, ddp={"bucket_cap_mb": 0.02}, codec="fp32", timeout_s=2.0)
        reference = DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
        for step in range(5):
            for each in (model, reference):
                each.zero_grad()
            if step == bad_step:
                if rank == 1:
                    time.sleep(5.0)
                with pytest.raises(gsync.SyncError):
                    model(batch(rank, step)).square().sum().backward()
                with pytest.raises(gsync.SyncError):
                    sync.found_nonfinite()
                dist.barrier()
                sync.reset()
                model.zero_grad()
            for each in (model, reference):
                each(batch(rank, step)).square().sum().backward()
            assert_same_bits(gradients(model), gradients(reference))
        values.append(sync.stats().steps)
    return values


def test_after_reset_the_mean_is_right_again(engine):
    outcomes = watch_ranks(_recover, 2, 90, args=(engine,), group_timeout_s=30)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.value == [5, 5] and outcome.exit_code == 0


def _own_timeout(rank, world_size, backend):
    """`timeout_s` holds instead of the group's, already when the ranks meet for the first time."""
    model, _ = wrap(mlp(), backend, timeout_s=1.5)
    started = time.monotonic()
    if rank == 1:
        time.sleep(5)
        return 0.0
    with pytest.raises(gsync.SyncTimeoutError, match=r"rank 0 waited 1\.5 s for rank 1"):
        model(batch(rank, 0)).sum().backward()
    assert all(g.isnan().all() for g in gradients(model)[-2:])
    return time.monotonic() - started


def test_own_timeout_is_kept_at_the_first_meeting(engine):
    outcomes = watch_ranks(_own_timeout, 2, 60, args=(engine,), group_timeout_s=30)
    assert outcomes[0].error is None, outcomes[0].error
    assert outcomes[0].value < 1.5 + MARGIN_S
    assert torch.tensor([outcome.exit_code for outcome in outcomes]).eq(0).all()

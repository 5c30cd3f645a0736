"""What the engine does when something goes wrong: an error on every rank, NaN in what was not synchronised, no hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from engine_setup import Listed, make_ddp, make_engine, make_transport, rows
from ranks import run_on_ranks, watch_ranks

from gsync import _native
from gsync.errors import SyncError, SyncTimeoutError

pytestmark = pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")

# Two buckets of about 1 MiB from the second step on, so that a failure meets one bucket under way and one behind it.
NUMELS = (300_000, 300_000)
DDP = {"bucket_cap_mb": 1}


def backward(ddp, rank: int, step: int) -> BaseException | None:
    ddp.module.zero_grad()
    try:
        ddp(rows(NUMELS, rank, step)).backward()
    except Exception as error:
        return error
    return None


def told(error: BaseException | None, engine) -> tuple[str, str, bool]:
    """Return the class and the text of an error, and whether the engine repeats it."""
    try:
        engine.raise_pending()
        repeated = False
    except SyncError as again:
        repeated = str(again) == str(error)
    return type(error).__name__, str(error), repeated


def grads_are_nan(module) -> bool:
    return all(bool(parameter.grad.isnan().all()) for parameter in module.parameters())


def sleep_past_the_timeout(rank: int, world_size: int, exchange: str):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, exchange=exchange, timeout_s=2.0)
    ddp = make_ddp(module, engine, **DDP)
    assert backward(ddp, rank, 0) is None
    assert backward(ddp, rank, 1) is None
    if rank == 1:
        time.sleep(6)
    started = time.monotonic()
    error = backward(ddp, rank, 2)
    seconds = time.monotonic() - started
    assert grads_are_nan(module)
    return (*told(error, engine), seconds)


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_a_late_rank_is_a_timeout_on_every_rank(exchange):
    results = run_on_ranks(sleep_past_the_timeout, 3, args=(exchange,))
    for rank, (name, text, repeated, seconds) in enumerate(results):
        assert name in ("SyncTimeoutError", "SyncError"), text
        assert "step 2" in text and f"rank {rank} of 3" in text and "bucket 0" in text
        assert repeated
        assert seconds < 4.0
    assert "SyncTimeoutError" in {results[0][0], results[2][0]}
    assert results[1][3] < 1.0  # the late rank finds the others gone at once


def a_library_that_does_not_notice(rank: int, world_size: int):
    """The collective's own time-out is far longer than the engine's."""
    module = Listed((1000,))
    transport = make_transport(rank, world_size, 20.0)
    engine = _native.C.Engine(transport, "cpu", world_size, rank, "all_reduce", 0.5, 1 << 20, 0.5)
    engine.set_parameters(list(module.parameters()), ["a"], ["bf16"])
    ddp = make_ddp(module, engine)
    for _ in range(2):  # DDP makes its buckets anew in the second step, and waits for the other rank there
        assert backward_of(ddp, (1000,), rank) is None
    if rank == 1:
        time.sleep(2.5)
    started = time.monotonic()
    error = backward_of(ddp, (1000,), rank)
    return (*told(error, engine), time.monotonic() - started, grads_are_nan(module))


def backward_of(ddp, numels, rank: int) -> BaseException | None:
    try:
        ddp(rows(numels, rank)).backward()
    except Exception as error:
        return error
    return None


def test_a_library_that_does_not_notice_is_left_after_the_engines_time_out():
    # The other may still get the mean: what rank 0 had given to Gloo goes on there until it ends.
    (name, text, repeated, seconds, is_nan), _ = run_on_ranks(a_library_that_does_not_notice, 2)
    assert name == "SyncTimeoutError" and "timed out after 0.5" in text and "in a collective over gloo" in text
    assert repeated and is_nan
    assert 1.0 < seconds < 2.5  # with a second's grace for a library that reports it in its own words


def die(rank: int, world_size: int, exchange: str):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, exchange=exchange, timeout_s=20.0)
    ddp = make_ddp(module, engine, **DDP)
    for step in range(2):  # DDP itself communicates in the second forward, to agree on new buckets
        assert backward(ddp, rank, step) is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    error = backward(ddp, rank, 2)
    seconds = time.monotonic() - started
    assert grads_are_nan(module)
    return (*told(error, engine), seconds)


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_a_dead_rank_fails_the_others_at_once(exchange):
    outcomes = watch_ranks(die, 3, args=(exchange,), timeout_s=60)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.error
        name, _, repeated, seconds = outcome.value
        assert name == "SyncError" and repeated and seconds < 2.0
        assert outcome.exit_code == 0


def abort_here(rank: int, world_size: int):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, timeout_s=20.0)
    ddp = make_ddp(module, engine, **DDP)
    assert backward(ddp, rank, 0) is None
    started = time.monotonic()
    if rank == 0:
        engine.abort("the hook raised: no luck")
    error = backward(ddp, rank, 1)
    seconds = time.monotonic() - started
    assert grads_are_nan(module)
    with pytest.raises(SyncError):
        engine.found_nonfinite()
    with pytest.raises(SyncError):
        engine.sum_of_squares()
    return (*told(error, engine), seconds)


def test_a_failure_on_one_rank_fails_the_others_at_once():
    results = run_on_ranks(abort_here, 3)
    assert "no luck" in results[0][1]
    for name, _, repeated, seconds in results:
        assert name == "SyncError" and repeated and seconds < 2.0


def fail_while_waiting(rank: int, world_size: int):
    """The main thread of rank 0 waits in backward for rank 1, which never comes; another thread aborts."""
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, timeout_s=20.0)
    ddp = make_ddp(module, engine, **DDP)
    for step in range(2):
        assert backward(ddp, rank, step) is None
    if rank == 1:
        time.sleep(2)
        return 0.0
    threading.Timer(0.5, engine.abort, ("enough",)).start()
    started = time.monotonic()
    assert isinstance(backward(ddp, rank, 2), SyncError)
    return time.monotonic() - started


def test_abort_ends_a_wait():
    assert run_on_ranks(fail_while_waiting, 2)[0] < 1.5


def go_on_after_reset(rank: int, world_size: int):
    module = Listed(NUMELS)
    engines = [make_engine(module, rank, world_size, timeout_s=2.0)]
    ddp = torch.nn.parallel.DistributedDataParallel(module, **DDP)
    _native.C.register_ddp_hook(ddp.reducer, lambda: engines[-1])
    assert backward(ddp, rank, 0) is None
    if rank == 0:
        engines[0].abort("a test")
    assert isinstance(backward(ddp, rank, 1), SyncError)
    assert isinstance(backward(ddp, rank, 1), SyncError)  # and again, until there is a new engine
    assert grads_are_nan(module)
    engines[0].close()
    engines.append(make_engine(module, rank, world_size, timeout_s=20.0))
    assert backward(ddp, rank, 2) is None
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_a_new_engine_goes_on():
    for grads in run_on_ranks(go_on_after_reset, 2):
        for idx, grad in enumerate(grads):
            expected = (rows(NUMELS, 0, 2)[idx] * 0.5) + (rows(NUMELS, 1, 2)[idx] * 0.5)
            assert torch.equal(grad, expected)


def plain_mean_after_close(rank: int, world_size: int):
    module = Listed(NUMELS)
    answers = [make_engine(module, rank, world_size)]
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    _native.C.register_ddp_hook(ddp.reducer, lambda: answers[-1])
    assert backward(ddp, rank, 0) is None
    answers[0].close()
    answers.append(dist.group.WORLD)
    assert backward(ddp, rank, 1) is None
    grads = [parameter.grad.clone() for parameter in module.parameters()]
    answers.append(make_engine(module, rank, world_size))
    assert backward(ddp, rank, 2) is None
    assert answers[-1].stats()["steps"] == 1
    return grads


def test_without_an_engine_the_hook_takes_a_plain_mean():
    for grads in run_on_ranks(plain_mean_after_close, 2):
        for idx, grad in enumerate(grads):
            assert torch.equal(grad, rows(NUMELS, 0, 1)[idx] / 2 + rows(NUMELS, 1, 1)[idx] / 2)


def provider_raises(rank: int, world_size: int):
    module = Listed(NUMELS)
    ddp = torch.nn.parallel.DistributedDataParallel(module)

    def provider():
        raise KeyError("no engine today")

    _native.C.register_ddp_hook(ddp.reducer, provider)
    error = backward(ddp, rank, 0)
    return type(error).__name__, str(error)


def test_an_error_of_the_provider_keeps_its_class():
    for name, text in run_on_ranks(provider_raises, 2):
        assert name == "KeyError" and "no engine today" in text


def unknown_parameter(rank: int, world_size: int):
    module = Listed(NUMELS)
    other = Listed(NUMELS)
    engine = make_engine(other, rank, world_size)
    ddp = make_ddp(module, engine, **DDP)
    error = backward(ddp, rank, 0)
    assert grads_are_nan(module)
    return type(error).__name__, str(error)


def test_a_parameter_that_nobody_named_is_an_error():
    for name, text in run_on_ranks(unknown_parameter, 2):
        assert name == "SyncError" and "set_parameters did not get" in text


def leave_without_close(rank: int, world_size: int, how: str):
    module = Listed(NUMELS)
    engine = make_engine(module, rank, world_size, timeout_s=60.0)
    ddp = make_ddp(module, engine, **DDP)
    for step in range(2):
        assert backward(ddp, rank, step) is None
    if how == "blocked" and rank == 0:
        # Rank 1 never takes part: a daemon thread of ours waits in backward while the process ends.
        threading.Thread(target=backward, args=(ddp, rank, 2), daemon=True).start()
        time.sleep(0.5)
    module.keep = (engine, ddp)  # a cycle that only the interpreter's end takes apart
    return "left"


@pytest.mark.parametrize("how", ["idle", "blocked"])
def test_a_process_that_does_not_close_ends_by_itself(how):
    started = time.monotonic()
    for outcome in watch_ranks(leave_without_close, 2, args=(how,), timeout_s=40):
        assert outcome.error is None, outcome.error + outcome.output
        assert outcome.exit_code == 0, outcome.output
    assert time.monotonic() - started < 30


def threads_after_close(rank: int, world_size: int):
    module = Listed(NUMELS)

    def names() -> list[str]:
        found = []
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may have ended meanwhile
                found.append(file.read().strip())
        return found

    before = len(names())
    engine = make_engine(module, rank, world_size)
    ddp = make_ddp(module, engine, **DDP)
    assert backward(ddp, rank, 0) is None
    during = names()
    dist.barrier()
    engine.close()
    engine.close()
    for _ in range(50):
        if len(names()) <= before:
            break
        time.sleep(0.1)
    return during.count("gsync"), names(), before


def test_close_leaves_no_thread():
    for during, after, before in run_on_ranks(threads_after_close, 2):
        assert during == 1
        assert "gsync" not in after
        assert len(after) <= before + 1, after  # autograd keeps one


def test_timeout_errors_are_sync_errors():
    assert issubclass(SyncTimeoutError, SyncError)

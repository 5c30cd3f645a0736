"""Chunks sent from rank to rank over Gloo: many messages under way, odd sizes, chunks without elements, and a peer that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from engine_setup import Listed, make_ddp, make_engine, rows
from ranks import run_on_ranks, watch_ranks

from gsync import _native
from gsync.errors import SyncError

pytestmark = pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")

LARGE = (4_000_000, 4_000_000)  # more than the buffers of a connection take


def gradients_of_steps(rank: int, world_size: int, numels: tuple[int, ...], slice_bytes: int):
    module = Listed(numels)
    engine = make_engine(module, rank, world_size, "fp32", "scatter_gather", slice_bytes=slice_bytes)
    ddp = make_ddp(module, engine, bucket_cap_mb=0.1)
    steps = []
    for step in range(3):
        if step == rank % 2:
            time.sleep(0.05)  # each comes first once
        module.zero_grad()
        ddp(rows(numels, rank, step)).backward()
        steps.append([parameter.grad.clone() for parameter in module.parameters()])
    engine.close()
    return steps


@pytest.mark.parametrize("numels", [(1, 1), (100_003, 0, 1, 50_021, 7)], ids=["empty chunks", "odd sizes"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_gets_the_mean_whatever_the_sizes(world_size, numels):
    results = run_on_ranks(gradients_of_steps, world_size, args=(numels, 64 << 10))
    for step in range(3):
        sent = [rows(numels, rank, step) for rank in range(world_size)]
        for idx in range(len(numels)):
            expected = torch.zeros(numels[idx])
            for rank in range(world_size):
                expected += sent[rank][idx] * torch.tensor(1.0 / world_size)
            for rank in range(world_size):
                assert torch.equal(results[rank][step][idx], expected)


def step_until_it_fails(rank: int, world_size: int):
    module = Listed(LARGE)
    engine = make_engine(module, rank, world_size, exchange="scatter_gather", timeout_s=60.0)
    ddp = make_ddp(module, engine)
    inputs = [torch.ones(numel) for numel in LARGE]
    for _ in range(2):
        ddp(inputs).backward()
    dist.barrier()
    if rank == 1:
        # Stopped first, so that the others stand in the middle of an exchange when it dies.
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {pid}; sleep 1; kill -KILL {pid}"])
    started = time.monotonic()
    while time.monotonic() - started < 20:
        module.zero_grad()
        try:
            ddp(inputs).backward()
        except SyncError as error:
            # A bucket that was done before the rank stopped holds the mean.
            nan = [bool(parameter.grad.isnan().all()) for parameter in module.parameters()]
            done = [bool((parameter.grad == 1).all()) for parameter in module.parameters()]
            is_nan = any(nan) and all(a or b for a, b in zip(nan, done, strict=True))
            return str(error), is_nan, time.monotonic() - started
    return "no error", False, 20.0


def test_a_peer_that_dies_in_the_middle_is_noticed():
    outcomes = watch_ranks(step_until_it_fails, 3, timeout_s=60)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.error
        text, is_nan, seconds = outcome.value
        assert "receiving from rank" in text or "sending to rank" in text, text
        assert is_nan
        assert 1.0 < seconds < 6.0  # 1.2 s until it dies
        assert outcome.exit_code == 0


def wait_in_vain(rank: int, world_size: int, ends_by: str):
    """Rank 0 stands in an exchange that rank 1 never joins."""
    module = Listed(LARGE)
    engine = make_engine(module, rank, world_size, exchange="scatter_gather", timeout_s=60.0)
    ddp = make_ddp(module, engine)
    inputs = [torch.ones(numel) for numel in LARGE]
    for _ in range(2):
        ddp(inputs).backward()
    if rank == 1:
        time.sleep(2)
        started = time.monotonic()
        if ends_by != "leaving":
            with pytest.raises(SyncError):
                ddp(inputs).backward()
        return time.monotonic() - started
    if ends_by == "leaving":
        threading.Thread(target=ddp(inputs).backward, daemon=True).start()
        time.sleep(0.5)
        module.keep = (engine, ddp)  # a cycle that only the interpreter's end takes apart
        return 0.0
    threading.Timer(0.5, *((engine.abort, ("enough",)) if ends_by == "abort" else (engine.close,))).start()
    started = time.monotonic()
    with pytest.raises(SyncError):
        ddp(inputs).backward()
    return time.monotonic() - started


@pytest.mark.parametrize("ends_by", ["abort", "close"])
def test_an_exchange_that_is_given_up_ends_on_both_sides(ends_by):
    here, there = run_on_ranks(wait_in_vain, 2, args=(ends_by,))
    assert here < 1.5
    assert there < 1.0


def test_a_process_may_leave_in_the_middle_of_an_exchange():
    for outcome in watch_ranks(wait_in_vain, 2, args=("leaving",), timeout_s=40):
        assert outcome.error is None, outcome.error + outcome.output
        assert outcome.exit_code == 0, outcome.output


def threads_after_close(rank: int, world_size: int):
    def waiters() -> int:
        count = 0
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/comm") as file:
                    count += file.read().strip() == "gsync-wait"
            except OSError:  # it has ended meanwhile
                pass
        return count

    module = Listed((1000,))
    engine = make_engine(module, rank, world_size, exchange="scatter_gather")
    ddp = make_ddp(module, engine)
    ddp(rows((1000,), rank)).backward()
    during = waiters()
    dist.barrier()
    engine.close()
    deadline = time.monotonic() + 10
    while waiters() and time.monotonic() < deadline:
        time.sleep(0.05)
    return during, waiters()


def test_close_ends_the_waiters():
    assert run_on_ranks(threads_after_close, 2) == [(2, 0), (2, 0)]

"""What the engine does on a device when something goes wrong: the design's errors, NaN in the gradients, no hang, no thread."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import emulated
import pytest
import torch
import torch.distributed as dist
from emulated import run_emulated
from emulated_engines import Rank, close, make_ranks, on_every_rank, train
from engine_setup import rows

from gsync import _native

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

NUMELS = (3_000, 2_000, 1_000)
BOUNDS = ((0, 2), (2, 3))
TIMEOUT_S = 1.0


def names_of_threads() -> list[str]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            found.append(file.read().strip())
    return found


def error_of(rank: Rank, submitted: list, wait_s: float = 3.0) -> tuple[str, str, float]:
    """Returns class, message and delay of the first error that a rank learns of, by a future or by a later call."""
    started = time.monotonic()
    try:
        for _, future in submitted:
            future.wait()
        while time.monotonic() - started < wait_s:
            rank.engine.raise_pending()
            time.sleep(0.02)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def state_of(buffer: torch.Tensor, mean: torch.Tensor) -> str:
    host = buffer.cpu()
    if host.isnan().all():
        return "nan"
    return "mean" if torch.equal(host, mean) else "wrong"


def fail(_rank: int, _world_size: int, kind: str, after: int, exchange: str) -> dict[str, Any]:
    """Plants a fault on rank 1 and tells what each of two ranks makes of the step.

    Args:
        after: how many calls of that kind go well before; for allocations -1 is the last one of a bucket.
    """
    emulation = emulated.load()
    threads_before = names_of_threads().count("gsync_watchdog")
    ranks = make_ranks(2, "bf16", exchange, NUMELS, timeout_s=TIMEOUT_S, slice_bytes=8_000)
    steps = [[rows(NUMELS, one, step) for one in range(2)] for step in range(3)]
    if kind != "allocation":  # there are none once buffers and plans are made
        train(ranks, steps[:2], BOUNDS)
    before = {
        "launch": lambda: emulation.fail_launch(after),
        "allocation": lambda: emulation.fail_allocation(after if after >= 0 else counted["allocations"] // 2 - 1),
        "destroyed": lambda: ranks[1].transport.abort(),
    }.get(kind, lambda: emulation.plant_nccl_fault(1, kind, after))
    started = time.monotonic()
    submitted = [ranks[0].submit(steps[2][0], BOUNDS, emulation.take_counters)]
    counted = emulation.take_counters()
    submitted.append(ranks[1].submit(steps[2][1], BOUNDS, before))
    host_s = time.monotonic() - started
    errors = on_every_rank(ranks, lambda one: error_of(one, submitted[one.rank]))
    for one in ranks:
        emulation.synchronize(one.rank)
    # What whoever goes on all the same would see: the current stream's view.
    states = []
    for one in ranks:
        halves = [[(row * 0.5).bfloat16().float() for row in rows_of_rank] for rows_of_rank in steps[2]]
        mean = [(a + b).bfloat16().float() for a, b in zip(*halves, strict=True)]
        pairs = zip(submitted[one.rank], BOUNDS, strict=True)
        states.append([state_of(buffer, torch.cat(mean[begin:end])) for (buffer, _), (begin, end) in pairs])
    again = []
    for one in ranks:
        (_, future), *_ = one.submit(steps[2][one.rank], BOUNDS)
        try:
            future.wait()
            again.append("")
        except Exception as error:
            again.append(type(error).__name__)
    submitted.clear()
    close(ranks)
    return {
        "errors": errors,
        "states": states,
        "again": again,
        "host_s": host_s,
        "communicators": emulation.live_communicators(),
        "threads": names_of_threads().count("gsync_watchdog") - threads_before,
    }


# Of each fault: how the rank that has it names the cause.
FAULTS = {
    ("error", 0): "planted error",
    ("error", 1): "planted error",
    ("async_error", 0): "network error",
    ("hang", 0): "timed out after 1",
    ("hang", 2): "timed out after 1",
    ("destroyed", 0): "aborted",
    ("launch", 0): "planted launch failure",
    ("launch", 1): "planted launch failure",
    ("launch", 2): "planted launch failure",
    ("allocation", 0): "out of memory",
    ("allocation", -1): "out of memory",
}


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
@pytest.mark.parametrize(("kind", "after"), FAULTS)
def test_a_fault_is_an_error_on_every_rank_and_nan_in_every_gradient(kind, after, exchange):
    (result,) = run_emulated(fail, args=(kind, after, exchange))
    step = 0 if kind == "allocation" else 2
    for rank, (name, text, seconds) in enumerate(result["errors"]):
        assert name in ("SyncError", "SyncTimeoutError"), text
        assert f"step {step} on rank {rank} of 2 (emulated)" in text and "bucket " in text
        assert seconds < TIMEOUT_S + 1.0
    assert FAULTS[kind, after] in result["errors"][1][1]
    assert result["errors"][1][0] == ("SyncTimeoutError" if kind == "hang" else "SyncError")
    # NCCL tells a rank nothing of a peer that gave up: it runs into its own time-out.
    assert result["errors"][0][0] == "SyncTimeoutError"
    # In the third collective the first bucket is done under all_reduce, in two slices of a collective each.
    first = "mean" if (kind, after, exchange) == ("hang", 2, "all_reduce") else "nan"
    assert result["states"] == [[first, "nan"]] * 2
    assert set(result["again"]) == {result["errors"][0][0], result["errors"][1][0]}
    assert result["host_s"] < 0.9 * TIMEOUT_S  # handing over waits for nobody
    assert result["communicators"] == 0 and result["threads"] == 0


def without_a_communicator(_rank: int, _world_size: int, how: str) -> list[tuple[str, str, float]]:
    emulation = emulated.load()
    native = _native.C
    assert native is not None
    store = dist.HashStore()
    if how == "error":
        emulation.plant_nccl_fault(0, "init", 0)
    if how == "id":
        store.set("unique_id", "too short")

    def make(rank: int) -> tuple[str, str, float]:
        started = time.monotonic()
        try:
            native.NcclTransport(store, rank, 2, f"{emulated.DEVICE}:{rank}", 1.0, library=str(emulated.FILE))
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return "", "", 0.0

    results = [make(1 if how in ("id", "store") else 0)]
    assert emulation.live_communicators() == 0
    return results


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("error", "ncclCommInitRankConfig: unhandled system error"),
        ("alone", "ncclCommInitRankConfig timed out after 1"),
        ("id", "unique id has 9 bytes, expected 128"),
        ("store", "imeout"),
    ],
)
def test_a_communicator_that_cannot_be_made_is_an_error(how, cause):
    ((((name, text, seconds),)),) = run_emulated(without_a_communicator, args=(how,))
    assert name and cause in text
    assert seconds < 5.0


def leave(_rank: int, _world_size: int, how: str) -> dict[str, Any]:
    """Closes the engine of rank 0 while its peer has not come; measures how long that takes."""
    emulation = emulated.load()
    ranks = make_ranks(2, "bf16", "all_reduce", NUMELS, timeout_s=TIMEOUT_S if how == "peer" else 30.0)
    (buffer, _), *_ = ranks[0].submit(rows(NUMELS, 0), BOUNDS)
    if how == "late":  # it comes while rank 0 is closing
        emulation.set_delay(1, 200_000, 200_000, 0)
        ranks[1].submit(rows(NUMELS, 1), BOUNDS)
    started = time.monotonic()
    ranks[0].engine.close()
    seconds = time.monotonic() - started
    try:
        ranks[0].engine.raise_pending()
        failed = False
    except Exception:
        failed = True
    emulation.synchronize(0)
    emulation.set_delay(-1, 0, 0, 0)
    host = buffer.cpu()
    expected = torch.cat(
        [(a * 0.5).bfloat16() + (b * 0.5).bfloat16() for a, b in zip(rows(NUMELS, 0), rows(NUMELS, 1), strict=True)]
    )
    ranks[1].engine.close()
    return {
        "seconds": seconds,
        "failed": failed,
        "nan": bool(host.isnan().all()),
        "mean": torch.equal(host, expected[: host.numel()].float()),
        "error": emulation.take_error(),
    }


def test_close_lets_the_device_end_what_it_was_given():
    (result,) = run_emulated(leave, args=("late",))
    assert result["mean"] and not result["failed"] and not result["error"]
    assert result["seconds"] < 4.0


def test_close_does_not_wait_long_for_a_peer_that_is_gone():
    (result,) = run_emulated(leave, args=("peer",))
    assert result["nan"] and result["failed"] and not result["error"]
    assert result["seconds"] < TIMEOUT_S + 2.0


def lose_the_device(_rank: int, _world_size: int, when: str) -> dict[str, Any]:
    """The device answers with an error: before a bucket is handed over, while one is under way, or when the engine is closed."""
    emulation = emulated.load()
    threads_before = names_of_threads().count("gsync_watchdog")
    ranks = make_ranks(2, "bf16", "scatter_gather", NUMELS, timeout_s=TIMEOUT_S)
    given = [rows(NUMELS, one) for one in range(2)]
    train(ranks, [given], BOUNDS)
    buckets = []
    for one in ranks:
        for index, (begin, end) in enumerate(BOUNDS):
            buffer = torch.cat(given[one.rank][begin:end]).to(one.device)
            bucket = emulation.grad_bucket(index, (begin, end) == BOUNDS[-1], buffer, one.parameters[begin:end])
            buckets.append((one, bucket))
    if when != "before":  # held, so that it is under way still
        for one in ranks:
            emulation.hold(one.rank, True)
    if when == "before":
        emulation.lose(True)
    submitted: list[list[Any]] = [[], []]
    for one, bucket in buckets if when != "idle" else ():
        submitted[one.rank].append((None, one.engine.submit(bucket)))
    emulation.lose(True)
    errors = [("", "", 0.0)] * 2
    if when in ("before", "under way"):
        errors = on_every_rank(ranks, lambda one: error_of(one, [] if when == "under way" else submitted[one.rank]))
    started = time.monotonic()
    on_every_rank(ranks, lambda one: one.engine.close())
    seconds = time.monotonic() - started
    emulation.lose(False)
    for one in ranks:
        emulation.hold(one.rank, False)
    # A device that is lost does no more. This one comes back: what it was given may end before its memory goes.
    emulation.settle(5_000)
    submitted.clear()
    buckets.clear()
    emulation.take_error()
    return {
        "errors": errors,
        "seconds": seconds,
        "communicators": emulation.live_communicators(),
        "threads": names_of_threads().count("gsync_watchdog") - threads_before,
    }


@pytest.mark.parametrize("when", ["before", "under way", "closing", "idle"])
def test_a_device_that_is_lost_is_an_error_and_no_hang(when):
    (result,) = run_emulated(lose_the_device, args=(when,))
    for name, text, seconds in result["errors"] if when in ("before", "under way") else ():
        assert name == "SyncError" and "the emulated device is lost" in text and seconds < TIMEOUT_S
    assert result["seconds"] < TIMEOUT_S + 1.0
    assert result["communicators"] == 0 and result["threads"] == 0

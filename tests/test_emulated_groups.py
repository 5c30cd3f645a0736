"""The transport over a process group, on a device with streams: its collectives keep the order of the engine's stream."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
from emulated import run_emulated
from emulated_engines import NUMELS, close, make_ranks, on_every_rank, train
from engine_setup import rows

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

BUCKETS = ((0, 4), (4, 7), (7, len(NUMELS)))


def same_as_over_nccl(_rank: int, _world_size: int, world_size: int, exchange: str) -> list[str]:
    """Returns in what engines over process groups and over the stand-in for NCCL differ, over codecs and timings."""
    emulation = emulated.load()
    differences = []
    steps = [[rows(NUMELS, rank, step) for rank in range(world_size)] for step in range(3)]
    for codec in ("fp32", "bf16", *(("int8",) if exchange != "all_reduce" else ())):
        options: dict[str, Any] = {"slice_bytes": 10_000}
        over_nccl = make_ranks(world_size, codec, exchange, **options)
        expected = train(over_nccl, steps, BUCKETS)
        expected_sums = [one.engine.sum_of_squares().cpu() for one in over_nccl]
        close(over_nccl)
        for seed in range(2):
            ranks = make_ranks(world_size, codec, exchange, over_groups=True, **options)
            emulation.set_delay(-1, 0, 500 * seed, seed)
            got = train(ranks, steps, BUCKETS)
            for one in ranks:
                if any(not torch.equal(a[one.rank], b[one.rank]) for a, b in zip(got, expected, strict=True)):
                    differences.append(f"{codec}, seed {seed}: gradients on rank {one.rank}")
                if not torch.equal(one.engine.sum_of_squares().cpu(), expected_sums[one.rank]):
                    differences.append(f"{codec}, seed {seed}: sums of squares on rank {one.rank}")
            emulation.set_delay(-1, 0, 0, 0)
            close(ranks)
    return differences


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_values_are_those_over_nccl(exchange):
    assert run_emulated(same_as_over_nccl, args=(2, exchange)) == [[]]


def cost_of_a_bucket(_rank: int, _world_size: int, exchange: str) -> list[dict[str, int]]:
    """Returns what each rank asks of its device when it hands over a bucket, in the fourth step."""
    emulation = emulated.load()
    ranks = make_ranks(2, "bf16", exchange, (5000,), over_groups=True)
    cost: list[dict[str, int]] = []
    for step in range(4):
        submitted = []
        cost.clear()
        for one in ranks:
            buckets = one.submit(rows((5000,), one.rank, step), ((0, 1),), before=emulation.take_counters)
            cost.append(emulation.take_counters())
            submitted.append(buckets)
        for one, buckets in zip(ranks, submitted, strict=True):
            one.collect(buckets)
    close(ranks)
    return cost


@pytest.mark.parametrize(("exchange", "collectives"), [("all_reduce", 1), ("scatter_gather", 2)])
def test_the_host_does_not_wait_for_a_collective(exchange, collectives):
    (costs,) = run_emulated(cost_of_a_bucket, args=(exchange,))
    for cost in costs:
        assert cost["collectives"] == collectives
        assert cost["host_waits"] == 0 and cost["allocations"] == 0
        # For the producer; and each collective waits for the engine's stream, which then waits for it.
        assert cost["event_waits"] == 1 + 2 * collectives


def a_peer_that_does_not_come(_rank: int, _world_size: int) -> dict[str, Any]:
    emulation = emulated.load()
    ranks = make_ranks(2, "bf16", "all_reduce", (500,), over_groups=True, timeout_s=1.0)
    ((buffer, future),) = ranks[0].submit(rows((500,), 0), ((0, 1),))
    future.wait()  # done as far as the host is concerned

    def error_of(one: Any) -> tuple[str, str]:
        try:
            emulation.synchronize(one.rank)
            one.engine.raise_pending()
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    first = error_of(ranks[0])
    on_every_rank(ranks, lambda one: one.engine.close())
    return {"error": first, "nan": bool(buffer.cpu().isnan().all()), "device": emulation.take_error()}


def test_a_peer_that_does_not_come_is_a_time_out():
    (result,) = run_emulated(a_peer_that_does_not_come)
    name, text = result["error"]
    assert name == "SyncTimeoutError" and "rank 0 of 2" in text
    assert result["nan"] and not result["device"]

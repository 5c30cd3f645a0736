"""The engine on a device with streams, emulated: the values are the CPU engine's, whatever the timing, and nothing waits."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
from emulated import run_emulated
from emulated_engines import NUMELS, close, make_ranks, train
from engine_setup import rows

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

ONE_BUCKET = ((0, len(NUMELS)),)
THREE_BUCKETS = ((0, 4), (4, 7), (7, len(NUMELS)))


def same_as_on_cpu(
    rank: int, _: int, world_size: int, exchange: str, dtype: torch.dtype, slice_bytes: int, ranks_per_host: int = 1
) -> list[str]:
    """Returns in what the engines differ, over all codecs and several timings."""
    emulation = emulated.load()
    differences = []
    steps = [[rows(NUMELS, rank, step, dtype) for rank in range(world_size)] for step in range(3)]
    plain = ("fp32", "bf16") if exchange == "hierarchical" else ("fp32", "fp16", "bf16")
    for codec in (*plain, *(("int8",) if exchange != "all_reduce" else ())):
        if exchange == "all_reduce" and world_size > 2:
            # Gloo adds in another order than NCCL: values whose sum needs no rounding.
            steps = [[[row.sign() * 2.0 for row in rank_rows] for rank_rows in step] for step in steps]
        options: dict[str, Any] = {"slice_bytes": slice_bytes, "scale": 0.25 if world_size > 2 else 1.0 / world_size}
        options["ranks_per_host"] = ranks_per_host
        on_cpu = make_ranks(world_size, codec, exchange, dtype=dtype, device=torch.device("cpu"), **options)
        expected = train(on_cpu, steps, THREE_BUCKETS)
        expected_sums = [cpu.engine.sum_of_squares() for cpu in on_cpu]
        expected_stats = on_cpu[0].engine.stats()
        close(on_cpu)
        for seed in range(3):
            emulation.set_delay(-1, 0, 400 * seed, seed)
            ranks = make_ranks(world_size, codec, exchange, dtype=dtype, **options)
            got = train(ranks, steps, THREE_BUCKETS if seed else ONE_BUCKET)
            case = f"{codec}, seed {seed}"
            for one in range(world_size):
                for step in range(len(steps)):
                    if not torch.equal(got[step][one], expected[step][one]):
                        differences.append(f"{case}: gradients of step {step} on rank {one}")
                if not torch.equal(ranks[one].engine.sum_of_squares().cpu(), expected_sums[one]):
                    differences.append(f"{case}: sums of squares on rank {one}")
                if bool(ranks[one].engine.found_nonfinite()):
                    differences.append(f"{case}: non-finite on rank {one}")
            stats = ranks[0].engine.stats()
            if seed:
                # In place, which is for the CPU only, there are neither flags nor padding.
                in_place = codec == "fp32" and exchange == "all_reduce" and dtype == torch.float32
                for name in ("steps", "buckets", "gradient_bytes", "nonfinite_steps", "wire_bytes")[: 4 if in_place else 5]:
                    if stats[name] != expected_stats[name]:
                        differences.append(f"{case}: {name} is {stats[name]}, on the CPU {expected_stats[name]}")
            close(ranks)
    emulation.set_delay(-1, 0, 0, 0)
    return differences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_are_those_of_the_engine_on_the_cpu(world_size, exchange, dtype):
    slice_bytes = 25 << 20 if dtype == torch.float32 else 10_000
    assert run_emulated(same_as_on_cpu, args=(world_size, exchange, dtype, slice_bytes)) == [[]]


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), (2, 2)])
def test_values_on_hosts_with_several_ranks_are_those_of_the_engine_on_the_cpu(world_size, ranks_per_host):
    assert run_emulated(same_as_on_cpu, args=(world_size, "hierarchical", torch.float32, 10_000, ranks_per_host)) == [[]]


def a_split_that_fails(_rank: int, _world_size: int) -> list[str]:
    emulated.load().plant_nccl_fault(1, "split", 0)
    try:
        make_ranks(2, "int8", "hierarchical", ranks_per_host=2, timeout_s=3.0)
    except RuntimeError as error:
        return [str(error)]
    return []


def test_a_communicator_that_cannot_be_split_is_an_error():
    (messages,) = run_emulated(a_split_that_fails)
    assert len(messages) == 1 and "ncclCommSplit" in messages[0]


def cost_of_a_bucket(_rank: int, _world_size: int, exchange: str, num_slices: int) -> dict[str, list[dict[str, int]]]:
    """Returns what rank 0 asks of its device in `submit`, for a bucket in the middle and for the last, in the fourth step."""
    emulation = emulated.load()
    numels = (num_slices * 4096,) * 2
    ranks = make_ranks(2, "bf16", exchange, numels, slice_bytes=4 * 4096)
    cost: dict[str, list[dict[str, int]]] = {}
    for step in range(4):
        submitted = []
        for one in ranks:
            given = rows(numels, one.rank, step)
            buckets = []
            for index in range(2):
                buffer = torch.empty(numels[index], device=one.device)
                buffer.copy_(given[index])
                bucket = emulation.grad_bucket(index, index == 1, buffer, one.parameters[index : index + 1])
                emulation.take_counters()
                future = one.engine.submit(bucket)
                cost[f"{one.rank}{index}"] = emulation.take_counters()
                buckets.append((buffer, future))
            submitted.append(buckets)
        for one, buckets in zip(ranks, submitted, strict=True):
            one.collect(buckets)
    close(ranks)
    return cost


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_what_a_bucket_costs(exchange, num_slices):
    """Held, since each of these is time on the way of backward: a change of one of them is a decision."""
    (cost,) = run_emulated(cost_of_a_bucket, args=(exchange, num_slices))
    stages = {"all_reduce": 1, "scatter_gather": 2}[exchange]
    for name, got in cost.items():
        is_last = name.endswith("1")
        assert got == {
            "launches": (2 + (stages == 2)) * num_slices,
            "collectives": stages * num_slices,
            # At the end of a step: add the step's flag, clear the next one, copy the counters.
            "operations": 3 * is_last,
            "event_waits": 1,  # for the producer
            # Two for each of a slice's three phases; the producer, the future, two of the watchdog. At the end of a step two for
            # the time that backward cannot hide, one for the results, one for the counters.
            "event_records": 6 * num_slices + 4 + 4 * is_last,
            "host_waits": 0,
            "allocations": 0,
        }


def pointers_beyond_a_launch(_rank: int, _world_size: int) -> dict[str, Any]:
    """More parameters than addresses go with a launch, and a host that is many steps ahead of the device."""
    emulation = emulated.load()
    numels = (33,) * 40
    ranks = make_ranks(2, "bf16", "all_reduce", numels)
    for one in range(2):
        emulation.set_delay(one, 0, 0, 0)
    train(ranks, [[rows(numels, one) for one in range(2)]], ((0, 40),))
    emulation.set_delay(-1, 2_000, 3_000, 0)
    emulation.take_counters()
    submitted = [[one.submit(rows(numels, one.rank, step), ((0, 40),)) for one in ranks] for step in range(8)]
    waits = emulation.take_counters()["host_waits"]
    equal = True
    for step, buckets in enumerate(submitted):
        sent = [torch.cat([(row * 0.5).bfloat16() for row in rows(numels, one, step)]).float() for one in range(2)]
        expected = (sent[0] + sent[1]).bfloat16().float()
        for one in range(2):
            equal = equal and torch.equal(ranks[one].collect(buckets[one]), expected)
    emulation.set_delay(-1, 0, 0, 0)
    close(ranks)
    return {"equal": equal, "host_waits": waits}


def test_tables_of_addresses_are_sent_without_waiting():
    (result,) = run_emulated(pointers_beyond_a_launch)
    assert result == {"equal": True, "host_waits": 0}


def counters_of_steps(_rank: int, _world_size: int) -> dict[str, Any]:
    """Non-finite and vanishing values, over steps whose number jumps back as from a checkpoint."""
    emulation = emulated.load()
    numels = (1000,)
    ranks = make_ranks(2, "fp16", "all_reduce", numels)
    found = []
    for step in range(5):
        given = [rows(numels, one, step) for one in range(2)]
        if step == 2:
            given[1][0][700] = float("inf")
        if step == 3:
            for one in ranks:
                one.engine.set_step(one.engine.step + 1)
        for row in given:
            row[0][:100] = 1e-9
        train(ranks, [given], ((0, 1),))
        found.append([bool(one.engine.found_nonfinite()) for one in ranks])
    for _ in range(2):  # the first call asks for the last step's
        stats = ranks[0].engine.stats()
        emulation.synchronize(0)
    close(ranks)
    return {"found": found, "nonfinite_steps": stats["nonfinite_steps"], "vanished": stats["packed_vanished"]}


def test_a_step_that_is_not_finite_is_told_once():
    (result,) = run_emulated(counters_of_steps)
    assert result["found"] == [[step == 2] * 2 for step in range(5)]
    assert result["nonfinite_steps"] == 1
    assert result["vanished"] == 500

"""What codec="auto" asks of an engine on a device: other exchanges from step to step, several in one bucket; times of steps."""

from __future__ import annotations

import threading
from typing import Any

import emulated
import pytest
import torch
from emulated import run_emulated
from emulated_engines import NUMELS, Rank, close, make_ranks, train
from engine_setup import rows

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

BUCKETS = ((0, 4), (4, 7), (7, len(NUMELS)))
PAIRS = (("fp32", "all_reduce"), ("int8", "hierarchical"), ("bf16", "scatter_gather"), ("bf16", "all_reduce"),
         ("int4", "scatter_gather"), ("fp32", "hierarchical"))  # fmt: skip
FILLED = [[idx for idx in range(*bounds) if NUMELS[idx]] for bounds in BUCKETS]  # alone in its part, what is empty is left out
WORLD_SIZE, NUM_STEPS, CHANGES_AT = 4, 4, 2


def _tell(rank: Rank, shift: int) -> None:
    """Parameter i travels as pair i + shift."""
    pairs = [PAIRS[(idx + shift) % len(PAIRS)] for idx in range(len(NUMELS))]
    names = [f"p{idx:02}" for idx in range(len(NUMELS))]
    codecs, exchanges = zip(*pairs, strict=True)
    rank.engine.set_parameters(rank.parameters, names, codecs, exchanges=exchanges)


def _train(device: torch.device | None, steps: Any, slice_bytes: int) -> tuple[Any, list[Any], list[threading.Thread]]:
    options: dict[str, Any] = {"slice_bytes": slice_bytes, "scale": 0.25, "ranks_per_host": 2}
    ranks = make_ranks(WORLD_SIZE, "fp32", "all_reduce", device=device, **options)
    callers = []
    for rank in ranks:
        _tell(rank, 0)
        rank.engine.time_steps()

        def change(rank: Rank = rank) -> None:
            callers.append(threading.current_thread())
            _tell(rank, 1)

        rank.engine.call_at(CHANGES_AT, change)
    got = train(ranks, steps, BUCKETS)
    told = [(rank.engine.take_step_times(), rank.engine.last_buckets(), rank.engine.sum_of_squares().cpu()) for rank in ranks]
    close(ranks)
    return got, told, callers


def changes_as_on_the_cpu(_rank: int, _world_size: int, slice_bytes: int) -> list[str]:
    # Gloo adds in another order than NCCL: values whose sum needs no rounding.
    steps = [[[row.sign() * 2.0 for row in rows(NUMELS, rank, step)] for rank in range(WORLD_SIZE)] for step in range(NUM_STEPS)]
    expected, on_cpu, _ = _train(torch.device("cpu"), steps, slice_bytes)
    wrong = []
    for seed in range(3):
        emulated.load().set_delay(-1, 0, 400 * seed, seed)
        got, told, callers = _train(None, steps, slice_bytes)
        if len(callers) != WORLD_SIZE:
            wrong.append(f"seed {seed}: {len(callers)} calls")
        for rank in range(WORLD_SIZE):
            wrong += [f"seed {seed}: gradients of step {step} on rank {rank}" for step in range(NUM_STEPS)
                      if not torch.equal(got[step][rank], expected[step][rank])]  # fmt: skip
            (times, ready_ms), buckets, sums = told[rank]
            if len(times) != NUM_STEPS or min(times) <= 0 or ready_ms:
                wrong.append(f"seed {seed}: steps of {times} ms, {ready_ms}")
            if [sorted(bucket) for bucket in buckets] != FILLED:
                wrong.append(f"seed {seed}: buckets {buckets}")
            if not torch.equal(sums, on_cpu[rank][2]):
                wrong.append(f"seed {seed}: sums of squares on rank {rank}")
    emulated.load().set_delay(-1, 0, 0, 0)
    return wrong


@pytest.mark.parametrize("slice_bytes", [25 << 20, 10_000])
def test_exchanges_change_from_step_to_step_as_on_the_cpu(slice_bytes):
    assert run_emulated(changes_as_on_the_cpu, args=(slice_bytes,)) == [[]]


def refusals(_rank: int, _world_size: int) -> list[str]:
    ranks = make_ranks(2, "fp32", "all_reduce")
    messages = []
    names = [f"p{idx:02}" for idx in range(len(NUMELS))]
    for codec, exchange in (("int8", "all_reduce"), ("bf16", "hierarchical"), ("bf16", "ring")):
        columns = ([codec] * len(names), (), (), [exchange] * len(names))
        try:
            ranks[0].engine.set_parameters(ranks[0].parameters, names, *columns)
        except ValueError as error:
            messages.append(str(error))
    for level in ("inner", "sideways"):
        try:
            ranks[0].engine.transport(level)
        except ValueError as error:
            messages.append(str(error))
    close(ranks)
    return messages


def test_what_a_transport_cannot_do_is_refused():
    (messages,) = run_emulated(refusals)
    expected = ("needs scatter_gather", "hierarchical needs", "exchange must be", "no level inner", "no level sideways")
    assert len(messages) == len(expected)
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages

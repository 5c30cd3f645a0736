"""Stats and spans of the engine on a device with streams: told by the device's events, in the host's time."""

from __future__ import annotations

import threading
import time
from typing import Any

import emulated
import pytest
from emulated import run_emulated
from emulated_engines import close, make_ranks, train
from engine_setup import rows

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

NUMELS = (4096, 9000, 300)
BUCKETS = ((0, 1), (1, 3))
STEPS = 3


def traced(_rank: int, _world_size: int, exchange: str) -> dict[str, Any]:
    emulation = emulated.load()
    emulation.set_delay(-1, 100, 400, 1)
    ranks = make_ranks(2, "bf16", exchange, NUMELS, slice_bytes=4 * 4096)
    given = [[rows(NUMELS, one, step) for one in range(2)] for step in range(STEPS)]
    train(ranks, given, BUCKETS)
    ranks[0].engine.reset_stats()
    began = time.perf_counter()
    for one in ranks:
        one.engine.start_trace(1000)
    train(ranks, given, BUCKETS)
    taken = [one.engine.take_trace() for one in ranks]
    ended = time.perf_counter()
    stats = ranks[0].engine.stats()
    train(ranks, given, BUCKETS)  # nothing of this is kept
    later = ranks[0].engine.take_trace()
    ranks[0].engine.start_trace(5)
    train(ranks, given, BUCKETS)
    little = ranks[0].engine.take_trace()
    emulation.set_delay(-1, 0, 0, 0)
    close(ranks)
    return {"taken": taken, "began": began, "ended": ended, "stats": stats, "later": later, "little": little}


@pytest.mark.parametrize("exchange", ["all_reduce", "scatter_gather"])
def test_spans_of_a_device_are_in_order_and_in_the_hosts_time(exchange):
    (found,) = run_emulated(traced, args=(exchange,))
    for spans, dropped in found["taken"]:
        assert dropped == 0
        assert all(found["began"] <= begin <= end <= found["ended"] for *_, begin, end in spans)
        slices = {span[1:4]: {} for span in spans if span[0] in ("pack", "exchange", "unpack")}
        for phase, *place, begin, end in spans:
            if phase in ("pack", "exchange", "unpack"):
                slices[tuple(place)][phase] = (begin, end)
        assert {place[:2] for place in slices} == {(step, bucket) for step in range(STEPS, 2 * STEPS) for bucket in range(2)}
        assert len(slices) > 2 * STEPS  # the second bucket has several slices
        whole = {span[1:3]: span[4:] for span in spans if span[0] == "bucket"}
        exposed = {span[1]: span[4:] for span in spans if span[0] == "exposed"}
        assert len(whole) == 2 * STEPS and {step: whole[step, 1] for step in exposed} == exposed and len(exposed) == STEPS
        for (step, bucket, _), phases in slices.items():
            times = [when for phase in ("pack", "exchange", "unpack") for when in phases[phase]]
            assert times == sorted(times)
            assert whole[step, bucket][0] <= times[0] and times[-1] <= whole[step, bucket][1]

    stats, (spans, _) = found["stats"], found["taken"][0]
    for phase in ("pack", "exchange", "unpack", "exposed"):
        total = sum(1e3 * (end - begin) for name, *_, begin, end in spans if name == phase)
        assert stats[f"{phase}_ms"] == pytest.approx(total, rel=1e-3), phase
    assert [(one["bucket"], one["times"]) for one in stats["per_bucket"]] == [(0, STEPS), (1, STEPS)]
    for name in ("pack_ms", "exchange_ms", "unpack_ms", "gradient_bytes", "wire_bytes"):
        assert sum(one[name] for one in stats["per_bucket"]) == pytest.approx(stats[name])
    # None was under way when a step began; the first bucket may have been when the second was handed over.
    assert 0 <= stats["queued"] <= STEPS and stats["max_queue_depth"] <= 1 and stats["waiting_ms"] >= 0
    assert found["later"] == ([], 0)
    spans, dropped = found["little"]
    assert len(spans) == 5 and dropped > 0


def handed_over_while_a_trace_begins(_rank: int, _world_size: int) -> bool:
    emulation = emulated.load()
    ranks = make_ranks(1, "bf16", "all_reduce", NUMELS)
    train(ranks, [[rows(NUMELS, 0)]], BUCKETS)
    stream = emulation.newest_stream(0)
    emulation.hold(stream, True)
    tracing = threading.Thread(target=ranks[0].engine.start_trace, args=(10,))
    tracing.start()
    time.sleep(0.2)
    handing_over = threading.Thread(target=ranks[0].submit, args=(rows(NUMELS, 0), BUCKETS))
    handing_over.start()
    handing_over.join(5.0)
    was_handed_over = not handing_over.is_alive()
    emulation.hold(stream, False)
    tracing.join()
    handing_over.join()
    close(ranks)
    return was_handed_over


def test_a_trace_that_begins_holds_no_bucket_up():
    """Else the watchdog never sees a bucket that hangs while `start_trace` waits for the device."""
    assert run_emulated(handed_over_while_a_trace_begins) == [True]

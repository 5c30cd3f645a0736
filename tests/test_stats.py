"""What `stats()` tells: for each bucket, of both engines and doors, and which rank is late."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ddp_cases import mlp, wrap
from ranks import run_on_ranks
from reducer_cases import each_engine

import gsync
from gsync import _native
from gsync.spans import SpanBook
from gsync.stats import BucketStats, SyncStats, add_totals

STEPS = 4
LATE_S = 0.05


def _train(model, sync, rank, steps=STEPS, late_s=0.0):
    for step in range(steps):
        time.sleep(late_s)
        loss = model(torch.randn(5, 31, generator=torch.Generator().manual_seed(1000 * rank + step))).sum()
        loss.backward()
        model.zero_grad()


def _door(door, backend, width=129):
    if door == "ddp":
        return wrap(mlp(width=width), backend, ddp={"bucket_cap_mb": 0.02})
    module = mlp(width=width)
    return module, gsync.GradReducer(module, backend=backend, bucket_mb=0.02)


def _every_number(rank, world_size, backend, door):
    """Parts add up to the whole, and lie where they can."""
    model, sync = _door(door, backend)
    _train(model, sync, rank, 2)
    sync.reset_stats()
    dist.barrier()
    started = time.perf_counter()
    _train(model, sync, rank)
    wall_ms = 1e3 * (time.perf_counter() - started)
    stats = sync.stats()
    assert stats.steps == STEPS and stats.buckets >= 2 * STEPS
    assert [one.times for one in stats.per_bucket] == [STEPS] * (stats.buckets // STEPS)
    assert [one.bucket for one in stats.per_bucket] == list(range(len(stats.per_bucket)))
    for name in ("gradient_bytes", "wire_bytes", "pack_ms", "unpack_ms"):
        total = getattr(stats, name)
        assert total > 0 and abs(sum(getattr(one, name) for one in stats.per_bucket) - total) <= 1e-9 * total, name
    assert stats.gradient_bytes == STEPS * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < stats.exchange_ms <= sum(one.exchange_ms for one in stats.per_bucket) * (1 + 1e-9)
    assert 0 < stats.exposed_ms <= wall_ms and 0 <= stats.waiting_ms <= wall_ms
    # What is waited for at the end of a step is its last bucket.
    assert abs(stats.exposed_ms - stats.per_bucket[-1].bucket_ms) < 1e-6
    for one in stats.per_bucket:
        assert one.bucket_ms > max(one.pack_ms, one.unpack_ms)
    assert abs(stats.bandwidth_mb_per_s - stats.wire_bytes / stats.exchange_ms / 1e3) < 1e-9
    assert 0 <= stats.queue_depth <= stats.max_queue_depth < stats.buckets // STEPS
    text = str(stats)
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert text.count("\n") >= 4 + len(stats.per_bucket)
    numbers = stats.to_dict()
    assert numbers["per_bucket"][0]["times"] == STEPS and numbers["exposed_ms"] == stats.exposed_ms
    sync.reset_stats()
    assert sync.stats().to_dict() == SyncStats().to_dict()
    sync.close()


@pytest.mark.parametrize("door", ["ddp", "reducer"])
@pytest.mark.parametrize("backend", each_engine())
def test_parts_add_up(backend, door):
    run_on_ranks(_every_number, 2, args=(backend, door))


def _late(rank, world_size, backend):
    model, sync = _door("ddp", backend)
    _train(model, sync, rank, 2)
    sync.reset_stats()
    dist.barrier()
    _train(model, sync, rank, late_s=LATE_S if rank == 1 else 0.0)
    first = sync.stats()
    dist.barrier()  # now all have told
    stats = sync.stats()
    dist.barrier()
    return first.steps, stats.slowest_rank, stats.arrival_spread_ms, stats.late_ms, str(stats)


@pytest.mark.parametrize("backend", each_engine())
def test_the_rank_that_comes_late_is_named(backend):
    for steps, slowest, spread, late, text in run_on_ranks(_late, 3, args=(backend,)):
        assert steps == STEPS
        assert slowest == 1 and late[1] == spread and min(late) == 0
        assert spread > 0.5e3 * LATE_S  # the sleep is all that the ranks differ by; the others may be held up a little, too
        assert "rank 1 of 3 comes last" in text


def test_no_rank_waits_for_one_that_never_asks():
    assert run_on_ranks(_ask_on_one, 2) == [None, STEPS]


def _ask_on_one(rank, world_size):
    model, sync = _door("ddp", "auto")
    _train(model, sync, rank)
    if rank == 1:
        return STEPS
    return sync.stats().late_ms


class Job:
    """A bucket as the engine in Python knows it."""

    def __init__(self, index, is_last=False, step=0):
        self.index, self.is_last, self.wire_bytes, self.plan = index, is_last, 7, None
        self.step = type("Step", (), {"number": step})


def test_overlapping_slices_count_once():
    book = SpanBook()
    job = Job(0, is_last=True)
    book.ready(job)
    book.add("exchange", job, 0, 1.0, 3.0)
    book.add("exchange", job, 1, 2.0, 4.0)
    book.add("exchange", job, 2, 5.0, 6.0)
    book.done(job, timed=True)
    totals = book.to_dict()
    assert totals["exchange_ms"] == 4000.0 and totals["per_bucket"][0]["exchange_ms"] == 5000.0
    assert (totals["steps"], totals["buckets"], totals["wire_bytes"]) == (1, 1, 7)


def test_depth_of_the_queue_is_that_at_each_hand_over():
    book = SpanBook()
    jobs = [Job(index, index == 2) for index in range(3)]
    for job in jobs[:2]:
        book.ready(job)
    for job in jobs[:2]:
        book.done(job, timed=True)
    time.sleep(0.01)
    book.ready(jobs[2])
    book.done(jobs[2], timed=True)
    stats = SyncStats.of(book.to_dict())
    assert (stats.queue_depth, stats.max_queue_depth) == (1 / 3, 1)
    assert 10 <= stats.waiting_ms < 1000  # none was under way before the last one


def test_engines_are_added_up_bucket_by_bucket():
    one = {"steps": 1, "buckets": 2, "queued": 1, "max_queue_depth": 1, "wire_bytes": 10, "exchange_ms": 2.0}
    entry = dict(vars(BucketStats(0, 1, 100, 10, 1.0, 2.0, 3.0, 6.0)))
    stats = SyncStats.of({**one, "per_bucket": [entry]}, {**one, "per_bucket": [entry, {**entry, "bucket": 3}]})
    assert stats.per_bucket == [BucketStats(0, 2, 200, 20, 2.0, 4.0, 6.0, 12.0), BucketStats(3, 1, 100, 10, 1.0, 2.0, 3.0, 6.0)]
    assert (stats.queue_depth, stats.max_queue_depth, stats.bandwidth_mb_per_s) == (0.5, 1, 20 / 4.0 / 1e3)


def test_engines_added_up_beforehand_are_the_same():
    bucket: dict = {"times": 1, "gradient_bytes": 8, "wire_bytes": 4}
    bucket |= {"pack_ms": 0.5, "exchange_ms": 1.0, "unpack_ms": 0.25, "bucket_ms": 2.0}
    first = {"steps": 2, "buckets": 3, "exchange_ms": 1.5, "wire_bytes": 9, "queued": 2, "max_queue_depth": 4, "error_sums": []}
    second = {"steps": 1, "buckets": 1, "exchange_ms": 0.5, "wire_bytes": 1, "queued": 3, "max_queue_depth": 2}
    first["per_bucket"] = [{"bucket": 0, **bucket}, {"bucket": 1, **bucket}]
    second["per_bucket"] = [{"bucket": 1, **bucket}]
    second["error_sums"] = [1.0, 4.0, 2.0, 1.0, 1.0, 9.0, 2.0, 0.0]
    totals = [first, second, second]
    added = add_totals(add_totals(first, second), second)
    assert SyncStats.of(added).to_dict() == SyncStats.of(*totals).to_dict()


def test_no_arrivals_without_times():
    stats = SyncStats()
    stats.set_arrivals([0.0, 0.0])
    assert stats.late_ms is None
    stats.set_arrivals([3.0, 1.0, 2.0])
    assert (stats.late_ms, stats.slowest_rank, stats.arrival_spread_ms) == ([0.0, 2.0, 1.0], 1, 2.0)


@pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")
def test_times_of_a_bucket_cost_less_than_it_could_matter():
    """Seconds for so many buckets: microseconds for each, in proportion."""
    few, many = (min(_native.C.cost_of_clock(number) for _ in range(5)) for number in (100, 10_000))
    assert 10 * few < many < 1e-4 * 10_000

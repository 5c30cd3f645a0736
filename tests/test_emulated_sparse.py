"""Sparse gradients on the emulated device: the mean has the rows of every rank, over either transport, and nothing hangs."""

from __future__ import annotations

import time
from typing import Any

import emulated
import pytest
import torch
from emulated import run_emulated
from emulated_engines import Rank, close, make_ranks, on_every_rank

pytestmark = pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not() or "emulation")

ROWS, WIDTH = 10, 3
# Of each rank and step: rows that come twice, rows of one rank only, none at all.
INDICES = (([1, 4, 4], [9]), ([4, 0], []), ([], []))


def sparse(rank: int, step: int) -> torch.Tensor:
    rows = torch.tensor(INDICES[step][rank], dtype=torch.int64)
    values = torch.arange(1.0, 1.0 + WIDTH * len(rows)).view(-1, WIDTH) * (rank + 1)
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, WIDTH), check_invariants=True)


def to_device(gradient: torch.Tensor, device: torch.device) -> torch.Tensor:
    parts = (gradient._indices().to(device), gradient._values().to(device))
    # Not torch's constructor, which keeps Python's lock while the device works.
    return torch.ops.aten._sparse_coo_tensor_unsafe(*parts, gradient.shape)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    parts = (gradient._indices().cpu(), gradient._values().cpu())
    return torch.sparse_coo_tensor(*parts, gradient.shape, check_invariants=True).to_dense()


def means(_rank: int, _world_size: int, over_groups: bool) -> list[Any]:
    """Returns for each step and rank what is wrong."""
    emulation = emulated.load()
    emulation.set_delay(-1, 0, 300, 1)
    ranks = make_ranks(2, "fp32", "all_reduce", (ROWS * WIDTH,), over_groups=over_groups, timeout_s=4.0)
    for one in ranks:
        one.parameters[0].data = one.parameters[0].view(ROWS, WIDTH)
    wrong = []
    for step in range(len(INDICES)):
        expected = sum(sparse(rank, step).to_dense() for rank in range(2)) / 2  # type: ignore[operator]

        def hand_over(one: Rank, step: int = step) -> tuple[torch.Tensor, float, bool]:
            buffer = to_device(sparse(one.rank, step), one.device)
            future = one.engine.submit(emulation.grad_bucket(0, True, buffer, one.parameters))
            result = future.wait()
            return dense(result), float(one.engine.sum_of_squares().sum()), bool(one.engine.found_nonfinite())

        # A thread each: the host waits for the number of rows of every rank.
        for rank, result in enumerate(on_every_rank(ranks, hand_over)):
            if isinstance(result, Exception):
                return [step, rank, repr(result)[:2000]]
            mean, sum_of_squares, found = result
            if not torch.equal(mean, expected) or found:
                wrong.append((step, rank, mean.tolist(), found))
            if sum_of_squares != pytest.approx(float(expected.square().sum()), rel=1e-12):
                wrong.append((step, rank, sum_of_squares))
    stats = ranks[0].engine.stats()
    if stats["buckets"] != len(INDICES) or not stats["gradient_bytes"]:
        wrong.append(stats)
    emulation.set_delay(-1, 0, 0, 0)
    close(ranks)
    return wrong


@pytest.mark.parametrize("over_groups", [False, True], ids=["nccl", "groups"])
def test_the_mean_has_the_rows_of_every_rank(over_groups):
    assert run_emulated(means, args=(over_groups,)) == [[]]


def fail(_rank: int, _world_size: int, kind: str, after: int) -> dict[str, Any]:
    """Rank 0 hands a sparse gradient over; rank 1 does not, or a fault strikes rank 1. Returns each rank's error and delay."""
    emulation = emulated.load()
    ranks = make_ranks(2, "fp32", "all_reduce", (ROWS * WIDTH,), timeout_s=1.0)
    for one in ranks:
        one.parameters[0].data = one.parameters[0].view(ROWS, WIDTH)

    def hand_over(one: Rank) -> tuple[str, str, float, bool]:
        buffer = to_device(sparse(one.rank, 0), one.device)
        if one.rank == 1 and kind == "late":
            return "", "", 0.0, True
        if one.rank == 1:
            emulation.plant_nccl_fault(1, kind, after)
        started = time.monotonic()
        try:
            one.engine.submit(emulation.grad_bucket(0, True, buffer, one.parameters)).wait()
        except Exception as error:
            nan = bool(buffer._values().cpu().isnan().all())
            return type(error).__name__, str(error), time.monotonic() - started, nan
        return "", "", 0.0, False

    told = on_every_rank(ranks, hand_over)
    close(ranks)
    return {"told": told, "communicators": emulation.live_communicators()}


@pytest.mark.parametrize(
    ("kind", "after", "words"),
    [
        ("late", 0, ""),
        ("hang", 0, "lengths of sparse gradients timed out after 1"),
        ("hang", 2, "sparse gradients timed out after 1"),
        ("async_error", 0, "network error"),
        ("error", 1, "planted error"),
    ],
)
def test_the_host_does_not_wait_for_ever(kind, after, words):
    """It waits for the number of rows of every rank, before the engine's watchdog has the bucket to look at."""
    (result,) = run_emulated(fail, args=(kind, after))
    first, second = result["told"]
    assert first[0] == "SyncTimeoutError" and "sparse gradients timed out after 1" in first[1] and "bucket 0" in first[1]
    assert words in second[1] and (second[0] in ("SyncError", "SyncTimeoutError")) == (kind != "late")
    for _, _, seconds, nan in (first, second):
        assert seconds < 3.0 and nan
    assert result["communicators"] == 0

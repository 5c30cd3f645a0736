"""The harness itself: a failing, dying or hanging rank is told with its traceback, and nothing is left running."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksError, close_pool, run_on_ranks, watch_ranks


def _sum_of_ranks(rank, world_size, start):
    value = torch.tensor([float(start + rank)])
    dist.all_reduce(value)
    return value.item(), os.getpid()


def _fail_on_one(rank, world_size, how):
    if rank == 1:
        if how == "raise":
            raise KeyError("the reason")
        if how == "die":
            os._exit(7)
        time.sleep(60)


def test_values_come_back_in_rank_order_and_processes_are_used_again():
    close_pool()  # with more processes idle than are needed, others may be taken
    first = run_on_ranks(_sum_of_ranks, 2, args=(1,))
    second = run_on_ranks(_sum_of_ranks, 2, args=(2,))
    assert [value for value, _ in first] == [3.0, 3.0]
    assert [value for value, _ in second] == [5.0, 5.0]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_failures_are_told_and_nothing_is_left_running():
    with pytest.raises(RanksError, match="KeyError: 'the reason'"):
        run_on_ranks(_fail_on_one, 2, args=("raise",))
    outcomes = watch_ranks(_fail_on_one, 2, args=("die",))
    assert [outcome.exit_code for outcome in outcomes] == [0, 7]
    run_on_ranks(_sum_of_ranks, 2, args=(1,))  # the time of the call alone, without that of new processes
    started = time.monotonic()
    with pytest.raises(RanksError, match="not finished after 6 s"):
        run_on_ranks(_fail_on_one, 2, timeout_s=6, args=("hang",))
    assert time.monotonic() - started < 12

"""python -m gsync.benchmarks.reducer measures what it says."""

import pytest
from gsync.benchmarks import reducer

from gsync import _native


def test_cost_of_the_hooks_and_memory_are_measured():
    cost = reducer.in_new_processes(1, reducer.hook_cost_us, 200, 10)
    assert -1 < cost < 100  # a time on a machine that may be busy: what it is worth is said by the benchmark
    if not hasattr(_native.C, "Engine"):
        pytest.skip("the engine in Python keeps other buffers")
    gradients = 4 * 4 * 1024 * 1025
    extra = {way: reducer.in_new_processes(2, reducer.extra_bytes, way, 4, 1024, 4)[0] for way in ("ddp", "reducer bf16")}
    assert extra["ddp"] > 0.9 * gradients and extra["reducer bf16"] < 0.8 * extra["ddp"]

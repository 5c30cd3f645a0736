"""Models and configurations at random, at two ranks, against one process: the same bits, within the codec's bound."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from field_cases import DOORS
from fuzz_cases import WORLD_SIZE, Example, Reference, Weight, bound_of, run
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from reducer_cases import each_engine

from gsync.config import BLOCK_CODECS, CODECS

ENGINES = [engine.values[0] for engine in each_engine() if not engine.marks]
BUDGET_S, SLOW_BUDGET_S, LEAST_EXAMPLES, RUN = 25.0, 120.0, 10, 40

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple),
    st.sampled_from([(31,), (32,), (33,), (255,), (256,), (257,), (4095,), (4097,), (9001,), (67, 129), (8, 3, 5, 7)]),
)
FREE = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=4).map(frozenset)


@st.composite
def weights(draw: Callable[..., Any], is_used: bool) -> Weight:
    return Weight(
        shape=draw(SHAPES),
        dtype=draw(st.sampled_from(["fp32"] * 4 + ["fp16", "bf16", "fp64", "complex64"])),
        order=draw(st.sampled_from(["plain", "transposed", "channels_last", "gap"])),
        is_frozen=draw(st.sampled_from([False] * 4 + [True])),
        is_shared=draw(st.booleans()),
        unused=frozenset() if is_used else draw(FREE),
    )


@st.composite
def configurations(draw: Callable[..., Any]) -> dict[str, Any]:
    codec = draw(st.sampled_from(CODECS))
    options: dict[str, Any] = {"codec": codec, "slice_mb": draw(st.sampled_from([1e-4, 0.01, 25]))}
    if codec in BLOCK_CODECS:
        options |= {"exempt": (), "block_size": draw(st.sampled_from([None, 32, 64, 256, 4096]))}
    else:
        options["exchange"] = draw(st.sampled_from(["all_reduce", "scatter_gather"]))
    if codec != "fp32":
        if options.get("exchange") != "all_reduce":
            options["error_feedback"] = draw(st.booleans())
        options["rounding"] = draw(st.sampled_from(["nearest", "stochastic"]))
        if options["rounding"] == "stochastic":
            options["seed"] = draw(st.integers(0, 2**31))
    return options


@st.composite
def examples(draw: Callable[..., Any]) -> Example:
    options = draw(configurations())
    # A residual of a parameter that some rank did not use is tests/test_blockcodec_values.py's.
    is_used = options.get("error_feedback", False) or draw(st.booleans())
    drawn = draw(st.lists(weights(is_used), min_size=1, max_size=6))
    drawn[0].is_frozen, drawn[0].unused = False, frozenset()  # a model has something to train
    return Example(
        weights=drawn,
        door=draw(st.sampled_from(DOORS)),
        backend=draw(st.sampled_from(ENGINES)),
        passes=draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)),
        bucket_mb=draw(st.sampled_from([1e-5, 1e-3, 0.02, 25])),
        seed=draw(st.integers(0, 10**6)),
        spread=draw(st.sampled_from([1e-3, 1.0, 100.0])),
        options=options,
    )


def check(example: Example) -> None:
    found = run_on_ranks(run, WORLD_SIZE, args=(example,), pool="fuzz")
    for rank, result in enumerate(found):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    reference = Reference(example)
    options = example.options
    for step in range(len(example.passes)):
        expected, own = reference.step(step)
        here, there = ([result["gradients"][step][i] for i in reference.trained] for result in found)
        expected = [expected[i] for i in reference.trained]
        # Of one without elements nothing is sent where it has a bucket of its own: a rank that did not use it has None then.
        filled = [i for i, numel in enumerate(reference.numels) if numel]
        missing = [[reference.names[i] for i in filled if row[i] is None] for row in (here, there, expected)]
        assert missing[0] == missing[1] == missing[2], f"step {step}: without a gradient {missing}"
        for i, (left, right, wanted) in enumerate(zip(here, there, expected, strict=True)):
            if wanted is None or left is None or right is None:
                continue
            name = f"step {step}, {reference.names[i]}"
            left, right, wanted = (torch.view_as_real(g) if g.is_complex() else g for g in (left, right, wanted))
            assert torch.equal(left, right), f"{name}: ranks differ"
            assert torch.equal(left, wanted), f"{name}: {(left.double() - wanted.double()).abs().max()} from the reference"
            if not options.get("error_feedback"):
                parts = [g for rank in range(WORLD_SIZE) if (g := own[rank][reference.trained[i]]) is not None]
                parts = [torch.view_as_real(g) if g.is_complex() else g for g in parts]
                mean = sum(part.double() / WORLD_SIZE for part in parts)
                bound = bound_of(options["codec"], options.get("rounding", "nearest"), parts, mean)
                assert ((left.double() - mean).abs() <= bound).all(), f"{name}: {(left.double() - mean).abs().max()} > {bound}"
        norms = [result["norms"][step] for result in found]
        parts = [torch.view_as_real(g) if g.is_complex() else g for g in here if g is not None]
        square = sum(part.double().square().sum().item() for part in parts)
        assert norms[0] == norms[1] and norms[0] == pytest.approx(math.sqrt(square), rel=1e-9, abs=1e-30)
        assert [result["nonfinite"][step] for result in found] == [False, False]
    # Frozen parameters get nothing.
    frozen = [i for i, weight in enumerate(example.weights) if weight.is_frozen]
    assert all(result["gradients"][step][i] is None for result in found for step in range(len(example.passes)) for i in frozen)


def check_many(first_seed: int, budget_s: float) -> int:
    """Checks examples until the time is over, in runs of hypothesis of `RUN` examples; returns how many."""
    check(Example([Weight((3,))], options={"codec": "fp32"}, backend=ENGINES[0]))  # starts the processes
    end, count, has_failed = time.monotonic() + budget_s, 0, False
    for number in itertools.count(first_seed):

        @seed(number)
        @settings(max_examples=RUN, suppress_health_check=list(HealthCheck), database=None, derandomize=False)
        @given(examples())
        def run_one(example: Example) -> None:
            nonlocal count, has_failed
            if has_failed or time.monotonic() < end:  # one that has failed is to fail again
                count += 1
                has_failed = True
                check(example)
                has_failed = False

        run_one()
        if time.monotonic() >= end:
            break
    return count


def test_two_ranks_have_the_bits_of_one_process() -> None:
    """The same examples every time, as many as there is time for."""
    assert check_many(0, BUDGET_S) >= LEAST_EXAMPLES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_have_the_bits_of_one_process_at_length() -> None:
    """Other examples every time."""
    first_seed = secrets.randbelow(2**32)
    print(f"seeds from {first_seed} on")
    assert check_many(first_seed, SLOW_BUDGET_S) >= LEAST_EXAMPLES


def test_the_check_finds_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit more in one gradient of the reference is found."""
    example = Example([Weight((5,)), Weight((300,), "bf16")], backend=ENGINES[0], options={"codec": "fp32"})
    check(example)
    step = Reference.step

    def off_by_one_bit(self: Reference, number: int) -> Any:
        expected, own = step(self, number)
        expected[1].view(torch.int16)[17] ^= 1
        return expected, own

    monkeypatch.setattr(Reference, "step", off_by_one_bit)
    with pytest.raises(AssertionError, match=r"step 0, all\.1: .* from the reference"):
        check(example)

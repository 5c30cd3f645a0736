"""The arithmetic of measurements, against values that can be checked by hand."""

from __future__ import annotations

import math
import random

import pytest
from gsync.benchmarks import timing


def test_every_round_runs_each_rival_once_in_an_order_that_the_seed_fixes() -> None:
    rounds = list(timing.shuffled_rounds(5, 40, seed=3))
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in rounds)
    assert rounds == list(timing.shuffled_rounds(5, 40, seed=3))
    assert rounds != list(timing.shuffled_rounds(5, 40, seed=4))
    assert len({tuple(order) for order in rounds}) > 20


def test_shuffling_leaves_the_users_random_state() -> None:
    random.seed(1)
    before = random.getstate()
    list(timing.shuffled_rounds(5, 10, seed=3))
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("samples", "share", "wanted"),
    [
        ([7.0], 0.5, 7.0),
        ([1.0, 3.0], 0.5, 2.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        (list(range(11)), 0.1, 1.0),
        (list(range(11)), 0.9, 9.0),
    ],
)
def test_percentiles(samples: list[float], share: float, wanted: float) -> None:
    assert timing.percentile(samples, share) == pytest.approx(wanted)


def test_no_samples_give_nan() -> None:
    assert math.isnan(timing.summarize([]).median)
    assert all(math.isnan(end) for end in timing.median_interval([]))


def test_ratios_are_paired_round_by_round() -> None:
    assert timing.paired_ratios([2.0, 30.0], [1.0, 10.0]) == [2.0, 3.0]
    assert timing.paired_differences([2.0, 30.0], [1.0, 10.0]) == [1.0, 20.0]
    with pytest.raises(ValueError, match="2 samples and 1 of the baseline"):
        timing.paired_ratios([1.0, 2.0], [1.0])


def test_the_interval_holds_the_median_19_times_in_20() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high = timing.median_interval([draw.lognormvariate(0.0, 1.0) for _ in range(41)])
        held += low <= 1.0 <= high
    assert 0.94 <= held / 2000 <= 0.99

"""Order and arithmetic of measurements, without any clock.

Rivals are measured in rounds. Every round runs each of them once, in an order shuffled anew, so that what the machine does
meanwhile meets all of them alike. A rival is compared with another inside a round: the ratio of their two times there is one
paired sample, and drift from round to round cancels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile of samples, in the samples' unit; NaN without samples."""

    median: float
    p10: float
    p90: float


def shuffled_rounds(count: int, num_rounds: int, seed: int) -> Iterator[list[int]]:
    """Yield `num_rounds` orders of range(count), the same for the same `seed` on every rank and machine."""
    shuffle = random.Random(seed)  # one of its own: the caller's random state stays as it is
    for _ in range(num_rounds):
        order = list(range(count))
        shuffle.shuffle(order)
        yield order


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the samples lie, interpolated; NaN without samples."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(samples: Sequence[float]) -> Summary:
    """Return median, 10th and 90th percentile of `samples`."""
    return Summary(percentile(samples, 0.5), percentile(samples, 0.1), percentile(samples, 0.9))


def paired_ratios(samples: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return samples[i] / baseline[i] for every round i.

    Raises:
        ValueError: the two do not have the same number of rounds.
    """
    _check_same_rounds(samples, baseline)
    return [sample / base for sample, base in zip(samples, baseline, strict=True)]


def paired_differences(samples: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return samples[i] - baseline[i] for every round i.

    Raises:
        ValueError: the two do not have the same number of rounds.
    """
    _check_same_rounds(samples, baseline)
    return [sample - base for sample, base in zip(samples, baseline, strict=True)]


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the two samples between which the true median lies with 95 % confidence, whatever the distribution.

    The ranks n/2 - 0.98 sqrt(n) and n/2 + 1 + 0.98 sqrt(n) are those of the binomial distribution; few samples give their range.
    """
    if not samples:
        return math.nan, math.nan
    ordered = sorted(samples)
    num = len(ordered)
    reach = 0.98 * math.sqrt(num)
    low = max(0, math.floor(num / 2 - reach) - 1)
    high = min(num - 1, math.ceil(num / 2 + reach))
    return ordered[low], ordered[high]


def _check_same_rounds(samples: Sequence[float], baseline: Sequence[float]) -> None:
    if len(samples) != len(baseline):
        raise ValueError(f"paired samples need the same rounds: got {len(samples)} samples and {len(baseline)} of the baseline")

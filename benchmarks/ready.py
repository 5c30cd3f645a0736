"""When gradients are ready in backward: in proportion to their bytes, or as a timeline (`sync.trace`) has measured it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gsync.trace_file import BACKWARD, GRADIENTS

from .planner import DEFAULT_BUCKET_MB, FIRST_BUCKET_BYTES
from .shapes import Parameter, cut
from .timing import percentile

Curve = Callable[[float], float]


def in_proportion(share: float) -> float:
    """Return the share of backward at which this share of the gradients' bytes is ready."""
    return share


def read(path: str, step_ms: float, parameters: Sequence[Parameter], bucket_mb: float | None) -> tuple[float, Curve]:
    """Return the share of the step that is backward, and when gradients are ready in it, medians over the timeline's steps.

    Args:
        path: of a timeline; rank 0's tracks are read.
        step_ms: a step without communication.
        bucket_mb: of the run that was traced; None: DDP's default.

    Raises:
        ValueError: the file cannot be read, is no timeline with whole steps, or is one of another model.
    """
    where = f"--timeline {path}"
    try:
        content = json.loads(Path(path).read_text())
        events = [event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: is no timeline; sync.trace writes one") from None
    passes = {event["args"]["step"]: event for event in events if event["name"] == BACKWARD}
    ends: dict[int, list[float]] = {}
    for event in sorted((event for event in events if event["name"].startswith(GRADIENTS)), key=lambda event: event["ts"]):
        step = event["args"]["step"]
        if step in passes and passes[step]["dur"] > 0:
            ends.setdefault(step, []).append((event["ts"] + event["dur"] - passes[step]["ts"]) / passes[step]["dur"])
    if not ends:
        raise ValueError(f"{where}: has no whole step of rank 0")
    num_bytes = int((bucket_mb or DEFAULT_BUCKET_MB) * 2**20)
    buckets = cut(parameters, num_bytes, FIRST_BUCKET_BYTES if bucket_mb is None else num_bytes)
    whole = [shares for shares in ends.values() if len(shares) == len(buckets)]
    if not whole:
        found = sorted({len(shares) for shares in ends.values()})
        raise ValueError(
            f"{where}: has steps of {', '.join(map(str, found))} buckets, and this model {len(buckets)}: is it another model, or "
            "another --bucket-mb (the first that is given counts)?"
        )
    backward_ms = percentile([passes[step]["dur"] / 1e3 for step, shares in ends.items() if len(shares) == len(buckets)], 0.5)
    if backward_ms > step_ms:
        raise ValueError(f"{where}: backward takes {backward_ms:.1f} ms in it, more than the whole of --step-ms {step_ms}")
    times = [percentile(shares, 0.5) for shares in zip(*whole, strict=True)]
    return backward_ms / step_ms, _curve(_byte_shares(parameters, buckets), times)


def _byte_shares(parameters: Sequence[Parameter], buckets: Sequence[Sequence[int]]) -> list[float]:
    """Of all bytes those in the first bucket, in the first two, and so on."""
    sizes = [sum(parameters[idx].num_bytes for idx in bucket) for bucket in buckets]
    total = max(1, sum(sizes))
    return [sum(sizes[: idx + 1]) / total for idx in range(len(sizes))]


def _curve(shares: Sequence[float], times: Sequence[Any]) -> Curve:
    """Straight lines from (0, 0) through (shares[i], times[i]), which must not fall, to (1, 1)."""
    points = [(0.0, 0.0)]
    for share, when in zip(shares, times, strict=True):
        points.append((share, min(1.0, max(points[-1][1], float(when)))))
    points.append((1.0, 1.0))

    def ready(share: float) -> float:
        idx = min(len(points) - 1, max(1, bisect_left([point[0] for point in points], share)))
        (x0, y0), (x1, y1) = points[idx - 1], points[idx]
        return y1 if x1 <= x0 else y0 + (y1 - y0) * (min(1.0, share) - x0) / (x1 - x0)

    return ready

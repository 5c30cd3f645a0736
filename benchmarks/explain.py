"""Where the time of a step goes, from a timeline (`sync.trace`): do its parts add up to what a stopwatch says?

step = forward, loss + backward until the last bucket is handed over + wait for its mean + optimizer
       (+ what lies between: DDP's copy out of its buckets, zero_grad, Python)
wait = time in pack, exchange or unpack, and what lies between them
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gsync.trace_file import STAGES

from .timing import percentile

STEPS = 8


def trace_steps(trace: Callable[[str], Any], step: Callable[[], Any], optimize: Callable[[], None], rank: int) -> dict[str, Any]:
    """Take STEPS steps under `trace` and return what they are made of, on rank 0; elsewhere {}. Collective.

    Args:
        trace: `sync.trace`.
        step: forward and backward pass.
        optimize: what follows.
        rank: this one.
    """
    steps, optimizers = [], []
    with tempfile.TemporaryDirectory() if rank == 0 else contextlib.nullcontext("") as folder:
        path = str(Path(folder) / "trace.json")
        with trace(path):
            for _ in range(STEPS):
                begin = time.perf_counter()
                step()
                middle = time.perf_counter()
                optimize()
                end = time.perf_counter()
                steps.append(1e3 * (end - begin))
                optimizers.append(1e3 * (end - middle))
        if rank > 0 or not Path(path).exists():
            return {}
        return explain(json.loads(Path(path).read_text()), steps, optimizers)


def explain(trace: dict[str, Any], step_ms: Sequence[float], optimizer_ms: Sequence[float]) -> dict[str, Any]:
    """Return the median of each part on rank 0, in ms, and two shares.

    Args:
        trace: a timeline's content.
        step_ms, optimizer_ms: by a stopwatch, of the steps in it.

    Returns:
        `forward_ms`, `backward_ms`, `exposed_ms`, `optimizer_ms`, `step_ms`;
        `explained_share`: the sum of the first four over the last, median over steps;
        `stages_share`: how much of the exposed time is in pack, exchange or unpack;
        `overlap_share`: how much of the time in these is not exposed.
        {} where the timeline is not whole.
    """
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    found = {}
    for name, what in (("forward", "forward"), ("backward", "backward"), ("exposed", "wait for the mean")):
        found[name] = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"] == what)
    if any(len(parts) != len(step_ms) for parts in found.values()):
        return {}
    begins = [begin for begin, _ in found["backward"]]
    found["forward"] = [(begin, until) for (begin, _), until in zip(found["forward"], begins, strict=True)]  # with the loss
    stages = sorted((event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"].split()[0] in STAGES)
    busy = _union(stages)
    parts_ms = {name: [(end - begin) / 1e3 for begin, end in parts] for name, parts in found.items()}
    parts_ms["optimizer"] = list(optimizer_ms)
    sums = [sum(parts) for parts in zip(*parts_ms.values(), strict=True)]
    exposed = sum(end - begin for begin, end in found["exposed"])
    covered = sum(_overlap(busy, begin, end) for begin, end in found["exposed"])
    total = sum(end - begin for begin, end in busy)
    return {
        **{f"{name}_ms": percentile(values, 0.5) for name, values in parts_ms.items()},
        "step_ms": percentile(step_ms, 0.5),
        "explained_share": percentile([part / whole for part, whole in zip(sums, step_ms, strict=True)], 0.5),
        "stages_share": covered / exposed if exposed else 1.0,
        "overlap_share": 1.0 - covered / total if total else 0.0,
    }


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of spans in the order of their begin: stretches that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _overlap(stretches: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in stretches)

"""One step of a rival as torch's profiler sees it: what computes, and beside it what packs, exchanges and unpacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

COMPUTE = ("forward", "backward", "wait", "optimizer")
_NODE = "autograd::engine::evaluate_function"
_STAGES = {"gsync::pack": "pack", "gsync::exchange": "exchange", "gsync::unpack": "unpack"}


def run_step(forward: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """One step, with the names that `look_at` looks for."""
    optimizer.zero_grad(set_to_none=True)
    with record_function("step"):
        with record_function("forward"):
            loss = forward()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()


def look_at(step: Callable[[], None], with_cuda: bool) -> list[dict[str, Any]]:
    """Run `step` once under the profiler and return its spans: what, begin_ms and end_ms from the begin of the step.

    `what` is one of COMPUTE, "pack", "exchange" or "unpack". "backward" ends with the last node of autograd's graph, "wait" with
    the backward pass. The collectives of torch's process groups are exchanges; for those of an engine of gsync's its own span
    stands. The profiler makes the step a little longer.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if with_cuda else [])]
    with profile(activities=activities) as profiler:
        step()
    events = [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()]
    begin = next((start for name, start, _ in events if name == "step"), 0.0)
    of_gsync = any(name in _STAGES for name, _, _ in events)
    spans = []
    for name, start, end in events:
        what = name if name in COMPUTE else _STAGES.get(name, "")
        is_collective = name.startswith(("gloo:", "nccl:", "ncclDevKernel"))
        if not what and is_collective and not of_gsync:
            what = "exchange"
        if what:
            spans.append({"what": what, "begin_ms": (start - begin) / 1e3, "end_ms": (end - begin) / 1e3})
    computed = max((end - begin for name, _, end in events if name.startswith(_NODE)), default=None)
    backward = next((span for span in spans if span["what"] == "backward"), None)
    if backward is not None and computed is not None and backward["begin_ms"] < computed / 1e3 < backward["end_ms"]:
        spans.append({"what": "wait", "begin_ms": computed / 1e3, "end_ms": backward["end_ms"]})
        backward["end_ms"] = computed / 1e3
    return sorted(spans, key=lambda span: (span["begin_ms"], span["end_ms"]))

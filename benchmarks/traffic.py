"""What synchronising does to the gradients' memory in one backward pass: operations, and bytes read and written.

torch's profiler sees every operator of torch in every thread, and gsync's pack, reduce and unpack; what the model alone does is
taken off. Operators on numbers and on sums (fp64) do not count. What libraries of collectives do inside is not seen.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Operators that read or write values; the rest of what a backward pass calls makes views, or is the model's own work.
_OPERATORS = ("copy_", "add", "add_", "mul", "mul_", "div", "div_", "fill_", "zero_")
_WRITTEN_ONLY = ("copy_", "fill_", "zero_")  # their first argument is not read
_ITEM_BYTES = {"float": 4, "c10::Half": 2, "c10::BFloat16": 2, "unsigned char": 1}


@dataclass(frozen=True)
class Traffic:
    """Of one backward pass.

    Attributes:
        operations: how often a tensor was gone through; on a GPU each is a kernel launch.
        num_bytes: read and written by them.
    """

    operations: int
    num_bytes: int


def count(
    backward: Callable[[], Any], alone: Callable[[], Any], gradient_bytes: int, payload_bytes: int, world_size: int
) -> Traffic:
    """Return what `backward` does beyond `alone`.

    Args:
        backward, alone: a backward pass with and without synchronisation, the buffers of earlier passes being there.
        gradient_bytes, payload_bytes: what gsync's pack reads and writes, unpack the other way round.
        world_size: so many chunks reduce reads, to write one.
    """
    extra = _operators(backward)
    extra.subtract(_operators(alone))
    by_kernel = {
        "gsync::pack": gradient_bytes + payload_bytes,
        "gsync::reduce": payload_bytes * (world_size + 1) // world_size,
        "gsync::unpack": payload_bytes + gradient_bytes,
    }
    num_bytes = sum(size * number for (_, size), number in extra.items())
    num_bytes += sum(size for name, size in by_kernel.items() if extra[name, 0])
    return Traffic(extra.total(), num_bytes)


def _operators(work: Callable[[], Any]) -> Counter[tuple[str, int]]:
    """How often each operator ran, by name and bytes; gsync's kernels count with 0 bytes."""
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, experimental_config=all_threads
    ) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: Counter[tuple[str, int]] = Counter()
    for event in events:
        name = event.get("name", "")
        if name in ("gsync::pack", "gsync::reduce", "gsync::unpack") and event.get("ph") == "X":
            found[name, 0] += 1
        elif name.removeprefix("aten::") in _OPERATORS and "Input Dims" in event.get("args", {}):
            size = _num_bytes(name.removeprefix("aten::"), event["args"]["Input Dims"], event["args"]["Input type"])
            if size:
                found[name, size] += 1
    return found


def _num_bytes(name: str, dims: list[Any], types: list[str]) -> int:
    sizes = [
        math.prod(shape) * _ITEM_BYTES[kind] if kind in _ITEM_BYTES and math.prod(shape) > 1 else 0
        for shape, kind in zip(dims, types, strict=True)
    ]
    in_place = name.endswith("_") and name not in _WRITTEN_ONLY
    return sum(sizes) + (sizes[0] if in_place else 0)

"""What `gsync doctor` measures between the ranks, in about ten seconds: latency, bandwidth, and how fast this machine encodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import ops
from .advice import Candidate, Link

# In the order of their errors.
CODECS = (("bf16", "all_reduce"), ("int8", "scatter_gather"), ("int4", "scatter_gather"))
_SEGMENTS, _SEGMENT_NUMEL = 4, 1 << 20  # 16 MiB of gradients, for the operations
_LATENCY_TRIES = 50
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_AIM_S = 0.4  # for one all_reduce, where that many bytes are allowed
_LINK_S, _CODEC_S = 4.0, 1.2
_LEAST_TRIES = 3


def measure(device: torch.device, told: Callable[[str], None] = lambda _: None) -> tuple[Link, list[Candidate]]:
    """Measures over the default group, with all ranks at the same time; the slowest rank's times count. Collective.

    Args:
        device: where gradients would be.
        told: called with what is measured next.

    Returns:
        The link, and the codecs in the order of their errors: the same on every rank.
    """
    told("latency")
    small = torch.ones(1, device=device)
    latency_s = _slowest(_median(lambda: dist.all_reduce(small), device, 0.0, _LATENCY_TRIES), device)

    told("bandwidth")
    world_size = dist.get_world_size()
    factor = 2.0 * (world_size - 1) / world_size
    size = _FIRST_BYTES
    while True:
        bucket = torch.ones(size // 4, device=device)
        took_s = _slowest(_median(lambda bucket=bucket: dist.all_reduce(bucket), device, 0.0, 2), device)  # type: ignore[misc]
        if took_s > _AIM_S / 2 or size >= _MOST_BYTES:
            break
        size *= 2
    tries = max(_LEAST_TRIES, min(50, int(_LINK_S / took_s)))  # the same on every rank
    took_s = _slowest(_median(lambda: dist.all_reduce(bucket), device, 0.0, tries), device)
    link = Link(world_size, latency_s, factor * size / max(1e-9, took_s - latency_s))

    candidates = []
    for codec, exchange in CODECS:
        told(f"pack and unpack of {codec}")
        candidates.append(_encode(codec, exchange, world_size, device))
        dist.barrier()
    return link, candidates


def _encode(codec: str, exchange: str, world_size: int, device: torch.device) -> Candidate:
    """How long pack, reduce of one chunk, and unpack take."""
    gradients = [torch.randn(_SEGMENT_NUMEL, device=device) for _ in range(_SEGMENTS)]
    num_bytes = 4.0 * _SEGMENTS * _SEGMENT_NUMEL
    chunks = world_size if exchange == "scatter_gather" else 1
    payload = ops.pack(gradients, codec=codec, scale=1.0 / world_size, num_chunks=chunks)
    steps: list[Callable[[], Any]] = [
        lambda: ops.pack(gradients, codec=codec, scale=1.0 / world_size, num_chunks=chunks, out=payload),
        lambda: ops.unpack(payload, gradients, codec=codec, num_chunks=chunks),
    ]
    if chunks > 1:
        received = [chunk.clone() for chunk in payload.chunk(chunks)]
        numels = [_SEGMENT_NUMEL] * _SEGMENTS
        reduced = received[0].clone()
        steps.append(lambda: ops.reduce([received[0]] * chunks, numels, codec=codec, num_chunks=chunks, chunk_idx=0, out=reduced))
    took_s = sum(_median(step, device, _CODEC_S / len(steps), 20) for step in steps)
    return Candidate(codec, exchange, _slowest(took_s, device) / num_bytes, payload.numel() / num_bytes)


def _median(call: Callable[[], Any], device: torch.device, limit_s: float, most: int) -> float:
    """Of up to `most` calls in `limit_s`, after one that is not counted; with limit 0, which ranks do together, of all `most`."""
    call()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < most and (limit_s == 0.0 or len(samples) < _LEAST_TRIES or time.perf_counter() - began < limit_s):
        _wait_for(device)
        start = time.perf_counter()
        call()
        _wait_for(device)
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

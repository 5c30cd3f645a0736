"""A short calibration: how fast an engine's operations are, and the links between its ranks. What `gsync/tuner.py` predicts from.

Each figure is the median of a few tries on this rank. It takes about a second, the first time an engine is made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import backends, operators
from .cost import FP32_BYTES, SUMMED_BY_LIBRARY, Kernel, Link, Network
from .hosts import Place
from .layout import CODEC_KINDS
from .reference import CODE_DTYPES

_TRIES, _SMALL_TRIES = 3, 9
_NUMEL = 1 << 18  # of the gradients that operations are timed on
_MOST_PAYLOADS = 8  # that one reduce is timed with
_CHUNK_BYTES = 64  # of a message in which latency is all
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 23  # that a rank sends to measure bandwidth
_LINK_S = 0.04  # that sending them should take


def measure_kernels(codecs: Sequence[str], world_size: int, device: torch.device, backend: str) -> dict[str, Kernel]:
    """Times pack, reduce and unpack of each codec on 1 MiB of gradients. Touches nobody's random numbers.

    Args:
        world_size: payloads that `reduce` reads.
        backend: see `gsync.backends.resolve`.
    """
    return {codec: _kernel(codec, min(world_size, _MOST_PAYLOADS), device, backend) for codec in codecs}


def measure_network(transport: Callable[[str], Any], place: Place, codecs: Sequence[str], device: torch.device) -> Network:
    """Times messages and sums between the ranks. Collective; no bucket may be under way.

    Args:
        transport: level -> collectives, as `Engine.transport`.
        place: this rank's among hosts; without hosts, every rank by itself.
        codecs: those that libraries sum are timed under all_reduce.
    """
    if place.ranks_per_host > 1:
        intra, cpu_s = _link(transport("inner"), place.ranks_per_host, 1, device)
        inter = intra
        if place.num_hosts > 1:
            inter, cpu_s = _link(transport("outer"), place.num_hosts, place.ranks_per_host, device)
    else:
        inter, cpu_s = _link(transport("all"), place.num_hosts, 1, device)
        intra = inter
    sums: dict[str, float] = {}
    if device.type == "cpu":
        sums = {codec: _sum_cpu_s(transport("all"), codec, place.world_size) for codec in codecs if codec in SUMMED_BY_LIBRARY}
    return Network(inter, intra, device.type != "cpu", cpu_s, tuple(sums.items()))


def to_numbers(network: Network, kernels: Mapping[str, Kernel]) -> dict[str, Any]:
    """Both as plain numbers, for other ranks."""
    links = [[link.bytes_per_s, link.latency_s, link.message_s] for link in (network.inter, network.intra)]
    rates = {codec: [one.pack, one.unpack, one.reduce_read, one.reduce_write] for codec, one in kernels.items()}
    return {"links": links, "send_cpu_s": network.send_cpu_s, "sum_cpu_s": dict(network.sum_cpu_s), "kernels": rates}


def slowest(ranks: Sequence[Mapping[str, Any]], on_device: bool) -> tuple[Network, dict[str, Kernel]]:
    """What the slowest rank measured, figure by figure: the others wait for it. The inverse of `to_numbers`."""
    links = []
    for level in zip(*(rank["links"] for rank in ranks), strict=True):
        bytes_per_s, latency_s, message_s = zip(*level, strict=True)
        links.append(Link(min(bytes_per_s), max(latency_s), max(message_s)))
    sums = {codec: max(rank["sum_cpu_s"][codec] for rank in ranks) for codec in ranks[0]["sum_cpu_s"]}
    rates = {codec: [max(column) for column in zip(*(rank["kernels"][codec] for rank in ranks), strict=True)]
             for codec in ranks[0]["kernels"]}  # fmt: skip
    network = Network(links[0], links[1], on_device, max(rank["send_cpu_s"] for rank in ranks), tuple(sums.items()))
    return network, {codec: Kernel(*some) for codec, some in rates.items()}


def _kernel(codec: str, num_payloads: int, device: torch.device, backend: str) -> Kernel:
    kernels = backends.get(backend, device)
    gradients = [torch.linspace(-1.0, 1.0, _NUMEL, device=device)]
    results = [torch.empty_like(gradients[0])]
    layout = operators.layout_for([_NUMEL], [codec], ["probe"], num_payloads, 0)
    payload = backends.empty_payload(int(layout.sizes.payload_bytes), device)
    chunk = backends.empty_payload(int(layout.sizes.chunk_bytes), device)
    partials = torch.empty(layout.sizes.num_partials, dtype=torch.float64, device=device)
    found_nonfinite, sums = torch.zeros(1, dtype=torch.int32, device=device), partials.new_empty(1)
    received = [payload[: chunk.numel()]] * num_payloads

    def per_byte(work: Callable[[], None]) -> float:
        return _median(work, _TRIES, device) / (FP32_BYTES * _NUMEL)

    packing = per_byte(lambda: kernels.pack(layout, gradients, payload, 1.0))
    # Of one chunk: num_payloads are read, one is written.
    reducing = per_byte(lambda: kernels.reduce(layout, 0, received, chunk, 1.0)) * num_payloads / (num_payloads + 1)
    unpacking = per_byte(lambda: kernels.unpack(layout, payload, results, partials, found_nonfinite, sums))
    return Kernel(packing, unpacking, reducing, reducing)


def _link(transport: Any, num_ranks: int, sharing: int, device: torch.device) -> tuple[Link, float]:
    """The link between so many ranks, and what a byte over it costs a core.

    Args:
        sharing: ranks of a host that use it at the same time.
    """
    peers = num_ranks - 1
    sums = torch.zeros(1, device=device)
    latency_s = _median(lambda: transport.all_reduce(sums).wait(), _SMALL_TRIES, device) / (2 * peers)
    small_s = _median(_messages(transport, num_ranks, _CHUNK_BYTES, device), _SMALL_TRIES, device)
    message_s = max(0.0, small_s - latency_s) / max(1, peers - 1)
    chunk_bytes = _FIRST_BYTES // peers
    first_s = _median(_messages(transport, num_ranks, chunk_bytes, device), _TRIES, device)
    # The same size on every rank: that of their mean.
    sums.fill_(min(_MOST_BYTES / _FIRST_BYTES, max(1.0, _LINK_S / max(1e-6, first_s - small_s))))
    transport.all_reduce(sums).wait()
    chunk_bytes = int(chunk_bytes * float(sums) / num_ranks)
    core = time.process_time()
    took_s = _median(_messages(transport, num_ranks, chunk_bytes, device), _TRIES, device)
    cpu_s = (time.process_time() - core) / ((_TRIES + 1) * peers * chunk_bytes)
    bytes_per_s = sharing * peers * chunk_bytes / max(1e-9, took_s - small_s)
    return Link(bytes_per_s, latency_s, message_s), cpu_s if device.type == "cpu" else 0.0


def _messages(transport: Any, num_ranks: int, chunk_bytes: int, device: torch.device) -> Callable[[], None]:
    payload, out = (torch.zeros(num_ranks * chunk_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: transport.all_to_all(out, payload).wait()


def _sum_cpu_s(transport: Any, codec: str, world_size: int) -> float:
    """Seconds of a core for each byte that a rank sends under all_reduce."""
    payload = torch.zeros(_FIRST_BYTES, dtype=torch.uint8).view(CODE_DTYPES[CODEC_KINDS[codec]])
    core = time.process_time()
    for _ in range(_TRIES):
        transport.all_reduce(payload).wait()
    return (time.process_time() - core) / (_TRIES * 2 * (world_size - 1) / world_size * _FIRST_BYTES)


def _median(work: Callable[[], Any], tries: int, device: torch.device) -> float:
    """Seconds; the first try warms up."""
    times = []
    for number in range(tries + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number > 0:
            times.append(time.perf_counter() - began)
    return statistics.median(times)

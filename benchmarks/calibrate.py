"""Measures what `gsync plan` needs: `gsync plan --calibrate FILE`, alone or under torchrun or srun.

All ranks of a host measure at the same time, since they share its memory and cores in a training step too. Alone it starts
ranks on this machine, and what they measure between them is the link inside a host. Under a launcher links are measured inside
each host where it has several ranks, and between hosts where there are several: between the ranks of equal place, all at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gsync import machine
from gsync.config import CODECS
from gsync.launch import Place, find_place

from . import kernels, launch, network, timing
from .calibration import CASTS, Calibration, LinkFigures, Spread, spread_of

_SIZE_MB, _SEGMENTS = 16.0, 16
_FEW, _MANY = 2, 8  # payloads, to tell what reading one costs from what writing the sum costs
_TIMES = 32  # that something small is done in a row
_WARMUP = 2
_LINK_BYTES = 16 << 20
_SMALL_TRIES, _BURST = 40, 16
_LIMIT_S = 300.0
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_kernels(device: torch.device, repeats: int = 12) -> dict[str, Any]:
    """Time pack, reduce, unpack of every codec, and what DDP and torch's hooks do instead, in shuffled rounds.

    Returns:
        `kernels`, `copy`, `copy_fixed`, `casts`, as in `Calibration`.
    """
    cases: dict[tuple[str, ...], Callable[[], Any]] = {}
    bucket, wide = (kernels.Bucket(_SIZE_MB, _SEGMENTS, ranks, device) for ranks in (_FEW, _MANY))
    tiny = kernels.Bucket(1e-3, 1, _FEW, device)
    for codec in CODECS:
        encoded = kernels.Encoded(bucket, codec, "auto")
        many, least = kernels.Encoded(wide, codec, "auto"), kernels.Encoded(tiny, codec, "auto")
        cases[codec, "pack"] = partial(encoded.pack, 0)
        cases[codec, "pack_feedback"] = partial(encoded.pack_with_feedback, 0)
        cases[codec, "unpack"] = partial(encoded.unpack, 0)
        cases[codec, "few"] = partial(encoded.reduce, 0)
        cases[codec, "many"] = partial(many.reduce, 0)
        cases[codec, "fixed"] = _often(partial(least.pack, 0))
    buffer, other = bucket.buffers[0], bucket.other
    cases["", "copy"] = partial(other.copy_, buffer)
    cases["", "copy_fixed"] = _often(partial(tiny.other.copy_, tiny.buffers[0]))
    for codec in CASTS:
        cases[codec, "to"] = partial(_cast, buffer, _DTYPES[codec])
        cases[codec, "back"] = partial(other.copy_, buffer.to(_DTYPES[codec]))
    samples: dict[tuple[str, ...], list[float]] = {label: [] for label in cases}
    labels = list(cases)
    for number, order in enumerate(timing.shuffled_rounds(len(labels), _WARMUP + repeats, seed=0)):
        for position in order:
            took = _seconds(cases[labels[position]], device)
            if number >= _WARMUP:
                samples[labels[position]].append(took)
    size = 4.0 * bucket.numel
    return {
        "kernels": {codec: _operations(codec, samples, size) for codec in CODECS},
        "copy": spread_of(samples["", "copy"], size),
        "copy_fixed": spread_of(samples["", "copy_fixed"], _TIMES),
        "casts": {codec: {name: spread_of(samples[codec, name], size) for name in ("to", "back")} for codec in CASTS},
    }


def _operations(codec: str, samples: dict[tuple[str, ...], list[float]], size: float) -> dict[str, Spread]:
    """Of `few` and `many` payloads of a chunk: what each one that is read adds, and what is left for writing the sum."""
    read, written = [], []
    for few, many in zip(samples[codec, "few"], samples[codec, "many"], strict=True):
        # few: payloads of size / _FEW, many: of size / _MANY, so that both read `size` and write a share of it.
        per_few, per_many = few * _FEW / size, many * _MANY / size
        read.append(max(0.0, (per_many - per_few) / (_MANY - _FEW)))
        written.append(max(0.0, per_few - _FEW * read[-1]))
    names = ("pack", "pack_feedback", "unpack")
    found = {name: spread_of(samples[codec, name], size) for name in names}
    return {
        **found,
        "reduce_read": spread_of(read),
        "reduce_write": spread_of(written),
        "fixed": spread_of(samples[codec, "fixed"], _TIMES),
    }


def _often(work: Callable[[], Any]) -> Callable[[], None]:
    """Does it _TIMES times: one after the other, as the copies of DDP are, what is small takes a fifth of the time."""

    def works() -> None:
        for _ in range(_TIMES):
            work()

    return works


def _cast(buffer: torch.Tensor, dtype: torch.dtype) -> None:
    """As torch's hooks do."""
    buffer.to(dtype).div_(_FEW)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """On one core of a CPU the time that the core spent: the simulation adds what waiting for a core costs."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    _wait_for(device)
    began = clock()
    work()
    _wait_for(device)
    return clock() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_link(
    group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, sharing: int, repeats: int = 8
) -> LinkFigures:
    """Time messages and all_reduce between the ranks of a group. Collective; the slowest rank's times count.

    Args:
        ranks: of the group, in its order.
        sharing: ranks that share the link and do the same at the same time: bandwidth is theirs together.
    """
    size, on_device = len(ranks), device.type == "cuda"
    place = list(ranks).index(dist.get_rank())
    small = torch.ones(1, device=device)

    def everyone(work: Callable[[], Any], tries: int) -> tuple[list[float], list[float]]:
        """Wall and core seconds of each try, of the slowest rank."""
        walls, cores = [], []
        for number in range(_WARMUP + tries):
            dist.all_reduce(small, group=group)
            _wait_for(device)
            core, began = time.process_time(), time.perf_counter()
            work()
            _wait_for(device)
            if number >= _WARMUP:
                walls.append(time.perf_counter() - began)
                cores.append(time.process_time() - core)
        values = torch.tensor([walls, cores], dtype=torch.float64, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        wall, core_s = values.tolist()
        return wall, core_s

    def messages(count: int, numel: int) -> Callable[[], None]:
        """Sends `count` messages to the next rank and receives as many from the one before, receives first."""
        after, before = ranks[(place + 1) % size], ranks[(place - 1) % size]
        outgoing, incoming = torch.ones(numel, device=device), torch.ones(numel, device=device)

        def work() -> None:
            pairs = [dist.P2POp(dist.irecv, incoming, before, group) for _ in range(count)]
            pairs += [dist.P2POp(dist.isend, outgoing, after, group) for _ in range(count)]
            for request in dist.batch_isend_irecv(pairs):
                request.wait()

        return work

    latency, _ = everyone(lambda: dist.all_reduce(small, group=group), _SMALL_TRIES)
    one, _ = everyone(messages(1, 1), _SMALL_TRIES)
    burst, _ = everyone(messages(_BURST, 1), _SMALL_TRIES)
    each = [max(0.0, (many - single) / (_BURST - 1)) for single, many in zip(sorted(one), sorted(burst), strict=True)]
    numel = _LINK_BYTES // 4
    sent, sent_cores = everyone(messages(1, numel), repeats)
    sums: dict[str, Spread] = {}
    moved = 2.0 * (size - 1) / size * _LINK_BYTES
    for codec, dtype in _DTYPES.items():
        payload = torch.ones(_LINK_BYTES // dtype.itemsize, dtype=dtype, device=device)
        _, cores = everyone(partial(dist.all_reduce, payload, group=group), repeats)
        sums[codec] = spread_of([0.0] * repeats if on_device else cores, moved)
    return LinkFigures(
        byte_s=spread_of(sent, _LINK_BYTES * sharing),
        latency_s=spread_of(latency, 2.0 * (size - 1)),
        message_s=spread_of(each),
        send_cpu_s=spread_of([0.0] * repeats if on_device else sent_cores, _LINK_BYTES),
        sum_cpu_s=sums,
    )


def here(device: str) -> Calibration:
    """Measure the operations in this process; links stay unknown. Takes seconds."""
    place = torch.device(device)
    return Calibration(device, 1, **measure_kernels(place), intra=None, inter=None, source="this machine, one rank, just now")


def between_ranks(place: Place, device: torch.device) -> Calibration:
    """Measure operations and links, in a process group that is there already. Collective."""
    within, hosts = place.local_world_size, place.world_size // place.local_world_size
    found = measure_kernels(device)
    dist.barrier()
    groups: dict[str, tuple[dist.ProcessGroup, list[int]]] = {}
    for host in range(hosts):
        ranks = list(range(host * within, (host + 1) * within))
        group: Any = dist.new_group(ranks)
        if place.rank in ranks and within > 1:
            groups["intra"] = group, ranks
    for local in range(within):
        ranks = list(range(local, place.world_size, within))
        group = dist.new_group(ranks)
        if place.rank in ranks and hosts > 1:
            groups["inter"] = group, ranks
    links: dict[str, LinkFigures | None] = {"intra": None, "inter": None}
    for name, (group, ranks) in groups.items():
        links[name] = measure_link(group, ranks, device, within if name == "inter" else 1)
    return Calibration(device.type, within, **found, intra=links["intra"], inter=links["inter"])


def calibrate(path: str, device: str, threads: int, ranks_per_host: int, hosts: int | None = None) -> None:
    """Measure, on rank 0 write `path`. Under a launcher collective; alone starts the ranks, at most one for each GPU.

    Args:
        hosts: namespaces, so that what a link between hosts costs the cores is measured too; None: ranks of this machine, at
            least two. Not under a launcher.

    Raises:
        ValueError: hosts under a launcher, or namespaces cannot be had here.
        RuntimeError: the measurement failed.
    """
    place = find_place()
    if place is None:
        per_host = ranks_per_host if hosts else max(2, ranks_per_host)
        per_host = min(per_host, torch.cuda.device_count() // (hosts or 1)) if device == "cuda" else per_host
        try:
            return _start(path, device, threads, per_host, hosts or 1)
        except network.NetworkError as error:
            raise ValueError(f"--hosts {hosts}: {error}") from error
    if hosts is not None:
        raise ValueError(f"--hosts cannot act under {place.launcher}, which has placed the ranks already")
    torch.set_num_threads(threads)
    kind = torch.device("cuda", place.local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(kind)
    store = dist.TCPStore(
        place.master_address,
        place.master_port,
        is_master=place.rank == 0 and not launch.store_is_there(),
        wait_for_workers=False,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=_LIMIT_S)
    )
    try:
        found = between_ranks(place, kind)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if place.rank == 0:
        content = {**machine.circumstances(), "threads": threads, **found.to_dict()}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def _start(path: str, device: str, threads: int, per_host: int, num_hosts: int) -> None:
    """Runs `calibrate` on so many ranks of each host: of this machine, or of namespaces on it."""
    command = [sys.executable, "-m", "gsync.benchmarks.calibrate", path, device, str(threads)]
    ranks = num_hosts * per_host
    with contextlib.ExitStack() as stack:
        place: dict[str, str] = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_host), "OMP_NUM_THREADS": str(threads)}
        if num_hosts > 1:
            joined = stack.enter_context(network.Network(num_hosts, None))
            commands = [joined.command(rank // per_host, command) for rank in range(ranks)]
            place |= {"MASTER_ADDR": joined.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": network.INTERFACE}
            place["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # warns that addresses of namespaces have no names
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            commands = ranks * [command]
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            if sys.platform.startswith("linux"):
                place["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        _run_ranks(commands, [place | {"RANK": str(rank), "LOCAL_RANK": str(rank % per_host)} for rank in range(ranks)])


def _run_ranks(commands: Sequence[list[str]], places: Sequence[dict[str, str]]) -> None:
    logs = [tempfile.TemporaryFile() for _ in commands]  # noqa: SIM115 (they live as long as the ranks)
    processes = [
        subprocess.Popen(command, env={**os.environ, **place}, stdout=log, stderr=log)
        for command, place, log in zip(commands, places, logs, strict=True)
    ]
    deadline = time.monotonic() + _LIMIT_S
    try:
        for process in processes:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the measurement took more than {_LIMIT_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        log.seek(0)
        if process.returncode:
            raise RuntimeError(f"the measurement failed: {log.read().decode(errors='replace')[-2000:].strip()}")


if __name__ == "__main__":
    calibrate(sys.argv[1], sys.argv[2], int(sys.argv[3]), 1)

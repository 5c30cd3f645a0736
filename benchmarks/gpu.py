"""What only a GPU can tell, as JSON lines: `python -m gsync.benchmarks.gpu [kernel] [submit] [communicator]`; part of `make gpu`.

    kernel         pack, reduce and unpack: bandwidth, and its share of a device copy's in the same round
    submit         host time for a bucket: from the call in Python until its kernels and collectives are enqueued
    communicator   device memory that gsync's own communicator takes; one rank, or as many as torchrun starts

Every line has the GPU, its driver, versions and the commit. A line with a target says whether it was met.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gsync import _native, machine

from . import kernels, timing
from .progress import Progress

WHAT = ("kernel", "submit", "communicator")
SIZES_MB = (64.0, 256.0)
SHARE_OF_COPY = 0.9  # of pack and unpack, at those sizes
SUBMIT_US = 15.0
_BUCKET_MB, _NUM_BUCKETS = 1, 32
_NO_GPU = 2  # exit code


def driver() -> str | None:
    """Return the version of the NVIDIA driver, None without one."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.split("\n")[0].strip() or None


def facts(device: torch.device) -> dict[str, Any]:
    """Return what every line is filed with."""
    versions = machine.versions()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": driver(),
        "host": machine.machine()["host"],
        "commit": machine.commit(),
        "torch": versions["torch"],
        "cuda": versions["cuda"],
        "nccl": versions["nccl"],
    }


def kernel_lines(
    device: torch.device, sizes_mb: Sequence[float] = SIZES_MB, codecs: Sequence[str] = kernels.CODECS, repeats: int = 30
) -> Iterator[dict[str, Any]]:
    """Yield one line for each operation, codec and size; bytes are compared with the reference's before anything is timed."""
    for size_mb in sizes_mb:
        bucket = kernels.Bucket(size_mb, 16, 2, device)
        cases = kernels.make_cases(bucket, list(codecs), ["native"], explicit=True)
        kernels.measure(cases, bucket.copies, repeats, device, Progress(False))
        copy = cases[0]
        for case in cases:
            if not case.family.startswith("gsync"):
                continue
            operation = case.name.removesuffix(" native")
            codec = case.family.removeprefix("gsync ")
            line: dict[str, Any] = {"what": "kernel", "operation": operation, "codec": codec, "size_mb": size_mb}
            if case.wrong:
                yield line | {"wrong": case.wrong}
                continue
            share = [case.num_bytes / copy.num_bytes / ratio for ratio in timing.paired_ratios(case.ms, copy.ms)]
            summary = timing.summarize(share)
            line |= {"gb_per_s": case.num_bytes / timing.summarize(case.ms).median / 1e6, "share_of_copy": vars(summary)}
            if operation in ("pack", "unpack"):
                line |= {"target": SHARE_OF_COPY, "met": summary.median >= SHARE_OF_COPY}
            yield line


class _Buckets(nn.Module):
    """Parameters that are a DDP bucket each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        numel = (_BUCKET_MB << 20) // 4
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(count)])

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


class _Training:
    """A model under DDP whose hook times how long the native engine takes to accept a bucket."""

    def __init__(self, device: torch.device, exchange: str, codec: str, num_buckets: int) -> None:
        native = _native.require("gsync.benchmarks.gpu")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        module = _Buckets(num_buckets).to(device)
        self._ddp = DistributedDataParallel(module, bucket_cap_mb=_BUCKET_MB)
        store = dist.PrefixStore(f"gpu/{exchange}/{codec}", dist.distributed_c10d._get_default_store())
        if device.type == "cuda":
            transport = native.NcclTransport(store, rank, world_size, str(device), 60.0)
        else:
            lanes = [dist.ProcessGroupGloo(dist.PrefixStore(tag, store), rank, world_size) for tag in ("0", "1")]
            transport = native.C10dTransport(*lanes, rank, world_size, 60.0)
            del lanes
        self.engine = native.Engine(transport, str(device), world_size, rank, exchange, 1.0 / world_size, 25 << 20, 60.0)
        names, parameters = zip(*module.named_parameters(), strict=True)
        self.engine.set_parameters(list(parameters), list(names), [codec] * len(names))
        self.samples: list[float] = []
        self._device = device

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
            began = time.perf_counter_ns()
            future = self.engine.submit(bucket)
            self.samples.append((time.perf_counter_ns() - began) / 1e3)
            return future

        self._ddp.register_comm_hook(None, hook)

    def step(self) -> None:
        self._ddp.zero_grad()
        self._ddp().backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def submit_lines(device: torch.device, num_buckets: int = _NUM_BUCKETS, steps: int = 20) -> Iterator[dict[str, Any]]:
    """Yield the host time per bucket for each exchange, one rank over a communicator of its own. Collective."""
    for exchange, codec in (("all_reduce", "bf16"), ("scatter_gather", "int8")):
        training = _Training(device, exchange, codec, num_buckets)
        for _ in range(4):  # DDP makes its buckets anew, the engine its plans and buffers
            training.step()
        training.samples.clear()
        for _ in range(steps):
            training.step()
        training.engine.close()
        summary = timing.summarize(training.samples)
        line = {"what": "submit", "exchange": exchange, "codec": codec, "bucket_mb": _BUCKET_MB, "us": vars(summary)}
        yield line | {"buckets": len(training.samples), "target_us": SUBMIT_US, "met": summary.median <= SUBMIT_US}


def communicator_lines(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield what free memory has lost to a communicator that has done a step, without what torch's allocator took. Collective."""

    def taken() -> int:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)

    torch.zeros(1, device=device)
    before = taken()
    training = _Training(device, "scatter_gather", "int8", 2)
    for _ in range(3):
        training.step()
    line = {"what": "communicator", "world_size": dist.get_world_size(), "mib": (taken() - before) / 2**20}
    dist.barrier()
    training.engine.close()
    yield line


def measure(what: Sequence[str], device: torch.device) -> bool:
    """Print the lines, on rank 0. Return whether all bytes were right."""
    about = facts(device)
    lines: dict[str, Callable[[torch.device], Iterator[dict[str, Any]]]]
    lines = {"kernel": kernel_lines, "submit": submit_lines, "communicator": communicator_lines}
    right = True
    for name in what:
        for line in lines[name](device):
            right &= "wrong" not in line
            if dist.get_rank() == 0:
                print(json.dumps({**line, **about}), flush=True)
    return right


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    unknown = [word for word in arguments if word not in WHAT]
    if unknown:
        print(f"gsync.benchmarks.gpu: {unknown[0]}: expected {', '.join(WHAT)}", file=sys.stderr)
        return _NO_GPU
    if not torch.cuda.is_available():
        print("gsync.benchmarks.gpu: torch finds no NVIDIA GPU here", file=sys.stderr)
        return _NO_GPU
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    start_group()
    try:
        return 0 if measure(arguments or WHAT, device) else 1
    finally:
        dist.destroy_process_group()


def start_group() -> None:
    """Make the process group: that of torchrun, or of this process alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

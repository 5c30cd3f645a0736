"""What GradReducer costs beside DDP: time in autograd's thread for each parameter, and memory above model and gradients.

    python -m gsync.benchmarks.reducer                       both tables
    python -m gsync.benchmarks.reducer hooks                 1,000 parameters of one element, one rank
    python -m gsync.benchmarks.reducer memory                6 layers of 2048 x 2048, two ranks, resident memory of rank 0

Time. Backward passes with and without the reducer alternate in one process. The clock, of processor time, stops when the last
gradient is accumulated: what counts is what the hooks, and the buckets they hand over, add on the way there.

Memory. Each way to synchronise runs in processes of its own. The highest resident memory of steps is read from Linux, and that of
steps of the same model before it was to be synchronised is taken off.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gsync

from .timing import percentile

HOOK_BAR_US = 1.5
_WARMUP = 3


def hook_cost_us(num_params: int = 1000, rounds: int = 60) -> float:
    """Return the median time in µs that the reducer adds for each parameter. Needs a process group of one rank."""
    plain, reduced = _many(num_params), _many(num_params)
    gsync.GradReducer(reduced, codec="fp32")
    ends = [0.0, 0.0]
    for idx, module in enumerate((plain, reduced)):

        def stop(_: torch.Tensor, idx: int = idx) -> None:
            ends[idx] = time.thread_time()

        module[0].register_post_accumulate_grad_hook(stop)  # the first one is used last in backward
    differences = []
    for number in range(rounds + _WARMUP):
        took = []
        for idx, module in enumerate((plain, reduced)):
            for param in module:
                param.grad = None
            loss = torch.zeros(())
            for param in module:
                loss = loss + param
            start = time.thread_time()
            loss.backward()
            took.append(ends[idx] - start)
        if number >= _WARMUP:
            differences.append(1e6 * (took[1] - took[0]) / num_params)
    return percentile(differences, 0.5)


def _many(count: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(count)])


WAYS = ("ddp", "ddp view", "reducer fp32", "reducer bf16", "reducer int8")


def extra_bytes(way: str, steps: int, width: int, layers: int) -> tuple[int, int]:
    """Return what synchronising by `way` adds to the highest resident memory, and by how much that grew in the second half."""
    _arm(nn.Linear(64, 64), way)(torch.randn(4, 64)).sum().backward()  # imports, connections
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    _peak(module, width, _WARMUP)
    alone = _peak(module, width, _WARMUP)
    model = _arm(module, way)
    _peak(model, width, _WARMUP)
    halves = [_peak(model, width, steps // 2) for _ in range(2)]
    return max(halves) - alone, halves[1] - halves[0]


def _arm(module: nn.Module, way: str) -> nn.Module:
    if way.startswith("ddp"):
        return DistributedDataParallel(module, gradient_as_bucket_view=way.endswith("view"))
    gsync.GradReducer(module, codec=way.split()[1])
    return module


def _peak(model: nn.Module, width: int, steps: int) -> int:
    """The highest resident memory of this process in so many steps."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, width)).square().sum().backward()
    return _status("VmHWM")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def _rank(rank: int, world_size: int, port: int, answers: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = work(*args)
    if rank == 0:
        answers.put(result)
    dist.barrier()
    dist.destroy_process_group()


def in_new_processes(world_size: int, work: Callable[..., Any], *args: Any) -> Any:
    """Return what `work(*args)` returns on rank 0 of so many new processes.

    Raises:
        RuntimeError: a process failed.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # otherwise glibc keeps freed gradients, and resident memory tells nothing
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, store.port, answers, work, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"{work.__name__}{args} failed: exit codes {[process.exitcode for process in ranks]}")
    return answers.get()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m gsync.benchmarks.reducer", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["all", "hooks", "memory"], default="all")
    parser.add_argument("--steps", type=int, default=50, help="of each way, for memory")
    parser.add_argument("--way", action="append", choices=WAYS, help="to synchronise, for memory; all if left out")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    if args.what in ("all", "hooks"):
        cost = in_new_processes(1, hook_cost_us)
        print(f"hooks: {cost:.2f} µs for each parameter in autograd's thread (bar {HOOK_BAR_US})")
    if args.what in ("all", "memory"):
        gradients = 4 * args.layers * args.width * (args.width + 1)
        print(f"memory above model and gradients, of {gradients / 2**20:.0f} MiB of gradients, {args.steps} steps:")
        for way in args.way or WAYS:
            extra, grown = in_new_processes(2, extra_bytes, way, args.steps, args.width, args.layers)
            print(f"  {way:14} {extra / gradients:5.2f} of the gradients' bytes, grown by {grown / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

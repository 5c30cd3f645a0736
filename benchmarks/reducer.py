"""What GradReducer costs beside DDP: `gsync bench reducer`, or `python -m gsync.benchmarks.reducer`.

Hooks. Backward passes of 1,000 parameters of one element, with and without the reducer, alternate in one process. The clock, of
processor time, stops when the last gradient is accumulated: what counts is what the hooks, and the buckets they hand over, add on
the way there.

Memory. Each way to synchronise a model of linear layers runs in two processes of its own. The highest resident memory of steps is
read from Linux, and that of steps of the same model before it was to be synchronised is taken off.

Operations and bytes. Those of one backward pass on the gradients' memory: benchmarks/traffic.py.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync import machine

from . import report, traffic
from .progress import Progress
from .timing import percentile

_WARMUP = 3
_WRONG_USE = 2  # exit code


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


WAYS = ("ddp", "ddp view", "ddp fp16 hook", "gsync bf16", "reducer fp32", "reducer bf16", "reducer int8")


def cost_of(way: str, steps: int, width: int, layers: int) -> dict[str, float]:
    """Return what synchronising by `way` adds, on this rank of two.

    Returns:
        memory: to the highest resident memory, over the gradients' bytes.
        growth: by how much that grew in the second half of the steps, in bytes.
        operations: on gradients, in a backward pass.
        bytes_per_element: that these read and write.
    """
    _arm(nn.Linear(64, 64), way)[0](torch.randn(4, 64)).sum().backward()  # imports, connections
    torch.manual_seed(0)
    module = _build(width, layers)
    numel = sum(parameter.numel() for parameter in module.parameters())
    _peak(module, width, _WARMUP)
    alone = _peak(module, width, _WARMUP)
    model, sync = _arm(module, way)
    _peak(model, width, _WARMUP)
    halves = [_peak(model, width, steps // 2) for _ in range(2)]
    counted = traffic.count(
        _backward(model, width), _backward(_build(width, layers), width), 4 * numel, _payload_bytes(sync) if sync else 0, 2
    )
    return {
        "memory": (max(halves) - alone) / (4 * numel),
        "growth": halves[1] - halves[0],
        "operations": counted.operations,
        "bytes_per_element": counted.num_bytes / numel,
    }


def _arm(module: nn.Module, way: str) -> tuple[nn.Module, Any]:
    """The model to train, and what of gsync synchronises it."""
    if way.startswith("reducer"):
        return module, gsync.GradReducer(module, codec=way.split()[1])
    model = DistributedDataParallel(module, gradient_as_bucket_view=way.endswith("view"))
    if way.endswith("hook"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, gsync.register(model, codec=way.split()[1]) if way.startswith("gsync") else None


def _build(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def _backward(model: nn.Module, width: int) -> Callable[[], None]:
    model.zero_grad()
    loss = model(torch.randn(4, width)).square().sum()
    return lambda: loss.backward()


def _payload_bytes(sync: Any) -> int:
    """Of a step. At two ranks each sends, in both exchanges, as many bytes as one payload has."""
    stats = sync.stats()
    return round(stats.wire_bytes / stats.steps)


def _peak(model: nn.Module, width: int, steps: int) -> int:
    """The highest resident memory of this process in so many steps."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    for _ in range(steps):
        _backward(model, width)()
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says on standard error that it starts and stops
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


def print_table(results: dict[str, Any]) -> None:
    """Print one row per way to synchronise."""
    out = report.console()
    mib = 4 * results["layers"] * results["width"] * (results["width"] + 1) / 2**20
    out.print(f"[bold]{results['layers']} linear layers of {results['width']}[/bold], {mib:.0f} MiB of gradients, 2 ranks, cpu\n")
    grid = report.table(["", "memory", "growth MiB", "operations", "B/element"])
    for row in results["rows"]:
        cells = [
            f"{row['memory']:.2f}",
            f"{row['growth'] / 2**20:.1f}",
            f"{row['operations']:.0f}",
            f"{row['bytes_per_element']:.1f}",
        ]
        grid.add_row(f" {row['way']}", *cells)
    out.print(grid)
    out.print("memory: above model and gradients, over the gradients' bytes; growth: of that, in the")
    out.print(f"second half of {results['steps']} steps. operations: on gradients in a backward pass, on a GPU kernel")
    out.print("launches; B/element: read and written by them, without what the library of collectives does.")
    out.print(f"\nhooks: {results['hook_us']:.2f} µs for each parameter in autograd's thread")


def reducer(
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; may be repeated. All if left out.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each way.")] = 50,
    layers: Annotated[int, typer.Option(help="Linear layers.")] = 6,
    width: Annotated[int, typer.Option(help="Their width.")] = 2048,
    json: Annotated[str | None, typer.Option(help="File for all figures.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option(help="Print the table only.")] = False,
) -> None:
    """Measure what GradReducer costs beside DDP: memory, operations on gradients, time of its hooks."""
    try:
        results = _run(way, steps, layers, width, quiet)
        if json:
            report.write_json(results, json)
    except (ValueError, RuntimeError, OSError) as problem:
        print(f"gsync bench reducer: {problem}", file=sys.stderr)
        raise typer.Exit(_WRONG_USE) from None
    print_table(results)


def _run(way: list[str] | None, steps: int, layers: int, width: int, quiet: bool) -> dict[str, Any]:
    for word in way or ():
        if word not in WAYS:
            raise ValueError(f"--way {word!r}: expected one of {', '.join(WAYS)}")
    for name, value, least in (("steps", steps, 2), ("layers", layers, 1), ("width", width, 1)):
        if value < least:
            raise ValueError(f"--{name} {value}: expected at least {least}")
    ways = way or WAYS
    rows = []
    with Progress(not quiet) as progress:
        for idx, name in enumerate(ways):
            progress.phase("measuring", idx, len(ways) + 1, name)
            rows.append({"way": name, **in_new_processes(2, cost_of, name, steps, width, layers)})
        progress.phase("measuring", len(ways), len(ways) + 1, "hooks")
        hook_us = in_new_processes(1, hook_cost_us)
    return {
        "command": shlex.join(["gsync", *sys.argv[1:]]),
        **machine.circumstances(),
        "steps": steps,
        "layers": layers,
        "width": width,
        "hook_us": hook_us,
        "rows": rows,
    }


if __name__ == "__main__":
    typer.run(reducer)

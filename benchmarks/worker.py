"""One rank of the main job: makes the process group, runs the job, and on rank 0 prints and writes the results."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gsync.launch import Place, find_place

from . import page, report
from .launch import uses_cuda
from .measure import Job
from .options import Options
from .progress import Progress

# Exit codes: a rival was wrong, or gsync refused what it was asked for; a file could not be written (on rank 0, which writes).
FAILED, NOT_WRITTEN = 1, 2


def run_rank(options: Options, place: Place, store_is_there: bool, interface: str = "") -> int:
    """Do the job as one rank and return the exit code, the same on all ranks.

    Args:
        options: the same on all ranks.
        place: this rank's.
        store_is_there: another process serves the store; otherwise rank 0 does.
        interface: network interface whose counters are read, "" for none.
    """
    cuda = uses_cuda(options.device)
    device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=options.timeout_s)
    store = dist.TCPStore(
        place.master_address,
        place.master_port,
        is_master=place.rank == 0 and not store_is_there,
        timeout=limit,
        wait_for_workers=False,
    )
    # Objects and flags travel over Gloo, also where gradients go over NCCL.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.PrefixStore("gsync-bench", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=limit,
    )
    written = True
    try:
        with Progress(place.rank == 0 and not options.quiet) as progress:
            results = Job(options, device, interface, progress).run()
        if place.rank == 0:
            results = report.with_circumstances(results, options, place)
            report.print_table(results)
            written = _write(results, options)
        dist.barrier()  # rank 0 holds the store: the others stay until it has finished
    finally:
        dist.destroy_process_group()
    if any("wrong" in row or row.get("expected") is False for row in results["rows"]):
        return FAILED
    return 0 if written else NOT_WRITTEN


def _write(results: dict[str, Any], options: Options) -> bool:
    """Writes the files asked for, whatever becomes of the others; whether all are there."""
    written = True
    files: list[tuple[str | None, Callable[[dict[str, Any], str], object]]] = [
        (options.json, report.write_json),
        (options.report, page.write),
    ]
    for path, write in files:
        if not path:
            continue
        try:
            write(results, path)
        except OSError as error:  # a full disk, a folder that has gone
            print(f"gsync bench: {path} was not written: {error.strerror or error}", file=sys.stderr)
            written = False
    return written


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent's end of the pipe closes
    os.kill(os.getpid(), signal.SIGKILL)  # also a rank that is stuck in C++


def main() -> int:
    """Run as `launch` starts it: options, who serves the store, interface."""
    place = find_place()
    if place is None or len(sys.argv) != 4:
        print("gsync.benchmarks.worker is started by gsync bench; run that", file=sys.stderr)
        return 2
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return run_rank(Options.from_json(sys.argv[1]), place, sys.argv[2] == "parent", sys.argv[3])


if __name__ == "__main__":
    sys.exit(main())

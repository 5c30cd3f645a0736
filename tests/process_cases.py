"""Programs that tests/test_processes.py starts, one process a rank: `python tests/process_cases.py WHAT RANK PORT ...`."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import batch, mlp
from field_cases import DOORS, Door
from reducer_cases import each_engine

import gsync

ENGINES = [engine.values[0] for engine in each_engine() if not engine.marks]


def begin(rank: int, port: int, address: str = "127.0.0.1") -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = dist.TCPStore(address, port, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)


def train(rank: int, door: Door, step: int) -> None:
    door.zero_grad()
    door(batch(rank, step)).square().sum().backward()


def train_until_interrupted(rank: int) -> None:
    """Says when it trains; KeyboardInterrupt, or the error about a rank that has left, ends it as it ends any program."""
    doors = [Door(kind, mlp(), backend) for kind in DOORS for backend in ENGINES]
    step = 0
    while True:
        for door in doors:
            train(rank, door, step)
        step += 1
        if step == 3:
            print("training", flush=True)


def leave(rank: int) -> None:
    """Ends without `close()` and without `destroy_process_group`."""
    doors: list[Any] = [Door(kind, mlp(), backend) for kind in DOORS for backend in ENGINES]
    for step in range(3):
        for door in doors:
            train(rank, door, step)
    doors.append(doors)  # a cycle that only the interpreter's end takes apart
    dist.barrier()
    print("done", flush=True)


def train_until_cut(rank: int, timeout_s: float, kind: str, backend: str) -> None:
    door = Door(kind, mlp(width=3000), backend, timeout_s=timeout_s)
    for step in range(10**6):
        started = time.monotonic()
        try:
            train(rank, door, step)
        except gsync.SyncError as error:
            nan = any(bool(p.grad.isnan().all()) for p in door.module.parameters() if p.grad is not None)
            print(f"{type(error).__name__} {time.monotonic() - started:.2f} {nan} {error}", flush=True)
            return
        if step == 3:
            print("training", flush=True)


def main() -> None:
    what, rank, port, *rest = sys.argv[1:]
    if what == "cut":
        address, timeout_s, kind, backend = rest
        begin(int(rank), int(port), address)
        train_until_cut(int(rank), float(timeout_s), kind, backend)
        return
    begin(int(rank), int(port))
    {"interrupt": train_until_interrupted, "leave": leave}[what](int(rank))


if __name__ == "__main__":
    main()

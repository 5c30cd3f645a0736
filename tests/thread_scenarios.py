"""What runs under ThreadSanitizer (tests/test_thread_sanitizer.py), in processes that load the extension built for it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import thread_sanitizer

thread_sanitizer.load()

import emulated  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ddp_cases import batch, mlp, wrap  # noqa: E402
from emulated_engines import Rank, make_ranks, on_every_rank  # noqa: E402
from engine_setup import rows  # noqa: E402

import gsync  # noqa: E402
from gsync import _native  # noqa: E402

if thread_sanitizer.SWITCH in os.environ:
    emulated.FILE = thread_sanitizer.EMULATION

NUMELS = (3_000, 2_000, 17, 1_000)
BOUNDS = ((0, 1), (1, 3), (3, 4))
STEPS = 3
ROUNDS = 40  # of a scenario without a lock: which of two threads comes first is chance
REPORTED = 66  # exit code
CPU = torch.device("cpu")


@contextmanager
def meanwhile(*calls: Callable[[], Any]) -> Iterator[None]:
    """Each of `calls` again and again, in a thread of its own; errors of an engine that has failed are no matter."""
    done = threading.Event()

    def repeat(call: Callable[[], Any]) -> None:
        while not done.is_set():
            with suppress(gsync.GsyncError):
                call()
            time.sleep(0.0005)  # so that the others get the interpreter

    threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


# ---- two processes, over Gloo ----


def doors(rank: int, world_size: int) -> int:
    """Trains through DDP and GradReducer, every exchange, several slices, while others read; returns the number of steps."""
    native = _native.C
    assert native is not None and native.__file__ == str(thread_sanitizer.EXTENSION)
    steps = 0
    for door, exchange, codec in (
        ("ddp", "all_reduce", "bf16"),
        ("ddp", "scatter_gather", "int8"),
        ("reducer", "scatter_gather", "fp16"),
        ("reducer", "all_reduce", "fp32"),
    ):
        options: dict[str, Any] = {"backend": "native", "codec": codec, "exchange": exchange, "slice_mb": 0.01}
        module = mlp(width=200)
        model, sync = module, None
        if door == "ddp":
            model, sync = wrap(module, ddp={"bucket_cap_mb": 0.02}, **options)
        else:
            sync = gsync.GradReducer(module, bucket_mb=0.02, **options)
        with meanwhile(sync.stats, sync.grad_norm):
            for step in range(STEPS):
                model.zero_grad()
                model(batch(rank, step)).square().sum().backward()
            with sync.trace(os.devnull):
                model(batch(rank, STEPS)).square().sum().backward()
        steps += sync.stats().steps
        dist.barrier()
        sync.close()
    return steps


def lost(rank: int, world_size: int) -> list[str]:
    """In the third step rank 1 raises in the middle of backward; returns the errors of both doors."""
    errors = []
    for door in ("ddp", "reducer"):
        module = mlp(width=200)
        group = dist.new_group()
        options: dict[str, Any] = {"backend": "native", "exchange": "scatter_gather", "process_group": group}
        if door == "ddp":
            model, sync = wrap(module, ddp={"bucket_cap_mb": 0.02}, **options)
        else:
            model, sync = module, gsync.GradReducer(module, bucket_mb=0.02, **options)
        fault = threading.Event()

        def strike(_: torch.Tensor, rank: int = rank, fault: threading.Event = fault) -> None:
            if fault.is_set() and rank == 1:
                raise ZeroDivisionError("planted")

        module[0].weight.register_hook(strike)
        with meanwhile(sync.stats):
            for step in range(3):
                if step == 2:
                    fault.set()
                try:
                    model(batch(rank, step)).square().sum().backward()
                except (gsync.SyncError, ZeroDivisionError) as error:
                    errors.append(type(error).__name__)
            with suppress(gsync.GsyncError):
                sync.close()
    return errors


def two_processes(rank: int, world_size: int) -> tuple[int, list[str]]:
    return doors(rank, world_size), lost(rank, world_size)


# ---- all ranks in one process ----


def engines(device: torch.device | None, exchange: str, ending: str, measure_every: int = 0) -> None:
    """Steps of all ranks with two slices of a bucket and more, read by others meanwhile; then an end while buckets are under way.

    Args:
        device: CPU, or None: the emulated one.
        ending: "close", "abort", "absent" (rank 1 does not come), or a fault that the stand-in for NCCL knows.
    """
    emulation = emulated.load()
    world_size = 4 if exchange == "hierarchical" else 2
    options: dict[str, Any] = {"ranks_per_host": 2} if exchange == "hierarchical" else {}
    limit_s = 1.0 if ending in ("absent", "hang", "error", "async_error") else 10.0
    ranks = make_ranks(
        world_size,
        "fp16" if exchange == "all_reduce" else "int8",
        exchange,
        NUMELS,
        device=device,
        slice_bytes=4_000,
        timeout_s=limit_s,
        measure_every=measure_every,
        **options,
    )
    steps = [[rows(NUMELS, one.rank, step) for one in ranks] for step in range(STEPS)]

    def look(one: Rank) -> None:
        one.engine.stats()
        one.engine.sum_of_squares()
        one.engine.found_nonfinite()

    def trace(one: Rank) -> None:
        one.engine.start_trace(50)
        one.engine.reset_stats()
        one.engine.take_trace()

    def step(one: Rank, number: int) -> None:  # each rank in a thread of its own, as none may wait for another's
        submitted = one.submit(steps[number][one.rank], BOUNDS)
        is_last = number == STEPS - 1
        if is_last and ending == "close":
            one.engine.close()
        if is_last and ending == "abort":
            one.engine.abort("planted")
        for _, future in submitted:
            with suppress(*([Exception] if is_last else [])):
                future.wait()

    calls = [lambda one=one, call=call: call(one) for one in ranks[:2] for call in (look, trace)]
    with meanwhile(*calls):
        for number in range(STEPS):
            if number == STEPS - 1 and ending not in ("close", "abort", "absent"):
                emulation.plant_nccl_fault(1, ending, 0)
            present = ranks[:1] if number == STEPS - 1 and ending == "absent" else ranks
            for error in on_every_rank(present, lambda one, number=number: step(one, number)):
                if error is not None:
                    raise error
        on_every_rank(ranks, lambda one: one.engine.close())
    on_every_rank(ranks, lambda one: one.transport.abort())


ENGINES: dict[str, tuple[Any, ...]] = {
    "cpu, closed": (CPU, "scatter_gather", "close"),
    "cpu, aborted": (CPU, "scatter_gather", "abort"),
    "cpu, a rank does not come": (CPU, "scatter_gather", "absent"),
    "cpu, all_reduce": (CPU, "all_reduce", "close", 1),
    "cpu, hosts": (CPU, "hierarchical", "close"),
    "device, closed": (None, "scatter_gather", "close"),
    "device, aborted": (None, "all_reduce", "abort", 1),
    "device, error": (None, "scatter_gather", "error"),
    "device, error beside the calls": (None, "all_reduce", "async_error"),
    "device, hang": (None, "scatter_gather", "hang"),
    "device, hosts": (None, "hierarchical", "close"),
}


def all_engines(_rank: int, _world_size: int, names: list[str]) -> list[str]:
    for name in names:
        engines(*ENGINES[name])
    return names


# ---- one lock less ----


def without_lock(rank: int, _world_size: int, places: list[tuple[str, int, str]]) -> None:
    """Runs a scenario again and again without the lock at the rank's place (file, line, scenario); ends with the first report.

    Without a lock anything may happen, so the process ends at once, wherever its threads are.
    """
    file, line, name = places[rank]
    threading.Thread(target=end_with_a_report, daemon=True).start()
    ctypes.CDLL(str(thread_sanitizer.EXTENSION)).gsync_leave_out_lock(file.encode(), line)
    for _ in range(ROUNDS):
        with suppress(gsync.GsyncError):
            engines(*ENGINES[name])


def end_with_a_report() -> None:
    while not thread_sanitizer.reports_of(pid=os.getpid()):
        time.sleep(0.05)
    os._exit(REPORTED)

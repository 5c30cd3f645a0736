"""Real processes as ranks, for tests.

`run_on_ranks(fn, world_size, timeout_s)` runs `fn(rank, world_size, *args)` in that many processes which share a process group.
Starting torch costs seconds, so processes are kept and used again (each call gets a new process group). A call that fails or
passes its limit loses its processes: they are killed by their own id, never by name. Workers watch a pipe from this process, so
none outlives it, however it ends.

`fn` must be a function at the top level of a module. Values and arguments must be picklable.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

_START_S = 120.0  # for a process to import torch, on a machine that is busy
_TESTS = os.path.dirname(os.path.abspath(__file__))


@dataclass
class Outcome:
    """How one rank ended. `error` is its traceback, `exit_code` is None for a process that is kept for the next call."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    output: str = ""


class RanksError(AssertionError):
    """At least one rank failed; the message has every rank's traceback."""


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    args: Sequence[Any] = (),
    group_timeout_s: float = 30.0,
    pool: str = "",
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on each rank and returns the values in rank order.

    Args:
        fn: function at the top level of a module.
        world_size: number of processes.
        timeout_s: hard limit for the call in seconds; then the ranks' stacks are printed and the processes killed.
        backend: backend of the process group made before `fn`, or None for no group.
        args: more arguments for `fn`.
        group_timeout_s: time-out of the process group in seconds.
        pool: which processes are used again. Calls that change the process for good name a pool of their own.

    Raises:
        RanksError: a rank raised, died, or was not done in time.
    """
    outcomes = _run(_take(world_size, pool), fn, timeout_s, backend, args, group_timeout_s, keep=True)
    if any(outcome.error is not None for outcome in outcomes):
        parts = [f"{fn.__module__}.{fn.__qualname__} failed on {world_size} ranks"]
        for rank, outcome in enumerate(outcomes):
            text = outcome.error or "finished"
            parts.append(f"--- rank {rank}: {text.rstrip()}")
            if outcome.output.strip():
                parts.append(f"--- rank {rank} printed:\n{outcome.output[-4000:].rstrip()}")
        raise RanksError("\n".join(parts))
    return [outcome.value for outcome in outcomes]


def watch_ranks(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    args: Sequence[Any] = (),
    group_timeout_s: float = 30.0,
) -> list[Outcome]:
    """Like `run_on_ranks` for ranks that are meant to fail: new processes, which end by themselves after `fn`.

    Never raises for a rank's error. `exit_code` is negative where a signal, or this harness after `timeout_s`, ended the process.
    """
    return _run([_Worker("") for _ in range(world_size)], fn, timeout_s, backend, args, group_timeout_s, keep=False)


class _Worker:
    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (lives as long as the worker)
        self.connection, theirs = Pipe()
        self.ready = False
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )  # stdin: the pipe whose end the worker watches
        theirs.close()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when the process has imported torch: how long that takes differs more than some tests' time-outs."""
        if not self.ready and self.connection.poll(timeout_s):
            with contextlib.suppress(EOFError):  # it died: the call will tell
                self.connection.recv_bytes()
            self.ready = True

    def printed(self) -> str:
        self.log.seek(0)
        text = self.log.read()
        self.log.seek(0)
        self.log.truncate()
        return text

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        self.log.close()


_idle: list[_Worker] = []  # of all pools
_rendezvous: Any = None  # the TCPStore server of this process
_calls = 0


def _take(count: int, pool: str) -> list[_Worker]:
    alive = [worker for worker in _idle if worker.process.poll() is None]
    taken = [worker for worker in alive if worker.pool == pool][:count]
    _idle[:] = [worker for worker in alive if worker not in taken]
    return taken + [_Worker(pool) for _ in range(count - len(taken))]


@atexit.register
def close_pool() -> None:
    """Ends the processes that are kept for later calls."""
    while _idle:
        _idle.pop().kill()


def _run(
    workers: list[_Worker],
    fn: Callable[..., Any],
    timeout_s: float,
    backend: str | None,
    args: Sequence[Any],
    group_timeout_s: float,
    keep: bool,
) -> list[Outcome]:
    global _rendezvous, _calls
    import torch.distributed as dist

    if _rendezvous is None:
        _rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _calls += 1
    module = sys.modules[fn.__module__]
    place = os.path.dirname(os.path.abspath(module.__file__ or ""))
    outcomes = [Outcome() for _ in workers]
    for worker in workers:
        worker.wait_until_ready(_START_S)
    started = time.monotonic()
    try:
        for rank, worker in enumerate(workers):
            worker.connection.send_bytes(
                pickle.dumps(
                    {
                        "module": fn.__module__,
                        "place": place,
                        "name": fn.__qualname__,
                        "rank": rank,
                        "world_size": len(workers),
                        "args": tuple(args),
                        "backend": backend,
                        "port": _rendezvous.port,
                        "prefix": f"call{_calls}",
                        "group_timeout_s": group_timeout_s,
                        "keep": keep,
                    }
                )
            )
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        while waiting:
            ready = wait(list(waiting), max(0.0, started + timeout_s - time.monotonic()))
            if not ready:
                _tell_stacks(workers, waiting.values())
                for rank in waiting.values():
                    outcomes[rank].error = f"not finished after {timeout_s} s"
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcomes[rank].value, outcomes[rank].error = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    outcomes[rank].error = "the process ended without an answer"
                outcomes[rank].seconds = time.monotonic() - started
        if not keep:
            for rank, worker in enumerate(workers):
                try:
                    left = max(0.5, started + timeout_s - time.monotonic())
                    outcomes[rank].exit_code = worker.process.wait(left)
                except subprocess.TimeoutExpired:
                    _tell_stacks(workers, [rank])
                    outcomes[rank].exit_code = -signal.SIGKILL
                    outcomes[rank].error = f"{outcomes[rank].error or 'answered'}, but not ended after {timeout_s} s"
    finally:
        good = keep and not any(outcome.error for outcome in outcomes)
        for rank, worker in enumerate(workers):
            outcomes[rank].output = worker.printed()
            if good and worker.process.poll() is None:
                _idle.append(worker)
            else:
                worker.kill()
    return outcomes


def _tell_stacks(workers: list[_Worker], ranks: Any) -> None:
    """Lets hung ranks print where they are."""
    for rank in list(ranks):
        if workers[rank].process.poll() is None:
            workers[rank].process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _work(connection: Connection) -> None:
    """Life of a worker: calls come through `connection` until it closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there now is not looked through after every call
    connection.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        error = None
        answer = b""
        try:
            if call["place"] not in sys.path:
                sys.path.insert(0, call["place"])
            os.environ.update(RANK=str(call["rank"]), WORLD_SIZE=str(call["world_size"]), LOCAL_RANK=str(call["rank"]))
            torch.manual_seed(0)
            fn = getattr(importlib.import_module(call["module"]), call["name"])
            if call["backend"] is not None:
                limit = timedelta(seconds=call["group_timeout_s"])
                store = dist.TCPStore("127.0.0.1", call["port"], is_master=False, timeout=limit)
                dist.init_process_group(
                    call["backend"],
                    store=dist.PrefixStore(call["prefix"], store),
                    rank=call["rank"],
                    world_size=call["world_size"],
                    timeout=limit,
                )
            # Plain pickle: multiprocessing's own would send tensors as handles of shared memory.
            answer = pickle.dumps((fn(call["rank"], call["world_size"], *call["args"]), None))
        except BaseException:
            error = traceback.format_exc()
            answer = pickle.dumps((None, error))
        if call["keep"] and error is None:
            gc.collect()  # models lie in cycles with their engines, whose threads and connections the next calls would pay for
            if dist.is_initialized():
                dist.destroy_process_group()
        _keep_coverage()
        connection.send_bytes(answer)
        if not call["keep"]:
            return


def _keep_coverage() -> None:
    """Writes what gcov has counted in a build for tests/coverage_report.py; workers are killed before they could."""
    if os.environ.get("GSYNC_COVERAGE"):
        from gsync import _native

        if _native.C is not None:
            library = ctypes.CDLL(_native.C.__file__)
            library.__gcov_dump()
            library.__gcov_reset()


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the parent's end closes; not the stdin object, whose lock would abort our exit
    os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, _TESTS)
    _work(Connection(int(sys.argv[1])))

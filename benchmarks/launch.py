"""Starts the ranks of the main job on this machine, in network namespaces where asked, and sees to it that all of them end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import torch
import torch.distributed as dist

from . import network
from .options import Options

_PORT = 29500  # in a namespace of its own no other program has it
_GRACE_S = 10.0  # after one rank has failed the others may tell their side
_POLL_S = 0.05
_TAIL = 4000  # characters of a failed rank's output that are shown


class StopRequestError(Exception):
    """A signal asked for the end."""


def run_locally(options: Options) -> int:
    """Start hosts x ranks_per_host ranks, wait for them and return the exit code: 0, or that of the first rank that failed.

    Raises:
        network.NetworkError: namespaces cannot be had here.
        ValueError: more ranks than GPUs.
    """
    num_hosts = options.hosts or 1
    per_host = options.ranks_per_host or default_ranks(options, num_hosts)
    if uses_cuda(options.device) and num_hosts * per_host > torch.cuda.device_count():
        raise ValueError(
            f"{num_hosts * per_host} ranks need as many GPUs, this machine has {torch.cuda.device_count()}; "
            "take --device cpu or fewer ranks"
        )
    with _signals(), contextlib.ExitStack() as stack:
        place: network.Network | None = None
        if num_hosts > 1:
            place = stack.enter_context(network.Network(num_hosts, options.rate))
            address, port = place.address(0), _PORT
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            address, port = "127.0.0.1", store.port
        ranks = []
        if not options.quiet and sys.stderr.isatty():  # the first rank's bar takes this line, once torch is there
            print(f"starting {num_hosts * per_host} ranks", end="\r", file=sys.stderr, flush=True)
        for rank in range(num_hosts * per_host):
            ranks.append(_Rank(options, place, rank, num_hosts, per_host, address, port))
            stack.callback(ranks[-1].kill)
        return _wait(ranks)


def default_ranks(options: Options, num_hosts: int) -> int:
    """Return the ranks of a host where no number was given."""
    if num_hosts > 1:
        return 1
    return max(1, torch.cuda.device_count()) if uses_cuda(options.device) else 2


def uses_cuda(device: str) -> bool:
    """Return whether ranks run on GPUs."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def store_is_there() -> bool:
    """Return whether the launcher serves the ranks' store (torchrun does), so that rank 0 must not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class _Rank:
    """One process. It ends itself when its standard input, a pipe from here, closes: none outlives this program."""

    def __init__(
        self, options: Options, place: network.Network | None, rank: int, num_hosts: int, per_host: int, address: str, port: int
    ) -> None:
        self.rank = rank
        interface = network.INTERFACE if place is not None else ""
        command = [sys.executable, "-m", "gsync.benchmarks.worker", options.to_json(), "rank 0" if place else "parent", interface]
        environment = dict(
            os.environ,
            RANK=str(rank),
            WORLD_SIZE=str(num_hosts * per_host),
            LOCAL_RANK=str(rank % per_host),
            LOCAL_WORLD_SIZE=str(per_host),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            OMP_NUM_THREADS=str(options.threads),
        )
        environment.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks to standard error
        if place is not None:
            command = place.command(rank // per_host, command)
            environment.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
            environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warns that addresses of namespaces have no names
        elif sys.platform.startswith("linux"):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Rank 0 speaks for all; what the others say is shown if they fail.
        self.log: IO[bytes] | None = None if rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the rank)
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def printed(self) -> str:
        if self.log is None:
            return ""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-_TAIL:].strip()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.log is not None:
            self.log.close()


def _wait(ranks: list[_Rank]) -> int:
    """Waits for all ranks, after a failure only for so long."""
    failed: _Rank | None = None
    deadline = float("inf")
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if failed is None:
            failed = next((rank for rank, code in zip(ranks, codes, strict=True) if code), None)
            if failed is not None:
                deadline = time.monotonic() + _GRACE_S
        if all(code is not None for code in codes) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if failed is None:
        return 0
    code = failed.process.returncode
    if code in (1, 2) and all(other == code for other in codes):
        return code  # all ranks agree, and rank 0 has said why
    print(f"gsync bench: rank {failed.rank} ended with exit code {code}", file=sys.stderr)
    said = failed.printed()
    if said:
        print(f"--- rank {failed.rank} printed last:\n{said}", file=sys.stderr)
    return code if code > 0 else 128 - code  # a signal's number is negative here; shells say 128 + number


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Makes the end by SIGTERM or SIGHUP an orderly one, as that by Ctrl-C is."""

    def stop(number: int, _: object) -> None:
        raise StopRequestError(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

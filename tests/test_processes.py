"""Processes that end, fork, are interrupted or cut off, beside a model that gsync synchronises."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import assert_same_on_all_ranks, batch, gradients, mlp
from field_cases import DOORS, Door, engines
from gsync.benchmarks import network
from ranks import run_on_ranks, watch_ranks
from reducer_cases import alone, assert_gradients

import gsync

PROGRAM = Path(__file__).with_name("process_cases.py")
LIMIT_S = 60.0  # for processes that have been told to end; they take a second or two
CUT_TIMEOUT_S, MARGIN_S = 5.0, 5.0
doors = pytest.mark.parametrize("kind", DOORS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def two_ranks(what: str, port: int, *rest: str, wrap: Any = None, interface: str = "lo") -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes in a process group of their own; what still runs at the end is killed, by its own id."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, "PYTHONUNBUFFERED": "1"}
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            command = [sys.executable, str(PROGRAM), what, str(rank), str(port), *rest]
            leader = started[0].pid if started else 0
            started.append(
                subprocess.Popen(
                    command if wrap is None else wrap(rank, command),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=lambda leader=leader: os.setpgid(0, leader),
                )
            )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    seen = []
    for text in process.stdout:  # ends with the process, which pytest's own limit kills at the latest
        seen.append(text)
        if text.strip() == line:
            return
    raise AssertionError("".join(seen))


def ends_of(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    deadline = time.monotonic() + LIMIT_S
    found = []
    for process in started:
        output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        found.append((process.returncode, output))
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interrupt_of_the_process_group_ends_all_ranks() -> None:
    """Ctrl-C, through both doors and engines: no rank hangs, aborts or crashes."""
    with two_ranks("interrupt", free_port()) as ranks:
        for process in ranks:
            wait_for_line(process, "training")
        os.killpg(ranks[0].pid, signal.SIGINT)
        told = time.monotonic()
        found = ends_of(ranks)
        assert time.monotonic() - told < LIMIT_S / 2
    for code, output in found:
        assert code in (1, -signal.SIGINT), (code, output)
        assert "KeyboardInterrupt" in output or "SyncError" in output or "closed by peer" in output, output
    assert any("KeyboardInterrupt" in output for _, output in found)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_process_may_end_without_closing_anything() -> None:
    """Neither close() nor destroy_process_group: the process ends by itself, soon, with 0."""
    with two_ranks("leave", free_port()) as ranks:
        for process in ranks:
            wait_for_line(process, "done")
        told = time.monotonic()
        assert [code for code, _ in ends_of(ranks)] == [0, 0]
        assert time.monotonic() - told < LIMIT_S / 2


def _refused() -> str:
    reason = network.why_not()
    if reason:
        return reason
    try:
        with network.Network(2, None):
            return ""
    except network.NetworkError as error:
        return f"the kernel refuses network namespaces: {error}"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(bool(reason := _refused()), reason=reason or "they can be had")
@doors
def test_a_network_that_is_cut_is_an_error_in_time_on_both_sides(kind: str) -> None:
    """Between two namespaces, in the middle of training: no side can hear of the other's end."""
    with network.Network(2, None) as net:
        rest = (net.address(0), str(CUT_TIMEOUT_S), kind, "auto")
        with two_ranks("cut", 29501, *rest, wrap=net.command, interface=network.INTERFACE) as ranks:
            for process in ranks:
                wait_for_line(process, "training")
            subprocess.run(["ip", "-n", net.switch, "link", "set", "port1", "down"], check=True, timeout=10)
            for _, output in ends_of(ranks):
                name, seconds, nan = output.split("\n")[0].split(" ")[:3]
                assert name in ("SyncTimeoutError", "SyncError"), output
                assert float(seconds) < CUT_TIMEOUT_S + MARGIN_S and nan == "True", output


def _end_of_child(pid: int, limit_s: float = 20.0) -> int | str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"not ended after {limit_s} s"


def _forks(rank: int, world_size: int, kind: str, backend: str) -> tuple[dict[str, int | str], int]:
    """Children that end at once, take everything down first, or try to train; then the parent trains on."""
    door = Door(kind, mlp(), backend)
    for step in range(2):
        door(batch(rank, step)).sum().backward()
    ends = {}
    for what in ("ends", "takes down", "trains", "resets"):
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                if what == "takes down":
                    door.close()
                    del door
                    code = 0
                elif what == "ends":
                    code = 0
                else:
                    if what == "resets":
                        door.sync.reset()
                    door.zero_grad()
                    door(batch(rank, 2)).sum().backward()
            except gsync.GsyncError as error:
                code = 3 if f"this process was forked from rank {rank}" in str(error) else 4
            except BaseException:
                code = 5
            os._exit(code)
        ends[what] = _end_of_child(pid)
    for step in range(2):
        door.zero_grad()
        door(batch(rank, step)).sum().backward()
        assert_same_on_all_ranks(gradients(door.module))
    return ends, door.sync.stats().steps


@engines
@doors
def test_a_forked_process_ends_and_is_told_that_it_cannot_train(kind: str, backend: str) -> None:
    for ends, steps in run_on_ranks(_forks, 2, args=(kind, backend), pool="forks"):
        assert ends == {"ends": 0, "takes down": 0, "trains": 3, "resets": 3} and steps == 4


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, idx: int) -> torch.Tensor:
        return batch(self.rank, idx)[0]


def _loads(rank: int, world_size: int, context: str) -> None:
    for kind in DOORS:
        door = Door(kind, mlp(), "auto", codec="fp32")
        for _ in range(2):  # workers are started again for each pass over the data, beside a model that has been synchronised
            loader = torch.utils.data.DataLoader(Rows(rank), batch_size=2, num_workers=2, multiprocessing_context=context)
            for number, x in enumerate(loader):
                door.zero_grad()
                door(x).square().sum().backward()
                rows = [torch.stack([batch(r, 2 * number + i)[0] for i in range(2)]) for r in range(world_size)]
                assert_gradients(door.module, alone(door.module, world_size, lambda m, r: m(rows[r]).square().sum()), 1e-5)  # noqa: B023
        door.close()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_beside_a_model(context: str) -> None:
    run_on_ranks(_loads, 2, timeout_s=150, args=(context,), pool="loaders")


def _slow(rank: int, world_size: int, kind: str) -> tuple[int | None, float]:
    door = Door(kind, mlp(), "auto", codec="fp32", timeout_s=20.0)
    for step in range(6):
        if step == 3:
            door.sync.reset_stats()
        if rank == 1:
            time.sleep(0.2)
        door.zero_grad()
        door(batch(rank, step)).square().sum().backward()
        expected = alone(door.module, world_size, lambda m, r, step=step: m(batch(r, step)).square().sum())
        assert_gradients(door.module, expected, 1e-5)
    door.sync.stats()
    dist.barrier()
    time.sleep(1.1)  # ranks ask each other once a second
    stats = door.sync.stats()
    dist.barrier()
    return stats.slowest_rank, stats.arrival_spread_ms or 0.0


@doors
def test_one_slow_rank_is_no_error_and_is_named(kind: str) -> None:
    for outcome in watch_ranks(_slow, 2, 60, args=(kind,)):
        assert outcome.error is None, outcome.error
        slowest, spread_ms = outcome.value
        assert slowest == 1 and spread_ms > 100, outcome.value

"""Hosts in network namespaces: that links have the rate asked for, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gsync.benchmarks import network

SLOW = ["--hosts", "2", "--rate", "100mbit"]
SMALL = ["--model", "mlp", "--layers", "2", "--width", "512", "--warmup", "2", "--rival", "fp16 hook", "--quiet"]

_WHY_NOT = network.why_not()


def _refused_by_the_kernel() -> str:
    if _WHY_NOT:
        return _WHY_NOT
    try:
        with network.Network(2, "1gbit"):
            return ""
    except network.NetworkError as error:
        return f"the kernel refuses network namespaces: {error}"


needs_namespaces = pytest.mark.skipif(bool(reason := _refused_by_the_kernel()), reason=reason or "they can be had")


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^(gsync-\S+)", listed, re.MULTILINE))


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1e9), ("100mbit", 1e8), ("2.5GBit", 2.5e9), ("64kbit", 64e3), ("9bit", 9)])
def test_rates_are_read_as_tc_reads_them(text: str, rate: float) -> None:
    assert network.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "1", "fast", "-1gbit", "0gbit", "1gbps", "1 gbit/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        network.parse_rate(text)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    with pytest.raises(network.NetworkError, match="need root"), network.Network(2, None):
        pass
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else f"/usr/sbin/{tool}")
    with pytest.raises(network.NetworkError, match=r"tc of iproute2 not found"), network.Network(2, None):
        pass


@needs_namespaces
def test_a_link_passes_what_its_rate_allows() -> None:
    receive = (
        "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); c = s.accept()[0]\n"
        "while c.recv(1 << 20): pass"
    )
    send = (
        "import socket, sys, time; s = socket.create_connection((sys.argv[1], 5000)); t = time.monotonic(); "
        "s.sendall(bytes(5_000_000)); s.shutdown(1); s.recv(1); print(time.monotonic() - t)"
    )
    before = namespaces()
    with network.Network(2, "100mbit") as net:
        assert len(namespaces() - before) == 3  # two hosts and the bridge
        server = subprocess.Popen(net.command(1, [sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        command = net.command(0, [sys.executable, "-c", send, net.address(1)])
        client = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        server.communicate(timeout=10)
    assert 0.38 < float(client.stdout) < 2.0  # 0.4 s at the full rate, less the bucket's first burst
    assert not namespaces() - before


@needs_namespaces
def test_programs_left_in_a_namespace_end_with_it() -> None:
    with network.Network(2, None) as net:
        left = subprocess.Popen(net.command(0, ["sleep", "600"]))
        time.sleep(0.3)
    assert left.wait(timeout=10) == -signal.SIGKILL


@needs_namespaces
def test_the_main_job_on_a_slow_network(tmp_path: Path) -> None:
    path, before = tmp_path / "results.json", namespaces()
    done = subprocess.run([sys.executable, "-m", "gsync.benchmarks.ddp", *SMALL, *SLOW, "--steps", "4", "--json", str(path)],
                          capture_output=True, text=True, timeout=150, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not namespaces() - before
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    for row in rows.values():  # headers and acknowledgements add a few percent to what the formula says
        assert 1.0 < row["link_bytes"] / row["wire_bytes"] < 1.15
    # 2.1 MB at 100 Mbit/s are 0.17 s
    assert rows["stock"]["step_ms"]["median"] > 160
    assert rows["fp16 hook"]["step_ratio"]["median"] < 0.9


@needs_namespaces
def test_links_carry_the_share_of_bytes_that_codecs_promise(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    chosen = ["--rival", "gsync", *(word for codec in ("bf16", "int8", "int4") for word in ("--codec", codec))]
    command = [sys.executable, "-m", "gsync.benchmarks.ddp", *SMALL[:-3], *chosen, "--exchange", "scatter_gather", "--quiet",
               "--hosts", "2", "--steps", "4", "--json", str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    # 1 + 4/256 and 0.5 + 2/64 bytes for each 4, and 1,024 of 525,312 elements are exempt, as bf16; then headers, the same share.
    for name, share in (
        ("stock", 1.0),
        ("bf16 scatter_gather", 0.5),
        ("int8 scatter_gather", 0.255),
        ("int4 scatter_gather", 0.134),
    ):
        assert "wrong" not in rows[name], rows[name]
        assert rows[name]["link_ratio"] == pytest.approx(share, rel=0.05)
    assert rows["int8 scatter_gather"]["link_ratio"] <= 0.27
    assert rows["int4 scatter_gather"]["link_ratio"] <= 0.16


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_namespaces_go_however_a_run_ends(how: signal.Signals) -> None:
    before = namespaces()
    command = [sys.executable, "-m", "gsync.benchmarks.ddp", *SMALL, *SLOW, "--steps", "100000"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        mine = wait_until(lambda: {name for name in namespaces() - before if f"-{run.pid}-" in name}, 60)
        assert mine
        time.sleep(2.0)
        os.kill(run.pid, how)
        run.wait(timeout=30)
        assert wait_until(lambda: not mine & namespaces(), 20)
    finally:
        run.kill()
        run.wait()


def wait_until(condition, limit_s: float):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value

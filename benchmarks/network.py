"""Hosts that are network namespaces, joined by links of a given rate: a slow network on one machine.

Each host is a namespace with one interface, eth0, whose other end is a port of a bridge; the bridge lies in a namespace too, so
that nothing appears in the machine's own network. tc's token bucket filter limits both ends: eth0 what the host sends, the port
what it receives. Names are unique to a run. A guard process takes everything down when the pipe from its parent closes, which
happens however the parent ends, by Ctrl-C, an error or a kill.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

INTERFACE = "eth0"
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MIN_BURST = 64 * 1024  # below one offloaded TCP packet tbf would cut every packet up
_BURST_S = 1e-3
_QUEUE = "50ms"  # longest time in the queue before packets are dropped
_MAX_HOSTS = 250

# Reads nothing, and goes on when the other end of its standard input is closed. Signals meant for the terminal pass it by.
_GUARD = """
trap '' INT TERM HUP
read _
for name in "$@"; do
  for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
  ip netns del "$name" 2>/dev/null
done
exit 0
"""


class NetworkError(Exception):
    """Namespaces cannot be had here; the message says what is missing."""


def parse_rate(text: str) -> float:
    """Return bits per second for a rate in tc's notation, such as "1gbit" or "100mbit".

    Raises:
        ValueError: the text is no such rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.strip().lower())
    rate = float(match.group(1)) * _UNITS[match.group(2)] if match else 0.0
    if rate <= 0:
        raise ValueError(f"--rate {text}: expected a number above 0 with bit, kbit, mbit or gbit, for example 1gbit")
    return rate


def why_not() -> str:
    """Return why network namespaces cannot be had here, or "" if nothing speaks against them."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root (run it under sudo)"
    return ""


def sent_bytes(interface: str) -> int:
    """Return the bytes that `interface` of this namespace has sent, headers included.

    Raises:
        NetworkError: there is no such interface.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise NetworkError(f"no interface {interface} in this namespace")


class Network:
    """Namespaces for `num_hosts` hosts, there from `with` on and gone after it.

    Args:
        num_hosts: 2 to 250.
        rate: of every link, each way, in tc's notation; None for no limit.

    Raises:
        NetworkError: at `with`: no root, no iproute2, or the kernel refuses; nothing is left behind.
        ValueError: a number or the rate is wrong.
    """

    def __init__(self, num_hosts: int, rate: str | None) -> None:
        if not 2 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"--hosts {num_hosts}: expected 2 to {_MAX_HOSTS}")
        self.rate = None if rate is None else parse_rate(rate)
        token = f"gsync-{os.getpid()}-{secrets.token_hex(2)}"
        self.switch = f"{token}-switch"
        self.hosts = [f"{token}-host{idx}" for idx in range(num_hosts)]
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        reason = why_not()
        if reason:
            raise NetworkError(reason)
        names = [*self.hosts, self.switch]
        # The guard comes first: there is no moment at which something is there that nobody takes down.
        self._guard = subprocess.Popen(["sh", "-c", _GUARD, "guard", *names], stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the namespaces and remove them."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host. Other runs may have the same: their networks do not touch."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """Return `command` as it is run on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    def _build(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        for idx, host in enumerate(self.hosts):
            port = f"port{idx}"
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("link", "add", INTERFACE, "netns", host, "type", "veth", "peer", "name", port, "netns", self.switch)
            _ip("-n", self.switch, "link", "set", port, "master", "bridge")
            _ip("-n", self.switch, "link", "set", port, "up")
            _ip("-n", host, "address", "add", f"{self.address(idx)}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", INTERFACE, "up")
            if self.rate is not None:
                self._limit(host, INTERFACE)
                self._limit(self.switch, port)

    def _limit(self, namespace: str, interface: str) -> None:
        assert self.rate is not None
        burst = max(_MIN_BURST, int(self.rate / 8 * _BURST_S))
        _run(
            "tc",
            "-n",
            namespace,
            "qdisc",
            "add",
            "dev",
            interface,
            "root",
            "tbf",
            "rate",
            f"{int(self.rate)}bit",
            "burst",
            str(burst),
            "latency",
            _QUEUE,
        )


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")

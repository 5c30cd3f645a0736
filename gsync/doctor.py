"""What gsync finds on this machine, and what it would use: versions, build, devices, NCCL, Triton.

gsync doctor, python -m gsync.doctor           one report
torchrun ... -m gsync.doctor, srun ... the same   one line per rank, and which rank is not like the others; if all are alike, ten
                                                  seconds of measurements between them and what to try (gsync/advice.py)
--measure      also alone, between two ranks started for it on this machine
--no-measure   never
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _native, backends, ops
from .launch import Place, find_place
from .machine import circumstances, nccl, package_version

_WAIT_S = 60.0  # for ranks that start later
_MEASURE_LIMIT_S = 120.0
# What has to be equal on all ranks, since either the bytes on the wire or the order of collectives depend on it.
SAME = ("gsync", "torch", "build", "cuda", "nccl", "triton", "device", "backend", "trial")


def build() -> dict[str, Any]:
    """Return how gsync was built and whether its extension is loaded."""
    info = _native.build_info()
    kind = info.KIND if info is not None else "python"
    return {
        "kind": kind,
        "loaded": _native.C is not None,
        "for_torch": info.TORCH if info is not None else None,
        "for_cuda": info.TORCH_CUDA if info is not None else None,
        "architectures": info.ARCHS if info is not None else "",
        "reason": _native.MISSING or (info.REASON if info is not None else ""),
    }


def triton() -> tuple[bool, str]:
    """Return whether Triton kernels can run on a GPU here, and why not."""
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed"
    if not torch.cuda.is_available():
        return False, "no GPU"
    return True, ""


def choices() -> list[dict[str, str]]:
    """Return for each kind of device here what `auto` uses, why, and what comes of trying it."""
    found = [_choice(torch.device("cpu"), "process_group", "a private Gloo group; with other CPU process groups their own")]
    if torch.cuda.is_available():
        version, where = nccl()
        if _native.has_cuda() and version:
            transport = "nccl"
            reason = (
                "own communicator, if the group spans all ranks and no module communicates in the backward pass "
                "(SyncBatchNorm, tensor parallelism); otherwise process_group"
            )
        else:
            transport = "process_group"
            reason = f"no NCCL of its own: {where}" if _native.has_cuda() else "the extension has no NCCL transport"
        found.append(_choice(torch.device("cuda", torch.cuda.current_device()), transport, reason))
    return found


def _choice(device: torch.device, transport: str, transport_reason: str) -> dict[str, str]:
    backend = backends.resolve("auto", device)
    kernels = "CUDA kernels" if device.type == "cuda" else "kernels for the CPU"
    missing = _native.MISSING or f"the extension has no {kernels}"
    reason = {
        "native": f"the extension has {kernels}",
        "triton": missing,
        "reference": f"{missing}; Triton is not installed" if device.type == "cuda" else missing,
    }[backend]
    return {
        "device": device.type,
        "backend": backend,
        "backend_reason": reason,
        "transport": transport,
        "transport_reason": transport_reason,
        "trial": _trial(device, backend),
    }


def _trial(device: torch.device, backend: str) -> str:
    """Packs and unpacks a few gradients with `backend`: "works", or what goes wrong."""
    gradients = [torch.linspace(-3.0, 3.0, numel, device=device) for numel in (1, 255, 4097)]
    try:
        payload = ops.pack(gradients, codec="bf16", scale=0.5, backend=backend)
        if not torch.equal(payload, ops.pack(gradients, codec="bf16", scale=0.5, backend="reference")):
            return "writes other bytes than the reference: please report"
        ops.unpack(payload, gradients, codec="bf16", backend=backend)
    except Exception as error:  # a doctor reports, whatever it is
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())}"
    return "works"


def facts() -> dict[str, Any]:
    """Return everything the report shows."""
    version, where = nccl()
    can_triton, why_not = triton()
    return {
        **circumstances(),
        "build": build(),
        "nccl": {"version": version, "from": where},
        "triton": {"version": package_version("triton"), "usable": can_triton, "reason": why_not},
        "choices": choices(),
    }


def report(found: dict[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    numbers, hardware, made = found["versions"], found["machine"], found["build"]
    lines = [
        f"gsync      {numbers['gsync']}" + (f", commit {found['commit'][:12]}{found['commit'][40:]}" if found["commit"] else "")
    ]
    lines.append(
        f"torch      {numbers['torch']}, CUDA {numbers['cuda'] or 'none'}; Python {numbers['python']}; {numbers['system']}"
    )
    state = "loaded" if made["loaded"] else "not loaded"
    lines.append(f"build      {made['kind']}, {state}" + (f": {made['reason']}" if made["reason"] else ""))
    if made["architectures"]:
        lines.append(f"           GPU architectures {made['architectures']}")
    lines.append(
        f"machine    {hardware['host']}: {hardware['processor']}, {hardware['cores']} cores, {hardware['instructions']}, "
        f"{hardware['memory_gib']:.0f} GiB"
    )
    gpus = [
        f"GPU {gpu['index']}: {gpu['name']}, {gpu['memory_gib']:.0f} GiB, sm_{gpu['architecture']}" for gpu in hardware["gpus"]
    ]
    for idx, text in enumerate(
        gpus or ["none" + ("" if torch.version.cuda else " that torch could use: it is built without CUDA")]
    ):
        lines.append(f"{'GPUs' if idx == 0 else '':<10} {text}")
    lines.append(f"NCCL       {found['nccl']['version'] or 'none'}: {found['nccl']['from']}")
    usable = "usable" if found["triton"]["usable"] else f"not usable: {found['triton']['reason']}"
    lines.append(f"Triton     {found['triton']['version'] or 'none'}, {usable}")
    for choice in found["choices"]:
        lines.append(f"on {choice['device']:<7} backend {choice['backend']} {choice['trial']}: {choice['backend_reason']}")
        lines.append(f"{'':<10} transport {choice['transport']}: {choice['transport_reason']}")
    return lines


def signature(found: dict[str, Any]) -> dict[str, str]:
    """Return what has to be the same on every rank, as text."""
    numbers, choice = found["versions"], found["choices"][-1]
    gpus = found["machine"]["gpus"]
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    device = gpus[local % len(gpus)]["name"] if gpus else found["machine"]["instructions"]
    build_kind = found["build"]["kind"] if found["build"]["loaded"] else "python"
    values = {
        "gsync": numbers["gsync"],
        "torch": numbers["torch"],
        "build": build_kind,
        "cuda": numbers["cuda"],
        "nccl": numbers["nccl"],
        "triton": numbers["triton"],
        "device": device,
        "backend": choice["backend"],
        "trial": choice["trial"],
    }
    return {name: str(values[name] or "none") for name in SAME}


def compare(ranks: dict[int, dict[str, Any]], world_size: int) -> tuple[list[str], list[int]]:
    """Return one line per rank, and the ranks that are missing or differ from what most ranks have."""
    usual = {name: Counter(rank["signature"][name] for rank in ranks.values()).most_common(1)[0][0] for name in SAME}
    lines, odd = [], []
    for idx in range(world_size):
        if idx not in ranks:
            lines.append(f"rank {idx:<3} did not answer within {_WAIT_S:.0f} s")
            odd.append(idx)
            continue
        own = ranks[idx]["signature"]
        different = [f"{name} {own[name]} (others {usual[name]})" for name in SAME if own[name] != usual[name]]
        line = f"rank {idx:<3} {ranks[idx]['host']}: " + ", ".join(f"{name} {own[name]}" for name in SAME)
        if different:
            odd.append(idx)
            line += f"  <-- odd: {'; '.join(different)}"
        lines.append(line)
    return lines, odd


def run(json_path: str | None = None, measure: bool | None = None) -> int:
    """Print the report, or under a launcher rank 0's comparison of all ranks; write it to `json_path` as well.

    Args:
        measure: between the ranks, and give advice; None: where a launcher has started several.

    Returns:
        The exit code: 0, or 1 where what would be used does not work, or a rank is missing or odd, or the measurement failed. The
        same on all ranks. 2: `json_path` cannot be written.
    """
    place = find_place()
    if json_path and (place is None or place.rank == 0) and not Path(json_path).parent.is_dir():
        print(f"gsync doctor: --json {json_path}: there is no folder {str(Path(json_path).parent)!r}", file=sys.stderr)
        return 2
    if place is None or place.world_size == 1:
        found = facts()
        print("\n".join(report(found)), flush=True)
        code = 0 if all(choice["trial"] == "works" for choice in found["choices"]) else 1
        if measure and not code:
            code, found["advice"] = _measure_here()
        _write(json_path, found)
        return code
    return _run_as_rank(place, json_path, measure is not False)


def _measure_here() -> tuple[int, Any]:
    """Starts two ranks on this machine, which measure; passes on what the first says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "advice.json"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "LOCAL_WORLD_SIZE": "2"}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        defaults = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {})}
        command = [sys.executable, "-m", "gsync.doctor", "--measure", "--json", str(path)]
        ranks = [
            subprocess.Popen(
                command,
                env={**defaults, **os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=_MEASURE_LIMIT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            print(f"gsync doctor: the measurement took more than {_MEASURE_LIMIT_S:.0f} s", file=sys.stderr)
            return 1, None
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks) or not path.exists():
            print("gsync doctor: the measurement failed:\n" + "".join(error for _, error in said)[-2000:], file=sys.stderr)
            return 1, None
        advice = json.loads(path.read_text())["advice"]
    print("\n".join(advice["lines"]))
    return 0, advice


def _run_as_rank(place: Place, json_path: str | None, measure: bool) -> int:
    """Ranks meet in a store, not in a process group: that one of them cannot make one may be what is wrong."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.PrefixStore(
        "gsync-doctor",
        dist.TCPStore(
            place.master_address,
            place.master_port,
            is_master=place.rank == 0 and not served,
            wait_for_workers=False,
            timeout=timedelta(seconds=_WAIT_S),
        ),
    )
    found = facts()
    store.set(f"rank{place.rank}", json.dumps({"host": platform.node(), "signature": signature(found), "facts": found}))
    if place.rank != 0:
        code = int(store.get("code"))
        if not code and measure:
            _measure(store, place)
            code = int(store.get("measured"))
        store.add("left", 1)
        return code
    ranks: dict[int, dict[str, Any]] = {}
    for idx in range(place.world_size):
        try:
            store.wait([f"rank{idx}"], timedelta(seconds=_WAIT_S if len(ranks) == idx else 1.0))
        except RuntimeError:  # not there in time
            continue
        ranks[idx] = json.loads(store.get(f"rank{idx}"))
    lines, odd = compare(ranks, place.world_size)
    print("\n".join(lines))
    print("all ranks are alike" if not odd else f"odd: rank {', '.join(map(str, odd))}", flush=True)
    found = {"ranks": {str(idx): rank["facts"] for idx, rank in ranks.items()}, "odd": odd}
    code = 1 if odd else 0
    store.set("code", str(code))
    if not code and measure:
        found["advice"] = _measure(store, place)
        code = 0 if found["advice"] else 1
        store.set("measured", str(code))
    _write(json_path, found)
    _let_leave(store, len(ranks) - 1)
    return code


def _measure(store: dist.Store, place: Place) -> dict[str, Any] | None:
    """Ten seconds of measurements by all ranks; rank 0 prints what comes of it. None where they failed."""
    from . import advice, link

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    speaks = place.rank == 0
    began = time.monotonic()
    try:
        if cuda:
            torch.cuda.set_device(device)
        rank, size = place.rank, place.world_size
        limit = timedelta(seconds=_WAIT_S)
        dist.init_process_group(backend, store=dist.PrefixStore("measure", store), rank=rank, world_size=size, timeout=limit)
        with _Waiting(speaks) as told:
            measured, candidates = link.measure(device, told)
    except (RuntimeError, ValueError) as error:
        print(f"gsync doctor: rank {place.rank}: the measurement failed: {' '.join(str(error).split())}", file=sys.stderr)
        return None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    text = advice.lines(candidates, measured, f"{backend} on {device.type}", time.monotonic() - began)
    if speaks:
        print("\n".join(text), flush=True)
    best = advice.choose(candidates, measured)
    tries = {"codec": best.codec, "exchange": best.exchange, "bucket_mb": advice.bucket_mb(best, measured)}
    return {"link": vars(measured), "candidates": [vars(one) for one in candidates], "try": tries, "lines": text}


class _Waiting:
    """Says on a terminal what is measured, on one line that is wiped at the end."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()

    def __enter__(self) -> Callable[[str], None]:
        return self._say

    def __exit__(self, *_: object) -> None:
        self._say("")

    def _say(self, what: str) -> None:
        if self._shown:
            print(f"\r\033[K{'measuring ' + what if what else ''}", end="", file=sys.stderr, flush=True)


def _let_leave(store: dist.Store, others: int) -> None:
    """This process may serve the store: it stays until the others have read the verdict, at most 5 s."""
    deadline = time.monotonic() + 5.0
    while store.add("left", 0) < others and time.monotonic() < deadline:
        time.sleep(0.05)


def _write(path: str | None, content: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """The command line of ``python -m gsync.doctor``, which does without typer."""
    parser = argparse.ArgumentParser(prog="python -m gsync.doctor", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", help="file for everything the report is made of")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, help="measure between the ranks and give advice")
    given = parser.parse_args(arguments)
    return run(given.json, given.measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Everything that needs a GPU, in less than four minutes: `make gpu`.

    build     gsync for this machine's GPU alone, into build/gpu-lane; nothing is downloaded
    test      the tests marked `gpu`
    measure   gsync.benchmarks.gpu: kernels against a device copy, host time per bucket
    ranks     the memory of a communicator, for 1 rank, and for 2 and 4 where NCCL lets them share a GPU

Prints JSON lines, each with machine, driver and commit, and keeps them in build/gpu-lane/results.jsonl; what the steps print goes
to build/gpu-lane/*.log. Exit code 0: all steps went well; 1: one did not; 2: nothing could be done here, for the reason printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu-lane"
SITE = FOLDER / "site"
LIMIT_S = 235.0
# What has to be there, since nothing is fetched; and what the tests and benchmarks import.
NEEDED = ("pip", "setuptools", "wheel", "ninja", "pytest", "hypothesis", "typer")


@dataclass(frozen=True)
class Step:
    """A command. `needed`: without it the next ones make no sense."""

    name: str
    command: Sequence[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    needed: bool = False
    folder: Path = ROOT


def why_not() -> str:
    """Return why nothing can be done here, or ""."""
    missing = [name for name in ("torch", *NEEDED) if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} lacks {', '.join(missing)}"
    import torch

    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no NVIDIA GPU on this machine"


def steps(capability: tuple[int, int], world_sizes: Sequence[int]) -> list[Step]:
    """Return the lane for a GPU of that compute capability; `world_sizes`: as many ranks as may share it."""
    python = sys.executable
    with_site = {"PYTHONPATH": str(SITE)}
    build = {"GSYNC_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": ".".join(map(str, capability))}
    # From the folder of the tests: in the root, the source tree would be imported instead of what was built.
    tests = [python, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--timeout=120", str(ROOT / "tests")]
    found = [
        Step("build", install_command(SITE), 150.0, build, needed=True),
        Step("test", tests, 110.0, with_site, folder=ROOT / "tests"),
        Step("measure", [python, "-m", "gsync.benchmarks.gpu", "kernel", "submit"], 60.0, with_site, folder=FOLDER),
    ]
    for world_size in world_sizes:
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"] if world_size > 1 else []
        command = [python, *ranks, "-m", "gsync.benchmarks.gpu", "communicator"]
        found.append(Step(f"ranks-{world_size}", command, 30.0, with_site, folder=FOLDER))
    return found


def install_command(site: Path) -> list[str]:
    """Return the command that builds gsync from this tree into `site`, from what is on this machine."""
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    return [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--upgrade", "--target", str(site), str(ROOT)]


def run(lane: Sequence[Step], about: dict[str, Any], limit_s: float = LIMIT_S, folder: Path = FOLDER) -> int:
    """Run the steps, one after the other, within `limit_s` altogether; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + limit_s
    failed = False
    with open(folder / "results.jsonl", "w") as results:

        def tell(line: dict[str, Any]) -> None:
            text = json.dumps(line)
            results.write(text + "\n")
            print(text, flush=True)

        for step in lane:
            began = time.monotonic()
            code, output = _run_step(step, min(step.limit_s, ends - began), folder / f"{step.name}.log")
            for line in output.splitlines():
                if line.startswith("{"):
                    tell(json.loads(line))
            outcome: dict[str, Any] = {"step": step.name, "exit_code": code, "s": round(time.monotonic() - began, 1)}
            if step.name == "test":
                outcome |= counts_of(output)
            if code != 0:
                failed = True
                outcome["last_lines"] = output.splitlines()[-15:]
            tell({**outcome, **about})
            if code != 0 and step.needed:
                break
    return int(failed)


def counts_of(output: str) -> dict[str, Any]:
    """Return what pytest counted, by outcome, and the tests that failed."""
    summary = next((line for line in reversed(output.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped|deselected)", summary)}
    return {"tests": counts, "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)}


def _run_step(step: Step, limit_s: float, log: Path) -> tuple[int, str]:
    """Return exit code and output of a step; 124 if there was not enough time."""
    if limit_s <= 0:
        return 124, "no time is left for this step"
    environment = {**os.environ, **step.environment}
    with open(log, "w+") as file:
        process = subprocess.Popen(
            list(step.command), stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=step.folder, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with what it started
            process.wait()
            code = 124
        file.seek(0)
        return code, file.read()


def main() -> int:
    reason = why_not()
    if reason:
        print(f"gpu lane: {reason}", file=sys.stderr)
        return 2
    import torch

    capability = torch.cuda.get_device_capability(0)
    version = torch.cuda.nccl.version()
    about = {
        "gpu": torch.cuda.get_device_name(0),
        **_machine(),
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, version)),
    }
    return run(steps(capability, (1, 2, 4) if version[:2] >= (2, 30) else (1,)), about)


def _machine() -> dict[str, Any]:
    """Return driver, host and commit, None for what cannot be found."""

    def told(command: Sequence[str]) -> str | None:
        try:
            return (
                subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=ROOT)
                .stdout.split("\n")[0]
                .strip()
            )
        except (OSError, subprocess.SubprocessError):
            return None

    return {
        "driver": told(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "host": os.uname().nodename,
        "commit": told(["git", "rev-parse", "HEAD"]),
    }


if __name__ == "__main__":
    sys.exit(main())

"""`make gpu` as far as it goes without a GPU: what it says here, its steps, and what it makes of their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_lane
import pytest
import torch
import torch.distributed as dist
from gpu_lane import Step
from gsync.benchmarks import gpu

from gsync import _native

ABOUT = {"gpu": "none", "driver": "1.2", "commit": "abc"}


def run_lane(steps: list[Step], folder: Path, capsys: pytest.CaptureFixture[str], limit_s: float = 60) -> tuple[int, list[Any]]:
    code = gpu_lane.run(steps, ABOUT, limit_s, folder)
    printed = capsys.readouterr().out
    assert (folder / "results.jsonl").read_text() == printed
    return code, [json.loads(line) for line in printed.splitlines()]


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize("command", [[str(gpu_lane.ROOT / "tests" / "gpu_lane.py")], ["-m", "gsync.benchmarks.gpu"]])
def test_a_machine_without_a_gpu_is_told_in_one_line(command: list[str]) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(("gpu lane: torch ", "gsync.benchmarks.gpu: torch ")), (
        done
    )


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lane, "NEEDED", ("pip", "no_such_module"))
    assert gpu_lane.why_not() == f"{sys.executable} lacks no_such_module"


def test_lines_of_all_steps_come_with_their_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        Step("build", python("print('words')"), 20, needed=True),
        Step(
            "test",
            python("print('FAILED tests/test_x.py::test_y - no'); print('1 failed, 3 passed, 2 skipped in 1.00s'); exit(1)"),
            20,
        ),
        Step("measure", python("import os; print('{\"what\": \"' + os.environ['SAID'] + '\"}')"), 20, {"SAID": "kernel"}),
    ]
    code, lines = run_lane(steps, tmp_path, capsys)
    assert code == 1
    assert [line.get("step") for line in lines] == ["build", "test", None, "measure"]
    assert lines[1]["tests"] == {"failed": 1, "passed": 3, "skipped": 2} and lines[1]["failed"] == ["tests/test_x.py::test_y"]
    assert lines[1]["exit_code"] == 1 and "1 failed" in lines[1]["last_lines"][-1]
    assert lines[2] == {"what": "kernel"} and lines[3]["exit_code"] == 0
    assert all(line["commit"] == "abc" for line in lines if "step" in line)
    assert (tmp_path / "build.log").read_text() == "words\n"


def test_nothing_follows_a_build_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run_lane([Step("build", python("exit(3)"), 20, needed=True), Step("test", ["never"], 20)], tmp_path, capsys)
    assert code == 1 and len(lines) == 1 and lines[0]["exit_code"] == 3


def test_the_lane_ends_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    code, lines = run_lane([Step("test", python(slow), 60), Step("measure", python("print(1)"), 60)], tmp_path, capsys, limit_s=1)
    assert code == 1 and lines[0]["exit_code"] == 124 and lines[0]["s"] < 10
    assert lines[1]["exit_code"] == 124, "the time was used up"


def test_steps_are_for_the_gpu_that_is_there() -> None:
    lane = gpu_lane.steps((9, 0), (1, 2))
    assert [step.name for step in lane] == ["build", "test", "measure", "ranks-1", "ranks-2"]
    assert lane[0].environment == {"GSYNC_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0"} and lane[0].needed
    assert "--nproc-per-node=2" in lane[4].command and "torch.distributed.run" not in lane[3].command
    assert gpu_lane.LIMIT_S < 240


def test_the_build_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    environment = {**os.environ, "GSYNC_BUILD": "python", "PIP_INDEX_URL": "http://127.0.0.1:1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(gpu_lane.install_command(site), capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    check = "import gsync.kernels, gsync.benchmarks.gpu as gpu; print(gpu.__file__)"
    found = subprocess.run(
        python(check), capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(site)}, cwd=tmp_path
    )
    assert found.stdout.strip() == str(site / "gsync" / "benchmarks" / "gpu.py"), found.stderr


@pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "native build")
def test_measurements_say_what_was_measured() -> None:
    """On the CPU, where the figures mean nothing."""
    device = torch.device("cpu")
    lines = list(gpu.kernel_lines(device, sizes_mb=(0.1,), codecs=("bf16", "int8"), repeats=2))
    measured = [(line["operation"], line["codec"]) for line in lines]
    assert {(name, codec) for codec in ("bf16", "int8") for name in ("pack", "reduce", "unpack")} <= set(measured)
    assert all(line["gb_per_s"] > 0 and line["share_of_copy"]["median"] > 0 for line in lines)
    assert [line["operation"] for line in lines if "met" in line] == ["pack", "unpack"] * 2
    gpu.start_group()
    try:
        lines = list(gpu.submit_lines(device, num_buckets=3, steps=2))
    finally:
        dist.destroy_process_group()
    assert [(line["exchange"], line["buckets"]) for line in lines] == [("all_reduce", 6), ("scatter_gather", 6)]
    assert all(line["us"]["median"] > 0 for line in lines)
    assert gpu.facts(device)["device"] == "cpu"


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["kernels"]) == 2
    assert "kernels: expected kernel, submit, communicator" in capsys.readouterr().err

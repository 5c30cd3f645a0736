"""The main job, run for real with small models: the table, the file, errors, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gsync import config

BENCH = [sys.executable, "-m", "gsync.benchmarks.ddp"]
SMALL = ["--model", "mlp", "--layers", "2", "--width", "32", "--warmup", "2", "--quiet"]
DDP_ONLY = ["--rival", "stock again"]
NUM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "int4": 0.5}
LIMIT_S = 150
START_LIMIT_S = 150


def bench(*arguments: str, command: list[str] = BENCH) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_digits_under_torchs_own_hooks(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    rivals = [word for name in ("stock again", "fp16 hook", "bf16 hook", "PowerSGD") for word in ("--rival", name)]
    done = bench("--model", "digits-mlp", "--width", "64", "--steps", "5", "--warmup", "2", "--json", str(path), *rivals)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Traceback" not in done.stderr
    results, rows = json.loads(path.read_text()), rows_of(path)
    assert results["command"].startswith("python -m gsync.benchmarks.ddp --model digits-mlp")
    assert results["versions"]["torch"] and results["machine"]["cores"] and results["world_size"] == 2
    parameters = 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
    assert results["parameters"] == parameters
    assert rows["stock"]["wire_bytes"] == 4 * parameters  # 2 (W-1)/W = 1
    assert rows["fp16 hook"]["wire_bytes"] == 2 * parameters
    assert 0 < rows["PowerSGD"]["wire_bytes"] < parameters
    assert rows["stock"]["error"] < 1e-6 < rows["fp16 hook"]["error"] < 1e-2
    for name in ("stock", "stock again", "fp16 hook", "PowerSGD"):
        row = rows[name]
        assert len(row["step_ms"]["samples"]) == 5
        assert row["step_ms"]["p10"] <= row["step_ms"]["median"] <= row["step_ms"]["p90"]
        assert row["accuracy"] > 10 and row["loss"] > 0 and "exposed_ms" in row
    assert rows["stock"]["step_ratio"]["median"] == 1.0
    assert rows["stock"]["loss"] == rows["stock again"]["loss"]
    if torch.version.cuda is None:  # DDP looks at what torch was built with, not at what is there
        assert "BF16" in rows["bf16 hook"]["refused"] and "bf16 hook: not run: " in done.stdout
    else:
        assert rows["bf16 hook"]["wire_bytes"] == 2 * parameters


def test_reducer_beside_the_hook_on_many_parameters(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    many = ["--model", "many", "--layers", "40", "--width", "33", "--warmup", "2", "--quiet", "--steps", "3"]
    rivals = ["--rival", "gsync", "--rival", "reducer", "--codec", "bf16", "--codec", "fp32", "--exchange", "scatter_gather"]
    done = bench(*many, *rivals, "--bucket-cap-mb", "0.01", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "gsync.GradReducer" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    _, *rows = json.loads(path.read_text())["rows"]
    assert [row["family"] for row in rows] == ["gsync"] * 2 + ["reducer"] * 2
    for row in rows:
        assert "wrong" not in row and row["stats"]["steps"] == 3 and row["stats"]["gradient_bytes"] == 3 * 4 * 40 * 33, row
    for codec in range(2):  # the same bits, so the same training
        assert rows[codec]["train_loss"] == rows[codec + 2]["train_loss"]
    assert rows[2]["stats"]["buckets"] == 3  # one of all parameters


def test_gsync_under_every_codec_and_exchange(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = bench(*SMALL, "--steps", "3", "--ranks-per-host", "3", "--rival", "gsync", "--slice-mb", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    results, rows = json.loads(path.read_text()), rows_of(path)
    assert results["gsync_config"] == {"slice_mb": 1.0}
    summed = {f"{codec} all_reduce" for codec in ("fp32", "fp16", "bf16")}
    assert set(rows) == {"stock"} | summed | {f"{codec} scatter_gather" for codec in config.CODECS}
    numel = results["parameters"]
    for name, row in rows.items():
        assert "wrong" not in row and "refused" not in row, row
        assert len(row["step_ms"]["samples"]) == 3
        if name != "stock":
            payload = numel * NUM_BYTES[name.split()[0]]
            assert row["wire_source"] == "stats" and row["stats"]["steps"] == 3
            # 2 (W-1)/W of the payload, and above that flags and padding, which weigh in a model of 2 k parameters
            assert 1.0 <= row["wire_bytes"] / (4 / 3 * payload) < 1.6
    assert rows["bf16 scatter_gather"]["error"] < 2.0**-8
    assert rows["fp32 scatter_gather"]["error"] < 2.0**-22


def test_error_feedback_and_stochastic_rounding_where_they_can_act(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    flags = ["--error-feedback", "--rounding", "stochastic", "--measure-every", "1"]
    done = bench(*SMALL, "--steps", "2", "--rival", "gsync", *flags, "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = rows_of(path)
    assert set(rows) == {"stock"} | {f"{codec} scatter_gather" for codec in config.CODECS if codec != "fp32"}
    for name, row in rows.items():
        assert "wrong" not in row and "refused" not in row, row
        if name != "stock":
            assert 0 < row["stats"]["relative_error"] < 0.4 and row["stats"]["residual_bytes"] > 0


def test_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", BENCH[2]]
    done = bench(*SMALL, *DDP_ONLY, "--steps", "2", command=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PyTorch DDP") == 1
    refused = bench(*SMALL, "--hosts", "2", command=torchrun)
    assert refused.returncode != 0
    assert refused.stderr.count("--hosts cannot act under torchrun") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet"], "--model resnet: expected one of digits-cnn"),
        (["--model", "mlp", "--vocabulary", "9"], "--vocabulary 9: mlp has no such size"),
        (["--codec", "bf17"], "bf17"),
        (["--exchange", "ring"], "ring"),
        (["--slice-mb", "0"], "slice_mb"),
        (["--codec", "int8", "--exchange", "all_reduce"], "exchange='all_reduce'"),
        (["--codec", "fp32", "--error-feedback"], "codec fp32 loses nothing"),
        (["--exchange", "all_reduce", "--error-feedback"], "exchange='all_reduce'"),
        (["--rival", "horovod"], "--rival 'horovod': expected one of stock"),
        (["--rival", "PowerSGD", "--codec", "bf16"], "--codec acts on gsync only"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--rate", "1gbit"], "--rate 1gbit needs --hosts 2"),
        (["--hosts", "2", "--rate", "fast"], "--rate fast: expected a number"),
        (["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    from gsync.benchmarks.ddp import make_app
    from typer.testing import CliRunner

    outcome = CliRunner().invoke(make_app(), arguments)
    assert outcome.exit_code == 2, outcome.output
    assert message in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL", "rank"])
def test_nothing_is_left_however_a_run_ends(how: str) -> None:
    run = subprocess.Popen(
        [*BENCH, *SMALL, *DDP_ONLY, "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        ranks = wait_for_ranks(run.pid, 2)
        if how == "rank":
            ranks[1].kill()
        else:
            os.kill(run.pid, getattr(signal, how))
        _, said = run.communicate(timeout=60)
        gone, alive = psutil.wait_procs(ranks, timeout=20)
    finally:
        run.kill()  # its ranks end with it
        run.communicate()
    assert not alive and len(gone) == 2
    wanted = {"SIGINT": 130, "SIGTERM": 130, "SIGKILL": -9, "rank": 137}[how]
    assert run.returncode == wanted, said
    if how == "rank":
        assert "rank 1 ended with exit code -9" in said


def wait_for_ranks(parent: int, count: int) -> list[psutil.Process]:
    """The ranks' processes, once each has done a few steps (they have a process group by then)."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        ranks = [child for child in psutil.Process(parent).children(recursive=True) if is_at_work(child)]
        if len(ranks) == count:
            return ranks
        time.sleep(0.1)
    raise AssertionError(f"the ranks have not started within {START_LIMIT_S} s")


def is_at_work(process: psutil.Process) -> bool:
    try:
        return "gsync.benchmarks.worker" in process.cmdline() and process.cpu_times().user > 3.0
    except psutil.NoSuchProcess:  # one that the launcher ran for a moment, such as git
        return False

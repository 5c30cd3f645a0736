"""`gsync bench error`: the table, the file, and that what is above its limit fails the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from gsync.benchmarks import error
from gsync.benchmarks.progress import Progress
from typer.testing import CliRunner


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(error.error)
    return CliRunner().invoke(app, arguments)


def test_every_codec_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    outcome = run("--numel", "4096", "--ranks", "2", "--ranks", "8", "--quiet", "--json", str(path))
    assert outcome.exit_code == 0, outcome.output
    assert max(map(len, outcome.output.splitlines())) <= 80
    results = json.loads(path.read_text())
    assert results["numel"] == 4096 and results["world_sizes"] == [2, 8] and results["versions"]["torch"]
    rows = {row["codec"]: row for row in results["rows"]}
    assert tuple(rows) == error.CODECS
    order = ("fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
    for name in ("sum", "bias"):
        values = [rows[codec][name] for codec in order]
        assert values == sorted(values) and values[0] > 0
    for row in rows.values():
        assert set(row["mean"]) == {"2", "8"} and row["sum_with_residuals"] < 1e-5 < row["sum"] < row["mean"]["2"]


def test_what_is_above_its_limit_is_named_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error, "error_of_mean", lambda codec, world_size, numel: 0.009 if world_size == 2 else 0.02)
    monkeypatch.setitem(error.SUM_LIMITS, "int8", 1e-9)
    [row] = error.measure(["int8"], [2, 4], 1024, Progress(False))
    assert row["above"] == ["mean", "sum", "growth"]
    outcome = run("--codec", "int8", "--numel", "1024", "--ranks", "2", "--quiet")
    assert outcome.exit_code == 1 and "int8: above the limit: sum" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "fp32"], "--codec fp32: expected one of fp16"),
        (["--ranks", "0"], "--ranks 0: expected at least 1"),
        (["--numel", "0"], "--numel 0: expected at least 1"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.output

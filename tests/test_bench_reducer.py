"""`gsync bench reducer` measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from gsync.benchmarks import reducer
from typer.testing import CliRunner

from gsync import _native

native = pytest.mark.skipif(_native.C is None, reason="the engine in Python keeps other buffers")


@native
def test_memory_operations_and_bytes_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "reducer.json"
    app = typer.Typer()
    app.command()(reducer.reducer)
    ways = ("ddp", "ddp fp16 hook", "reducer bf16")
    flags = [word for way in ways for word in ("--way", way)]
    outcome = CliRunner().invoke(
        app, [*flags, "--steps", "4", "--layers", "4", "--width", "1024", "--json", str(path), "--quiet"]
    )
    assert outcome.exit_code == 0, outcome.output
    assert max(map(len, outcome.output.splitlines())) <= 80
    results = json.loads(path.read_text())
    stock, hook, own = results["rows"]
    assert [row["way"] for row in results["rows"]] == list(ways)
    assert stock["memory"] > 0.9 and own["memory"] < 0.8 * stock["memory"]
    # 8 parameters in 2 buckets. DDP goes through each on the way in and out; the hook through each bucket three times more.
    assert stock["operations"] == 2 * 8 and stock["bytes_per_element"] == pytest.approx(16, abs=0.1)
    assert hook["operations"] == 2 * 8 + 3 * 2 and hook["bytes_per_element"] == pytest.approx(32, abs=0.1)
    assert own["operations"] % 2 == 0 and own["operations"] < 2 * 8
    assert own["bytes_per_element"] == pytest.approx(12, abs=0.1)
    assert -1 < results["hook_us"] < 100  # a time on a machine that may be busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--way", "horovod"], "--way 'horovod': expected one of ddp"),
        (["--steps", "1"], "--steps 1: expected at least 2"),
        (["--width", "0"], "--width 0: expected at least 1"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(reducer.reducer)
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert message in outcome.output

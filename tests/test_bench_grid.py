"""`gsync bench grid`: which settings, and what it says of a run. The runs themselves are `gsync bench`, tested elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import typer
from gsync.benchmarks import grid
from gsync.benchmarks.grid import MODELS, RATES, Setting, row_of, settings
from typer.testing import CliRunner


def results(auto: list[float], **fixed: list[float]) -> dict[str, Any]:
    """A run of `gsync bench` with steps of so many ms; stock DDP takes 10."""
    stock = [10.0] * len(auto)
    rows = {
        "stock": stock,
        "stock again": stock,
        **{name.replace("__", " "): row for name, row in fixed.items()},
        "auto auto": auto,
    }

    def row(name: str, samples: list[float]) -> dict[str, Any]:
        ratio = sorted(samples)[len(samples) // 2] / 10
        ratios = {"median": ratio, "interval": [ratio, ratio]}
        step = {"median": 10 * ratio, "samples": samples}
        return {"name": name, "step_ms": step, "step_ratio": ratios, "stats": {"choice": "bf16 all_reduce (5 ms; why)"}}

    return {"rows": [row(name, samples) for name, samples in rows.items()]}


HERE = Setting(2, 1, "1gbit", "wide")
RUN = results([6.0, 5.0, 6.0], bf16__all_reduce=[5.0, 5.0, 5.0], fp32__all_reduce=[10.0, 10.0, 10.0])


def test_there_are_24_settings_of_all_kinds() -> None:
    found = settings(every=False)
    assert len(found) == len(set(found)) == 24 and len(set(settings(every=True))) == 48
    assert {(one.hosts, one.ranks_per_host, one.rate) for one in found} == {
        (hosts, ranks, rate) for hosts in (2, 4) for ranks in (1, 2) for rate in RATES
    }
    assert Counter(one.model for one in found) == dict.fromkeys(MODELS, 8)


def test_a_row_compares_auto_with_the_best_fixed_choice_round_by_round() -> None:
    row = row_of(HERE, RUN)
    assert (row["best"], row["best_ratio"], row["auto_ratio"], row["to_best"]) == ("bf16 all_reduce", 0.5, 0.6, 1.2)
    assert row["setting"] == "2 x 1, 1gbit, wide" and row["choice"].startswith("bf16")


def test_a_run_with_something_wrong_in_it_is_no_row() -> None:
    broken = json.loads(json.dumps(RUN))
    del broken["rows"][2]["step_ratio"]
    broken["rows"][2]["wrong"] = "ranks differ"
    with pytest.raises(ValueError, match="2 x 1, 1gbit, wide: bf16 all_reduce: ranks differ"):
        row_of(HERE, broken)


def test_the_command_allows_auto_what_is_fixed_beside_it() -> None:
    command = " ".join(HERE.command("out.json", ("fp32", "int8")))
    assert "--codec fp32 --codec int8 --codec auto --auto-codecs fp32 --auto-codecs int8" in command
    assert "--hosts 2 --ranks-per-host 1" in command and "--rate 1gbit" in command
    assert "--rate" not in Setting(4, 2, "", "wide").command("out.json", ("fp32", "int8"))


def _call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(grid.grid)
    return CliRunner().invoke(app, arguments)


def test_it_counts_what_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(grid, "_run", lambda setting, codecs: RUN)
    ended = _call("--only", "2 x 1, 1gbit", "--json", str(tmp_path / "grid.json"))
    assert ended.exit_code == 0, ended.output
    assert "auto above 1.05 of the best fixed choice: 2 of 2" in ended.output
    assert "auto above 1.03 of stock: 0 of 2" in ended.output
    content = json.loads((tmp_path / "grid.json").read_text())
    assert len(content["rows"]) == len(content["results"]) == 2


def test_a_run_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(setting: Setting, codecs: tuple[str, ...]) -> dict[str, Any]:
        if setting.model == "wide":
            raise RuntimeError(f"{setting}: no root")
        return RUN

    monkeypatch.setattr(grid, "_run", run)
    ended = _call("--only", "2 x 1, 1gbit")
    assert ended.exit_code == 1
    assert "2 x 1, 1gbit, wide: no root" in ended.output and "0 of 1" in ended.output


def test_a_calibration_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> Any:
        raise ValueError("the link inside hosts is not in the calibration")

    monkeypatch.setattr(grid, "_run", lambda setting, codecs: RUN)
    monkeypatch.setattr(grid.calibrations, "read", lambda path: path)
    monkeypatch.setattr(grid.validate, "compare", compare)
    ended = _call("--only", "2 x 1, 1gbit", "--calibration", "links.json")
    assert ended.exit_code == 1 and "the link inside hosts is not in the calibration" in ended.output


@pytest.mark.parametrize(
    "arguments", [("--only", "3 x 3"), ("--calibration", "nowhere.json"), ("--json", "/nowhere/at/all.json")]
)
def test_wrong_flags_end_before_anything_runs(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_run", lambda *_: pytest.fail("something ran"))
    assert _call(*arguments).exit_code == 2

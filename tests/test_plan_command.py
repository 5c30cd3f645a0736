"""The command `gsync plan`: table, file, picture, and one clear error for each wrong input."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from gsync.benchmarks import calibrate, calibration
from plan_cases import FLAGS, run, write_calibration
from torch import nn

SMALL = ["--model", "mlp", "--layers", "3", "--width", "256", *FLAGS]


@pytest.fixture
def figures(tmp_path: Path) -> list[str]:
    return ["--calibration", write_calibration(tmp_path / "calibration.json")]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 32))


class LooksAtValues(nn.Module):
    """Cannot be made without memory."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(linear.weight.detach() * float(linear.weight.abs().sum()))


def nothing_to_train() -> nn.Module:
    return nn.ReLU()


def test_the_table_has_the_fastest_first_and_stock_as_reference(tmp_path: Path, figures: list[str]) -> None:
    path = tmp_path / "plan.json"
    outcome = run([*SMALL, *figures, "--top", "3", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    assert all(len(line) <= 80 for line in outcome.output.splitlines() if not line.startswith("figures:"))
    assert "DDP stock" in outcome.output and "rows left out" in outcome.output
    results = json.loads(path.read_text())
    rows = results["rows"]
    steps = [row["step_ms"]["median"] for row in rows]
    assert steps == sorted(steps)
    stock = next(row for row in rows if row["name"] == "stock")
    assert stock["ratio"] == 1.0 and stock["wire_bytes"] == 2 * 7 / 8 * 4 * results["parameters"]
    for row in rows:
        assert row["step_ms"]["p25"] <= row["step_ms"]["median"] <= row["step_ms"]["p75"]
        assert row["exposed_ms"]["median"] == pytest.approx(row["step_ms"]["median"] - 100)
    names = {row["name"] for row in rows}
    assert {"bf16 all_reduce", "int8 scatter_gather", "int4 hierarchical", "fp16 hook"} <= names
    assert "int8 all_reduce" not in names
    assert results["links"]["inter"]["bytes_per_s"] == 125e6 and "measured" in results["calibration"]
    assert results["versions"]["torch"] and results["machine"]["processor"]


def test_every_bucket_size_is_a_row(tmp_path: Path, figures: list[str]) -> None:
    path = tmp_path / "plan.json"
    sizes = ["--bucket-mb", "0.25", "--bucket-mb", "5"]
    outcome = run([*SMALL, *figures, *sizes, "--codec", "int8", "--exchange", "scatter_gather", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads(path.read_text())["rows"]
    found = {(row["name"], row["bucket_mb"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 4
    assert found["int8 scatter_gather", 0.25]["buckets"] == 3 and found["int8 scatter_gather", 5.0]["buckets"] == 1


def test_error_feedback_costs_memory_and_time(tmp_path: Path, figures: list[str]) -> None:
    one = ["--codec", "int8", "--exchange", "scatter_gather", "--json", str(tmp_path / "plan.json")]
    residuals = []
    for more in ([], ["--error-feedback"]):
        assert run([*SMALL, *figures, *one, *more]).exit_code == 0
        rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
        residuals.append(next(row for row in rows if row["family"] == "gsync")["residual_bytes"])
    numel = 3 * (256 * 256 + 256)
    assert residuals == [0, 4 * (numel + numel // 8)]


def test_the_reducer_is_spared_the_copies_of_ddp(tmp_path: Path, figures: list[str]) -> None:
    steps = []
    for door in ("gsync", "reducer"):
        path = tmp_path / f"{door}.json"
        assert run([*SMALL, *figures, "--door", door, "--codec", "bf16", "--json", str(path)]).exit_code == 0
        rows = json.loads(path.read_text())["rows"]
        steps.append(next(row for row in rows if row["name"] == "bf16 all_reduce")["step_ms"]["median"])
    assert steps[1] < steps[0]


def test_a_file_of_shapes_is_a_model(tmp_path: Path, figures: list[str]) -> None:
    shapes = {"table": {"shape": [100, 64], "embedding": True}, "weight": [32, 64], "bias": {"shape": [32], "dtype": "bfloat16"}}
    model, out = tmp_path / "shapes.json", tmp_path / "plan.json"
    model.write_text(json.dumps(shapes))
    assert run(["--model", str(model), *FLAGS, *figures, "--json", str(out)]).exit_code == 0
    results = json.loads(out.read_text())
    assert results["parameters"] == 6400 + 2048 + 32
    stock = next(row for row in results["rows"] if row["name"] == "stock")
    assert stock["wire_bytes"] == 2 * 7 / 8 * (4 * 8448 + 2 * 32)


@pytest.mark.parametrize(("name", "numel"), [("small_model", 6400 + 32 * 64 + 32), ("LooksAtValues", 64)])
def test_a_callable_is_a_model(name: str, numel: int, tmp_path: Path, figures: list[str]) -> None:
    out = tmp_path / "plan.json"
    outcome = run(["--model", f"test_plan_command:{name}", *FLAGS, *figures, "--json", str(out)])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(out.read_text())["parameters"] == numel


def test_without_a_calibration_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_SIZE_MB", 0.1)
    outcome = run([*SMALL, "--intra-gb-per-s", "2", "--intra-latency-us", "20", "--device", "cpu", "--codec", "bf16"])
    assert outcome.exit_code == 0, outcome.output
    assert "figures: this machine, one rank, just now" in outcome.output


def _timeline(steps: list[list[float]]) -> str:
    """Backward from 10 ms on in each step, buckets ready after so many ms."""
    events = []
    for step, ready in enumerate(steps):
        start = 1e5 * step + 1e4
        common = {"ph": "X", "pid": 0}
        events.append({**common, "name": "backward", "ts": start, "dur": 1e3 * ready[-1], "args": {"step": step}})
        for bucket, (before, after) in enumerate(zip([0.0, *ready], ready, strict=False)):
            span = {"ts": start + 1e3 * before, "dur": 1e3 * (after - before), "args": {"step": step, "bucket": bucket}}
            events.append({**common, "name": f"gradients of bucket {bucket}", **span})
    return json.dumps({"traceEvents": events})


def test_a_timeline_says_when_gradients_are_ready(tmp_path: Path, figures: list[str]) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "plan.json"
    late = ["--bucket-mb", "0.25", "--codec", "fp32", "--exchange", "all_reduce", "--json", str(out)]
    exposed = []
    for steps in ([[10.0, 20.0, 30.0]] * 3, [[28.0, 29.0, 30.0]] * 3):
        trace.write_text(_timeline(steps))
        outcome = run([*SMALL, *figures, *late, "--timeline", str(trace)])
        assert outcome.exit_code == 0, outcome.output
        results = json.loads(out.read_text())
        assert results["backward_ms"] == pytest.approx(30.0)
        exposed.append(next(row for row in results["rows"] if row["name"] == "stock")["exposed_ms"]["median"])
    assert exposed[1] > exposed[0] + 5


def test_the_picture_is_drawn(tmp_path: Path, figures: list[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scaling.svg"
    outcome = run([*SMALL, *figures, "--plot", str(picture)])
    assert outcome.exit_code == 0, outcome.output
    assert "<svg" in picture.read_text() and picture.stat().st_size > 5000


def test_4096_ranks_take_less_than_10_seconds(tmp_path: Path, figures: list[str]) -> None:
    large = ["--model", "transformer", "--layers", "24", "--width", "1024", "--heads", "16"]
    place = ["--world-size", "4096", "--ranks-per-host", "8", "--step-ms", "300", "--inter-rate", "100gbit"]
    began = time.process_time()  # not of a clock: other tests may run beside this one
    outcome = run([*large, *place, "--inter-latency-us", "20", "--cores-per-rank", "1", *figures])
    assert outcome.exit_code == 0, outcome.output
    assert "4096 ranks on 512 hosts" in outcome.output
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "mlp"], "--step-ms is missing"),
        (["--model", "mlp", "--step-ms", "1"], "--world-size is missing"),
        ([*SMALL, "--step-ms", "0"], "--step-ms 0.0: expected more than 0"),
        ([*SMALL, "--world-size", "7"], "world_size=7 is no multiple of ranks_per_host=2"),
        ([*SMALL, "--world-size", "0"], "expected at least 1"),
        ([*SMALL, "--inter-rate", "fast"], "--inter-rate fast: expected a number above 0 with bit"),
        ([*SMALL, "--inter-latency-us", "-1"], "--inter-latency-us -1.0: expected 0 or more"),
        ([*SMALL, "--intra-gb-per-s", "0"], "--intra-gb-per-s 0.0: expected more than 0"),
        ([*SMALL, "--backward-share", "1.5"], "--backward-share 1.5: expected more than 0, at most 1"),
        ([*SMALL, "--backward-share", "0.5", "--timeline", "x"], "both say when gradients are ready"),
        ([*SMALL, "--bucket-mb", "0"], "--bucket-mb 0.0: expected more than 0"),
        ([*SMALL, "--block-size", "100"], "--block-size 100: expected a power of two"),
        ([*SMALL, "--codec", "bf17"], "--codec bf17: expected one of fp32"),
        ([*SMALL, "--exchange", "ring"], "--exchange ring: expected one of all_reduce"),
        ([*SMALL, "--exchange", "all_reduce", "--codec", "int8"], "--codec int8: libraries cannot sum int8"),
        (
            [*SMALL, "--ranks-per-host", "1", "--exchange", "hierarchical"],
            "--exchange hierarchical: hierarchical needs several ranks a host",
        ),
        ([*SMALL, "--exempt", "nothing.*"], "--exempt nothing.*: matches no parameter; the first is 0.weight"),
        ([*SMALL, "--codec", "bf16", "--block-size", "64"], "--block-size acts on block codecs, and bf16 is none"),
        ([*SMALL, "--error-feedback", "--exchange", "all_reduce", "--codec", "bf16"], "no error feedback"),
        ([*SMALL, "--door", "window"], "--door window: expected one of gsync, reducer"),
        ([*SMALL, "--device", "cuda"], "--device cuda: the calibration is of cpu"),
        ([*SMALL, "--top", "0"], "--top 0: expected at least 1"),
        ([*SMALL, "--heads", "2"], "--heads 2: mlp has no such size"),
        ([*SMALL, "--json", "/nowhere/plan.json"], "--json /nowhere/plan.json: there is no folder"),
        ([*SMALL, "--plot", "picture.txt"], "--plot picture.txt: expected a file that ends in .svg"),
        ([*SMALL, "--timeline", "/nowhere.json"], "--timeline /nowhere.json: No such file"),
        ([*SMALL, "--calibrate", "a.json", "--validate", "b.json"], "--calibrate and --validate are two different things"),
        (["--model", "nothing", *FLAGS], "--model nothing: expected digits-cnn"),
        (["--model", "/nowhere.json", *FLAGS], "--model /nowhere.json: No such file"),
        (["--model", "json:nothing", *FLAGS], "--model json:nothing: AttributeError"),
        (["--model", "json:loads", *FLAGS], "--model json:loads: the call raised TypeError"),
        (["--model", "test_plan_command:SMALL", *FLAGS], "is no callable but list"),
        (["--model", "test_plan_command:nothing_to_train", *FLAGS], "ReLU has no parameter that requires a gradient"),
        (["--model", "test_plan_command:small_model", "--layers", "2", *FLAGS], "--layers 2 cannot act"),
        (["--model", "many", "--codec", "int8", *FLAGS], "--codec int8: every parameter is exempt from int8"),
    ],
)
def test_wrong_input_gets_one_clear_error(arguments: list[str], message: str, figures: list[str], tmp_path: Path) -> None:
    outcome = run([*arguments, *figures])
    assert outcome.exit_code == 2, outcome.output
    assert message in outcome.output
    assert len(outcome.output.strip().splitlines()) == 1


def test_links_that_nobody_knows_have_to_be_told(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    content = json.loads(Path(write_calibration(path)).read_text())
    path.write_text(json.dumps({**content, "intra": None}))
    outcome = run([*SMALL, "--calibration", str(path)])
    assert outcome.exit_code == 2 and "--intra-gb-per-s is missing" in outcome.output
    without = [flag for flag in SMALL if flag not in ("--inter-rate", "1gbit")]
    outcome = run([*without, "--calibration", write_calibration(path)])
    assert outcome.exit_code == 2 and "--inter-rate is missing" in outcome.output


def _broken(content: dict[str, Any], *way: str, value: Any) -> dict[str, Any]:
    entry = content
    for name in way[:-1]:
        entry = entry[name]
    entry[way[-1]] = value
    return content


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("gsync_calibration",), 7, "has format 7, expected 1"),
        (("device",), "tpu", "device is 'tpu'; expected cpu or cuda"),
        (("kernels", "int8"), {}, "kernels.int8.pack is missing"),
        (("kernels", "bf16", "pack", "p25"), 1.0, "kernels.bf16.pack is"),
        (("copy", "p25"), -1.0, "copy is"),
        (("intra", "byte_s"), {"p25": 0, "median": 0, "p75": 0}, "intra.byte_s is 0"),
        (("intra", "sum_cpu_s", "bf16"), None, "intra.sum_cpu_s.bf16 is missing"),
        (("inter",), "fast", "inter is 'fast'"),
    ],
)
def test_a_wrong_calibration_names_the_figure(way: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    content = json.loads(Path(write_calibration(path)).read_text())
    path.write_text(json.dumps(_broken(content, *way, value=value)))
    with pytest.raises(ValueError, match=f"--calibration {path}: {message}"):
        calibration.read(str(path))


def test_what_is_no_calibration_is_refused(tmp_path: Path) -> None:
    for text, message in (("{}", "is no calibration; gsync plan --calibrate"), ("{", "is no JSON")):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            calibration.read(str(tmp_path / "other.json"))


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = calibration.read(write_calibration(tmp_path / "calibration.json"))
    assert found.intra is not None and found.inter is None
    assert found.intra.at("median").bytes_per_s == pytest.approx(2e9) and found.intra.sum_cpu_s["bf16"].p25 == 2e-10
    assert found.kernels_at("p75", False)["int8"].pack == 1.2e-10


def test_the_documented_plan_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parent.parent
    text = (root / "docs" / "tuning.md").read_text()
    command = re.search(r"```sh\n(gsync plan --model .*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert command is not None
    arguments = command.group(1).replace("\\\n", " ").split()[2:]
    plot = arguments.index("--plot")
    monkeypatch.chdir(root)
    outcome = run(arguments[:plot] + arguments[plot + 2 :])
    assert outcome.exit_code == 0, outcome.output
    assert [line.rstrip() for line in outcome.output.splitlines()][: len(command.group(2).splitlines())] == [
        line.rstrip() for line in command.group(2).splitlines()
    ]

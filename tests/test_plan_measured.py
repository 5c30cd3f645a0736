"""What `gsync plan` measures on this machine, and how it compares predictions with a bench's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gsync.benchmarks import calibrate, calibration, planner, validate
from plan_cases import calibration as round_numbers
from plan_cases import link, run, write_calibration
from ranks import run_on_ranks

from gsync import cost
from gsync.config import CODECS
from gsync.launch import Place


def test_every_operation_of_every_codec_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_SIZE_MB", 0.5)
    found = calibrate.measure_kernels(torch.device("cpu"), repeats=3)
    assert tuple(found["kernels"]) == CODECS
    for codec, figures in found["kernels"].items():
        for name in ("pack", "pack_feedback", "unpack", "fixed"):
            assert 0 < figures[name].p25 <= figures[name].median <= figures[name].p75 < 1, (codec, name)
        assert figures["reduce_read"].median + figures["reduce_write"].median > 0
    assert found["copy"].median > 0 and found["casts"]["bf16"]["to"].median > found["casts"]["bf16"]["back"].p25 / 10


def _measure(rank: int, world_size: int, local_size: int) -> dict[str, Any]:
    calibrate._SIZE_MB, calibrate._LINK_BYTES = 0.05, 1 << 20
    place = Place(rank, world_size, rank % local_size, local_size, "torchrun", "localhost", 0)
    return calibrate.between_ranks(place, torch.device("cpu")).to_dict()


@pytest.mark.parametrize(("local_size", "measured"), [(4, {"intra"}), (1, {"inter"}), (2, {"intra", "inter"})])
def test_links_are_measured_where_there_are_ranks(local_size: int, measured: set[str], tmp_path: Path) -> None:
    values = run_on_ranks(_measure, 4, timeout_s=120.0, args=(local_size,), pool="calibrate")
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(values[0]))
    found = calibration.read(str(path))
    for name in ("intra", "inter"):
        figures = getattr(found, name)
        assert (figures is not None) == (name in measured)
        if figures is not None:
            assert 1e-12 < figures.byte_s.median < 1e-6 and 0 < figures.latency_s.median < 1
            assert figures.send_cpu_s.median > 0 and figures.sum_cpu_s["bf16"].median > 0


@pytest.mark.slow
def test_the_command_measures_and_then_plans_with_it(tmp_path: Path) -> None:
    path = str(tmp_path / "here.json")
    assert run(["--calibrate", path, "--device", "cpu"]).exit_code == 0
    outcome = run(["--model", "mlp", "--step-ms", "100", "--world-size", "2", "--ranks-per-host", "2", "--calibration", path])
    assert outcome.exit_code == 0, outcome.output
    assert "stock" in outcome.output


def _results(hosts: int = 2, rate: str | None = "1gbit") -> dict[str, Any]:
    """As gsync bench writes them: steps are those that are predicted for 100 ms, of which 30 forward and 10 optimizer."""
    names = (
        ("ddp", "stock"),
        ("ddp", "PowerSGD"),
        ("gsync", "int8 scatter_gather"),
        ("gsync", "bf16 all_reduce"),
        ("reducer", "bf16 all_reduce"),
    )
    rows: list[dict[str, Any]] = [{"family": family, "name": name, "step_ms": {"median": 1.0}} for family, name in names]
    rows.append({"family": "ddp", "name": "bf16 hook", "refused": "not on this backend"})
    rows[3]["explained"] = {"forward_ms": 30.0, "optimizer_ms": 10.0}
    return {
        "command": "gsync bench --hosts 2", "model": "mlp", "sizes": {"layers": 3, "width": 256, "batch": 8}, "world_size": 2,
        "hosts": hosts, "rate": rate, "threads": 1, "device": "cpu", "bucket_cap_mb": None, "gradient_as_bucket_view": False,
        "gsync_config": {}, "no_sync_step_ms": {"median": 100.0}, "machine": {"cores": 2}, "rows": rows,
    }  # fmt: skip


def test_predictions_are_compared_row_by_row(tmp_path: Path) -> None:
    path, out = tmp_path / "bench.json", tmp_path / "compared.json"
    results = _results()
    known = round_numbers(intra=link())
    predicted = {row.label: row.predicted_ms for row in validate.compare(results, known)}
    assert list(predicted) == ["stock", "int8 scatter_gather", "bf16 all_reduce", "reducer bf16 all_reduce"]
    for row, factor in zip((results["rows"][idx] for idx in (0, 2, 3, 4)), (1.0, 0.8, 1.25, 1.0), strict=True):
        label = f"reducer {row['name']}" if row["family"] == "reducer" else row["name"]
        row["step_ms"]["median"] = predicted[label] * factor
    path.write_text(json.dumps(results))
    outcome = run(["--validate", str(path), "--calibration", write_calibration(tmp_path / "c.json"), "--json", str(out)])
    assert outcome.exit_code == 0, outcome.output
    compared = json.loads(out.read_text())
    errors = [row["error"] for row in compared["rows"]]
    assert errors == pytest.approx([0.0, 0.25, -0.2, 0.0], abs=1e-9)
    assert compared["worst_error"] == pytest.approx(0.25) and compared["median_error"] == pytest.approx(0.1)
    assert "median 10.0%, worst 25.0%" in outcome.output


def test_a_step_is_taken_apart_as_the_bench_has_explained_it() -> None:
    settings = validate._settings(_results(), cost.Topology(2))
    training = settings.training
    assert (training.forward_s, training.backward_s, training.optimizer_s) == pytest.approx((0.03, 0.06, 0.01))
    assert training.cores == 1.0
    alone = {**_results(), "command": "torchrun -m gsync.benchmarks.ddp"}
    assert validate._settings(alone, cost.Topology(2)).training.cores == 2.0
    assert validate._settings(_results(), cost.Topology(2), 0.7).training.cores == 0.7


def test_a_link_of_a_told_rate_carries_that_less_the_headers() -> None:
    network = validate._network(_results(), cost.Topology(2), round_numbers(intra=link()))
    assert network("median").inter.bytes_per_s == pytest.approx(125e6 * 1448 / 1547)
    free = validate._network(_results(rate=None), cost.Topology(2), round_numbers(intra=link()))
    assert free("median").inter.bytes_per_s == pytest.approx(2e9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "has no 'model'; expected what gsync bench --json writes"),
        (json.dumps({**_results(), "rows": []}), "no row that was measured and can be predicted"),
        (json.dumps({**_results(), "device": "cuda"}), "the run was on cuda, the calibration is of cpu"),
    ],
)
def test_what_cannot_be_compared_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    outcome = run(["--validate", str(path), "--calibration", write_calibration(tmp_path / "calibration.json")])
    assert outcome.exit_code == 2 and message in outcome.output


def test_a_comparison_needs_a_calibration(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(_results()))
    outcome = run(["--validate", str(tmp_path / "bench.json")])
    assert outcome.exit_code == 2 and "--validate needs --calibration" in outcome.output


def test_rivals_have_the_names_of_the_bench() -> None:
    assert [planner.Choice(planner.DDP, codec).name for codec in ("fp32", "fp16", "bf16")] == list(planner.RIVALS)

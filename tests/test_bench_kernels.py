"""`gsync bench kernels`: the table, the file, and that wrong bytes are not timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from gsync.benchmarks import kernels
from gsync.benchmarks.progress import Progress
from typer.testing import CliRunner

from gsync import _native, backends, ops

SMALL = ["--device", "cpu", "--size-mb", "0.2", "--segments", "3", "--repeats", "4", "--quiet"]


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(kernels.kernels)
    return CliRunner().invoke(app, arguments)


def test_every_operation_is_compared_with_a_copy_and_the_stock_hook(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    outcome = run(*SMALL, "--json", str(path))
    assert outcome.exit_code == 0, outcome.output
    assert max(map(len, outcome.output.splitlines())) <= 80
    results = json.loads(path.read_text())
    rows = {(row["family"], row["name"]): row for row in results["rows"]}
    assert rows["fp32 bucket", "copy"]["to_copy"]["median"] == 1.0
    for backend in ("reference", *(["native"] if _native.C is not None else [])):
        for name in ("pack", "pack, feedback", "reduce", "unpack"):
            row = rows["gsync bf16", f"{name} {backend}"]
            assert len(row["ms"]["samples"]) == 4
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"]["median"] / 1e6)
        assert "to_stock" in rows["gsync bf16", f"pack {backend}"]
    numel = 52428
    sizes = [numel // 3 + 1] * (numel % 3) + [numel // 3] * (3 - numel % 3)
    assert rows["gsync bf16", "pack reference"]["bytes"] == 4 * numel + ops.payload_bytes(sizes, "bf16")
    assert rows["torch's bf16 hook", "to().div_()"]["bytes"] == 10 * numel


def test_wrong_bytes_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if _native.C is None:
        pytest.skip(_native.MISSING)
    pack = backends.NativeBackend.pack

    def wrong(self: Any, layout: Any, gradients: Any, payload: torch.Tensor, *arguments: Any) -> None:
        pack(self, layout, gradients, payload, *arguments)
        payload[-1] ^= 1

    monkeypatch.setattr(backends.NativeBackend, "pack", wrong)
    bucket = kernels.Bucket(0.1, 2, 2, torch.device("cpu"))
    cases = {case.name: case for case in kernels.make_cases(bucket, ["bf16"], ["reference", "native"], explicit=True)}
    assert cases["pack native"].wrong == "other bytes than the reference" and cases["pack reference"].wrong == ""
    kernels.measure(list(cases.values()), 1, 2, torch.device("cpu"), Progress(False))
    assert cases["pack native"].ms == [] and len(cases["pack reference"].ms) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "bf17"], "--codec bf17: expected one of fp32"),
        (["--backend", "cuda"], "--backend cuda: expected one of reference, native, triton"),
        (["--size-mb", "0"], "--size-mb 0.0: expected more than 0"),
        (["--repeats", "-1"], "--repeats -1: expected more than 0"),
        (["--device", "tpu"], "--device tpu: expected one of auto, cpu, cuda"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.output

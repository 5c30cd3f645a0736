"""Training under every codec against fp32: that ranks are simulated truly, the statistics, the file and the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from gsync.benchmarks import convergence, convergence_report, simulation, text
from gsync.benchmarks.convergence import FP32, TASKS, Outcome, Variant
from ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import gsync
from gsync import _native

DOCS = Path(__file__).resolve().parent.parent / "docs"
STEPS = 4
TRUE_CASES = [FP32, Variant("fp16"), Variant("bf16", True), Variant("fp8_e4m3", True), Variant("int8"), Variant("int4", True)]


def _train_both(rank: int, world_size: int, variants: list[Variant]) -> list[tuple[bool, float]]:
    """For each variant: whether real and simulated ranks end with the same weights, and how far those are from the first ones."""
    torch.set_num_threads(1)
    task = TASKS["digits-mlp"]
    workload = task.workload(3)
    batches = [[workload.batch_at(step, idx, world_size) for idx in range(world_size)] for step in range(STEPS)]
    results = []
    for variant in variants:
        torch.manual_seed(3)
        model = DistributedDataParallel(workload.build())
        first = [parameter.detach().clone() for parameter in model.parameters()]
        how = {"exchange": "scatter_gather", "error_feedback": variant.error_feedback}
        sync = gsync.register(model, codec=variant.codec, **how)
        optimizer = task.optimizer(list(model.parameters()))
        for step_batches in batches:
            inputs, targets = step_batches[rank]
            optimizer.zero_grad()
            workload.loss(model(inputs), targets).backward()
            optimizer.step()
        sync.close()
        simulated = list(convergence.train(task, workload, batches, variant, seed=3)[1].parameters())
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), simulated, strict=True))
        results.append((same, max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), first, strict=True))))
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_simulated_ranks_train_to_the_bits_of_real_ones(world_size: int) -> None:
    for results in run_on_ranks(_train_both, world_size, timeout_s=120, args=[TRUE_CASES]):
        for variant, (same, moved) in zip(TRUE_CASES, results, strict=True):
            assert same and moved > 1e-3, variant


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3", "int8", "int4"])
def test_simulated_ranks_have_the_bits_of_the_reference(codec: str) -> None:
    if _native.C is None:
        pytest.skip(_native.MISSING)
    module = text.CharacterTransformer()
    codecs = simulation.codecs_of(module, codec)
    numels = [parameter.numel() for parameter in module.parameters()]
    both = [simulation.SimulatedRanks(codecs, numels, 3, True, backend=name) for name in ("native", "reference")]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradients = [[torch.randn(parameter.shape, generator=generator) for parameter in module.parameters()] for _ in range(3)]
        means = [[torch.empty_like(parameter) for parameter in module.parameters()] for _ in both]
        for ranks, mean in zip(both, means, strict=True):
            ranks.synchronize(gradients, mean)
        for a, b in zip(*means, strict=True):
            assert torch.equal(a, b)
    for rank in range(3):
        for name in ("sent", "reduced"):
            kept = [getattr(ranks, name)[rank] for ranks in both]
            assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)) and any(bool(a.any()) for a in kept[0])


def test_what_is_exempt_travels_as_bf16() -> None:
    codecs = simulation.codecs_of(text.CharacterTransformer(), "int4")
    assert codecs["tokens.weight"] == codecs["norm.weight"] == codecs["head.bias"] == "bf16"
    assert codecs["head.weight"] == codecs["blocks.0.attention_in.weight"] == "int4"
    assert set(simulation.codecs_of(text.CharacterTransformer(), "fp16").values()) == {"fp16"}


def test_the_text_is_cut_into_what_is_learnt_and_what_is_kept_back() -> None:
    train, held_back = text._tokens()
    assert len(train) > 50 * len(held_back) > 50 * 4000
    workload = text.make_text_workload(seed=4)
    (inputs, targets), (others, _) = workload.batch_at(5, 0, 2), workload.batch_at(5, 1, 2)
    assert inputs.shape == (text.BATCH, text.LENGTH) and not torch.equal(inputs, others)
    assert torch.equal(inputs[:, 1:].flatten(), targets.view(inputs.shape)[:, :-1].flatten())  # each target is the next input
    assert torch.equal(workload.batch_at(5, 0, 2)[0], inputs)


def test_the_interval_is_students() -> None:
    mean, half = convergence.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.302653 / 3**0.5)
    low = convergence.interval([0.5])
    assert low[0] == 0.5 and low[1] != low[1]


def test_differences_are_paired_by_seed_and_judged() -> None:
    def outcomes(losses: dict[Variant, float]) -> dict[Variant, Outcome]:
        return {variant: Outcome([9.0, loss, loss], 1.0, 50.0) for variant, loss in losses.items()}

    good, bad, free = Variant("int8", True), Variant("int4", True), Variant("int4", False)
    seeds = [outcomes({FP32: base, good: base + 0.001, bad: base * 1.1, free: base * 2}) for base in (1.0, 2.0, 3.0)]
    rows = {(row["codec"], row["error_feedback"]): row for row in convergence.make_rows("text", 2, 2, seeds)}
    assert rows["fp32", False]["loss"] == 2.0
    assert rows["int8", True]["difference"] == pytest.approx(0.0005)
    assert rows["int8", True]["interval"] == pytest.approx([0.0005, 0.0005])  # losses differ by 1, pairs do not
    assert rows["int8", True]["within_limit"] and not rows["int4", True]["within_limit"]
    assert "within_limit" not in rows["int4", False]
    assert rows["int4", True]["curve"] == [9.0, 2.2, 2.2]
    assert convergence.is_above_limit({"quick": False, "rows": list(rows.values())})
    assert not convergence.is_above_limit({"quick": True, "rows": list(rows.values())})


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(convergence.convergence)
    return CliRunner().invoke(app, arguments)


def test_a_quick_run_leaves_a_table_a_file_and_a_picture(tmp_path: Path) -> None:
    file, drawing = tmp_path / "results.json", tmp_path / "curves.svg"
    codecs = ("bf16", "int8", "int4")
    chosen = [word for codec in codecs for word in ("--codec", codec)]
    outcome = run("--quick", "--quiet", *chosen, "--json", str(file), "--picture", str(drawing))
    assert outcome.exit_code == 0, outcome.output
    assert max(map(len, outcome.output.splitlines())) <= 80
    results = json.loads(file.read_text())
    assert results["quick"] and results["seeds"] == 2 and results["machine"]["cores"] and results["text"]["sha256"]
    found = {(row["model"], row["ranks"], row["codec"], row["error_feedback"]) for row in results["rows"]}
    assert len(found) == len(TASKS) * len(convergence.RANKS) * (1 + 2 * len(codecs))
    rows = {(row["model"], row["ranks"], row["codec"], row["error_feedback"]): row for row in results["rows"]}
    for (model, *_), row in rows.items():
        assert len(row["curve"]) == results["steps"][model] and len(row["losses"]) == 2
    for model in TASKS:
        base, coarse, fine = (rows[model, 2, codec, False] for codec in ("fp32", "int4", "bf16"))
        assert base["difference"] == 0.0 and base["curve"][0] == coarse["curve"][0]  # the same weights and batches
        assert 0 < abs(fine["difference"]) < 0.01 and base["losses"] != coarse["losses"]
    tree = ElementTree.parse(drawing)
    words = {element.text.strip() for element in tree.iter() if element.text}
    assert {"int8", "step", "4 ranks, with error feedback", "digits, CNN, 4 ranks"} <= words
    first = drawing.read_text()
    convergence_report.draw(results, str(drawing))
    assert drawing.read_text() == first


def test_the_document_shows_the_results_filed_with_it() -> None:
    results = json.loads((DOCS / "convergence.json").read_text())
    page = (DOCS / "convergence.md").read_text()
    for table in convergence_report.markdown(results).split("\n\n"):
        assert table.strip() in page
    assert results["command"] in page and str(results["versions"]["torch"]) in page
    assert not results["quick"] and results["seeds"] == convergence.SEEDS and not convergence.is_above_limit(results)
    assert results["steps"] == {name: task.steps for name, task in TASKS.items()}


def test_the_number_of_processes_changes_nothing() -> None:
    alone, together = (
        convergence.run(["digits-mlp"], ["int8"], [2], seeds=2, steps=3, processes=processes) for processes in (1, 2)
    )
    assert alone["rows"] == together["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet"], "--model resnet: expected one of digits-mlp"),
        (["--codec", "int3"], "--codec int3: expected one of fp16"),
        (["--ranks", "0"], "--ranks 0: expected at least 1"),
        (["--seeds", "0"], "--seeds 0: expected at least 1"),
        (["--processes", "-1"], "--processes -1: expected at least 1"),
        (["--picture", "curves.gif"], "--picture curves.gif: expected a name that ends in .svg or .png"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.output


def test_without_matplotlib_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    outcome = run("--quick", "--picture", "curves.svg")
    assert outcome.exit_code == 2 and "needs matplotlib: pip install matplotlib" in outcome.output


def test_the_models_train_in_the_default_run() -> None:
    for name, task in TASKS.items():
        workload = task.workload(0)
        batches = [[workload.batch_at(step, 0, 1)] for step in range(task.steps)]
        losses = convergence.train(task, workload, batches, Variant("int8", True), seed=0)[0].losses
        assert 0.1 < sum(losses[-task.tail :]) / task.tail < 0.7 * losses[0], name

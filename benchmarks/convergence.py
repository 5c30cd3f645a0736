"""Does training end where it ends with fp32? `gsync bench convergence`, or `python -m gsync.benchmarks.convergence`.

Three small models are trained under every codec, with and without error feedback, on the same weights and batches as with fp32:
the differences of one seed are a pair. Ranks are simulated in one process (benchmarks/simulation.py) and exchange what W
processes would. The loss that is compared is the training loss of all ranks averaged over the last steps (`tail`), where it is
still well above 0: the relative difference of a loss that vanishes is noise.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from torch import nn

from gsync import machine

from . import convergence_report, report, text
from .progress import Progress
from .simulation import SimulatedRanks, codecs_of
from .workloads import Sizes, Workload, make_workload

CODECS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
RANKS = (2, 4)
SEEDS = 10
# Most that the mean of (loss - fp32 loss) may be, over the fp32 loss, with error feedback; and the end of its 95 % interval.
LIMITS = {"bf16": (0.01, 0.02), "fp8_e4m3": (0.01, 0.02), "int8": (0.01, 0.02), "int4": (0.03, math.inf)}
_WRONG_USE, _ABOVE_LIMIT = 2, 1  # exit codes
_QUICK_SEEDS, _QUICK_STEPS = 2, 10


@dataclass(frozen=True)
class Task:
    """A model and how it is trained.

    Attributes:
        workload: seed -> model and data.
        optimizer: parameters -> optimizer.
        steps: of one training.
        tail: last steps, over which the loss is averaged.
    """

    workload: Callable[[int], Workload]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    tail: int


TASKS = {
    "digits-mlp": Task(
        lambda seed: make_workload("digits-mlp", Sizes(layers=3, width=48, batch=16), seed),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, fused=True),
        steps=120,
        tail=30,
    ),
    "digits-cnn": Task(
        lambda seed: make_workload("digits-cnn", Sizes(width=8, batch=16), seed),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
        steps=180,
        tail=30,
    ),
    "text": Task(
        text.make_text_workload,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
        steps=120,
        tail=30,
    ),
}


@dataclass(frozen=True)
class Variant:
    """How gradients travel."""

    codec: str
    error_feedback: bool = False


FP32 = Variant("fp32")


@dataclass(frozen=True)
class Outcome:
    """One training: mean training loss of all ranks at each step; loss and accuracy in percent on data kept back."""

    losses: list[float]
    held_back_loss: float
    accuracy: float


def train(
    task: Task, workload: Workload, batches: Sequence[Sequence[Any]], variant: Variant, seed: int
) -> tuple[Outcome, nn.Module]:
    """Train once.

    Args:
        task: optimizer.
        workload: model and loss.
        batches: of each step, of each rank.
        variant: how gradients travel.
        seed: of the weights.

    Returns:
        What came of it, and the trained model.
    """
    torch.manual_seed(seed)
    module = workload.build()
    parameters = list(module.parameters())
    optimizer = task.optimizer(parameters)
    codecs = codecs_of(module, variant.codec)
    ranks = SimulatedRanks(codecs, [parameter.numel() for parameter in parameters], len(batches[0]), variant.error_feedback)
    losses = []
    for step_batches in batches:
        total, gradients = 0.0, []
        for inputs, targets in step_batches:
            loss = workload.loss(module(inputs), targets)
            gradients.append(torch.autograd.grad(loss, parameters))
            total += float(loss.detach())
        ranks.synchronize(gradients, gradients[0])
        for parameter, gradient in zip(parameters, gradients[0], strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(total / len(step_batches))
    assert workload.evaluate is not None
    return Outcome(losses, *workload.evaluate(module, torch.device("cpu"))), module


def train_pairs(model: str, world_size: int, seed: int, steps: int, variants: Sequence[Variant]) -> dict[Variant, Outcome]:
    """Return the outcome of every variant, all from the same weights on the same batches."""
    torch.set_num_threads(1)
    task = TASKS[model]
    workload = task.workload(seed)
    batches = [[workload.batch_at(step, rank, world_size) for rank in range(world_size)] for step in range(steps)]
    return {variant: train(task, workload, batches, variant, seed)[0] for variant in variants}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return mean and half the width of its 95 % interval by Student's t: NaN for one difference."""
    from scipy.special import stdtrit  # comes with scikit-learn

    num = len(differences)
    mean = math.fsum(differences) / num
    if num < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in differences) / (num - 1)
    return mean, float(stdtrit(num - 1, 0.975)) * math.sqrt(variance / num)


def make_rows(model: str, world_size: int, tail: int, seeds: Sequence[dict[Variant, Outcome]]) -> list[dict[str, Any]]:
    """Return one row per variant: `seeds` are the outcomes of `train_pairs`, one for each seed."""
    ends = {variant: [_mean(seed[variant].losses[-tail:]) for seed in seeds] for variant in seeds[0]}
    base = _mean(ends[FP32])
    rows = []
    for variant, losses in ends.items():
        outcomes = [seed[variant] for seed in seeds]
        mean, half = interval([(loss - other) / base for loss, other in zip(losses, ends[FP32], strict=True)])
        accuracies = [outcome.accuracy for outcome in outcomes]
        row: dict[str, Any] = {
            "model": model,
            "ranks": world_size,
            **vars(variant),
            "loss": _mean(losses),
            "difference": mean,
            "interval": [mean - half, mean + half],
            "accuracy": _mean(accuracies),
            "held_back_loss": _mean([outcome.held_back_loss for outcome in outcomes]),
            "losses": [round(loss, 6) for loss in losses],
            "accuracies": [round(accuracy, 3) for accuracy in accuracies],
            "curve": [round(_mean(step), 4) for step in zip(*(outcome.losses for outcome in outcomes), strict=True)],
        }
        if variant.error_feedback and variant.codec in LIMITS:
            most, end = LIMITS[variant.codec]
            row["within_limit"] = mean <= most and mean + half <= end
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def is_above_limit(results: dict[str, Any]) -> bool:
    """Return whether any row is above its limit, in a run that is long enough to tell."""
    return not results["quick"] and any(row.get("within_limit") is False for row in results["rows"])


def convergence(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}; may be repeated; all if left out.", show_default=False)
    ] = None,
    codec: Annotated[list[str] | None, typer.Option(help="May be repeated; all if left out.", show_default=False)] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="May be repeated; 2 and 4 if left out.", show_default=False)] = None,
    seeds: Annotated[int | None, typer.Option(help=f"Trainings of each; {SEEDS} if left out.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Of each training; the model's own if left out.", show_default=False)] = None,
    quick: Annotated[
        bool, typer.Option(help=f"{_QUICK_SEEDS} seeds, {_QUICK_STEPS} steps: does it run, and nothing more.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Trainings at a time, one thread each.")] = 1,
    json: Annotated[str | None, typer.Option(help="File for all figures and curves.", show_default=False)] = None,
    picture: Annotated[str | None, typer.Option(help="File for the curves, .svg or .png.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option(help="Print the tables only.")] = False,
) -> None:
    """Train small models under every codec and compare the losses with fp32's, seed by seed."""
    try:
        if picture:
            convergence_report.check_picture(picture)
        if json:
            report.check_file(json)
        results = run(model, codec, ranks, seeds, steps, quick, processes, quiet)
        if picture:
            convergence_report.draw(results, picture)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as problem:
        print(f"gsync bench convergence: {problem}", file=sys.stderr)
        raise typer.Exit(_WRONG_USE) from None
    convergence_report.print_table(results)
    if not report.save(results, json, "gsync bench convergence"):
        raise typer.Exit(_WRONG_USE)
    raise typer.Exit(_ABOVE_LIMIT if is_above_limit(results) else 0)


def run(
    models: Sequence[str] | None = None,
    codecs: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    quick: bool = False,
    processes: int = 1,
    quiet: bool = True,
) -> dict[str, Any]:
    """Train everything and return the results; arguments as the flags of the same names, None for their defaults.

    Raises:
        ValueError: naming the flag, what came and what is expected.
        ModuleNotFoundError: scikit-learn is missing.
    """
    models, codecs, ranks = models or tuple(TASKS), codecs or CODECS, ranks or RANKS
    for name, given, known in (("model", models, TASKS), ("codec", codecs, CODECS)):
        for word in given:
            if word not in known:
                raise ValueError(f"--{name} {word}: expected one of {', '.join(known)}")
    for name, value, least in (
        *(("ranks", value, 1) for value in ranks),
        ("seeds", seeds, 1),
        ("steps", steps, 1),
        ("processes", processes, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: expected at least {least}")
    num_seeds = seeds or (_QUICK_SEEDS if quick else SEEDS)
    variants = [FP32, *(Variant(codec, feedback) for codec in codecs for feedback in (True, False))]
    lengths = {model: steps or (_QUICK_STEPS if quick else TASKS[model].steps) for model in models}
    jobs = [
        (model, world_size, seed, lengths[model], variants)
        for model in models
        for world_size in ranks
        for seed in range(num_seeds)
    ]
    circumstances = machine.circumstances()  # as they were when it began
    outcomes = _train_all(jobs, processes, quiet)
    rows = []
    for idx in range(0, len(jobs), num_seeds):
        model, world_size = jobs[idx][:2]
        rows += make_rows(model, world_size, min(TASKS[model].tail, lengths[model]), outcomes[idx : idx + num_seeds])
    return {
        "command": shlex.join(["gsync", *sys.argv[1:]]),
        **circumstances,
        "text": text.description(),
        "quick": quick,
        "seeds": num_seeds,
        "steps": lengths,
        "tail": {model: min(TASKS[model].tail, lengths[model]) for model in models},
        "rows": rows,
    }


def _train_all(jobs: list[tuple[Any, ...]], processes: int, quiet: bool) -> list[dict[Variant, Outcome]]:
    """The outcomes of all jobs in their order; what runs at a time has no influence on them."""
    outcomes = []
    with Progress(not quiet) as progress:
        if processes == 1:
            for idx, job in enumerate(jobs):
                progress.phase("training", idx, len(jobs), f"{job[0]}, {job[1]} ranks, seed {job[2]}")
                outcomes.append(train_pairs(*job))
            return outcomes
        pool: Executor = ProcessPoolExecutor(min(processes, len(jobs)), mp_context=get_context("spawn"))
        with pool:
            for idx, outcome in enumerate(pool.map(train_pairs, *zip(*jobs, strict=True))):
                progress.phase("training", idx + 1, len(jobs))
                outcomes.append(outcome)
    return outcomes


if __name__ == "__main__":
    typer.run(convergence)

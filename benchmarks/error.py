"""What codecs lose, measured: `gsync bench error`, or `python -m gsync.benchmarks.error`.

    mean    relative L2 error of the mean of iid normal gradients over 2 to 512 ranks
    sum     relative L2 error of the sum of 40 means, residuals kept on both encodings
    bias    norm(average of 256 stochastic roundings of t - t) / norm(t)

Ranks are simulated in one process with `gsync.ops`: what they pack, reduce and unpack is what W processes would.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from gsync import machine, ops

from . import report
from .progress import Progress

CODECS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
SUM_STEPS, BIAS_DRAWS = 40, 256
# Most that may be measured; of the mean also at most GROWTH off its value at 2 ranks.
MEAN_LIMITS = {"bf16": 0.0026, "int8": 0.011, "fp8_e4m3": 0.04, "int4": 0.165}
SUM_LIMITS = {"int8": 0.0025, "int4": 0.04, "fp8_e4m3": 0.008, "fp8_e5m2": 0.016}
BIAS_LIMITS = {"int8": 8e-4, "int4": 1.2e-2, "fp8_e4m3": 3e-3, "fp8_e5m2": 6e-3}
GROWTH = 0.1
_WRONG_USE, _ABOVE_LIMIT = 2, 1  # exit codes


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return norm(x - exact) / norm(exact), in fp64."""
    return float((x.double() - exact).norm() / exact.norm())


def normal(numel: int, seed: int) -> Tensor:
    """Return `numel` normal numbers, the same for the same seed."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def error_of_mean(codec: str, world_size: int, numel: int) -> float:
    """Return the relative error of the mean of iid normal gradients over `world_size` ranks."""
    exact = torch.zeros(numel, dtype=torch.float64)
    payloads = []
    for rank in range(world_size):
        gradient = normal(numel, seed=1000 * world_size + rank)
        exact += gradient.double() / world_size
        payloads.append(ops.pack([gradient], codec, 1 / world_size, rank=rank))
    mean = torch.empty(numel)
    ops.unpack(ops.reduce(payloads, [numel], codec), [mean], codec)
    return relative_error(mean, exact)


def error_of_sum(
    codec: str, numel: int, world_size: int = 2, rounding: str = "nearest", steps: int = SUM_STEPS
) -> tuple[float, float]:
    """Return the relative error of the sum of `steps` means under error feedback, and that error with what residuals hold added.

    The second is rounding in fp32: nothing is lost, only late.
    """
    sent = [torch.zeros(numel) for _ in range(world_size)]
    kept = [torch.zeros(numel)]
    exact, total = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        how: dict[str, Any] = {"rounding": rounding, "seed": 5, "step": step}
        payloads = []
        for rank in range(world_size):
            gradient = normal(numel, seed=100 * step + rank)
            exact += gradient.double() / world_size
            payloads.append(ops.pack([gradient], codec, 1 / world_size, rank=rank, residuals=[sent[rank]], **how))
        mean = torch.empty(numel)
        ops.unpack(ops.reduce(payloads, [numel], codec, residuals=kept, **how), [mean], codec)
        total += mean
    left = total + sum(residual.double() for residual in sent) + kept[0]
    return relative_error(total, exact), relative_error(left, exact)


def bias(codec: str, numel: int, draws: int = BIAS_DRAWS) -> float:
    """Return the relative error of the average of `draws` stochastic roundings of the same numbers."""
    numbers = normal(numel, seed=0)
    back, total = torch.empty(numel), torch.zeros(numel, dtype=torch.float64)
    for step in range(draws):
        ops.unpack(ops.pack([numbers], codec, rounding="stochastic", seed=7, step=step), [back], codec)
        total += back
    return relative_error(total / draws, numbers.double())


def measure(codecs: Sequence[str], world_sizes: Sequence[int], numel: int, progress: Progress) -> list[dict[str, Any]]:
    """Return one row per codec: the errors, and `above`, the names of those that are above their limit."""
    rows = []
    for idx, codec in enumerate(codecs):
        progress.phase("measuring", idx, len(codecs), codec)
        means = {world_size: error_of_mean(codec, world_size, numel) for world_size in world_sizes}
        error, left = error_of_sum(codec, numel)
        biased = bias(codec, numel)
        first = next(iter(means.values()))
        above = [
            name
            for name, value, limits in (
                ("mean", max(means.values()), MEAN_LIMITS),
                ("sum", error, SUM_LIMITS),
                ("bias", biased, BIAS_LIMITS),
            )
            if value > limits.get(codec, float("inf"))
        ]
        if any(abs(value / first - 1) > GROWTH for value in means.values()):
            above.append("growth")
        rows.append({"codec": codec, "mean": means, "sum": error, "sum_with_residuals": left, "bias": biased, "above": above})
    return rows


def print_table(results: dict[str, Any]) -> None:
    """Print one row per codec."""
    out = report.console()
    sizes = results["world_sizes"]
    out.print(f"[bold]Relative L2 error[/bold] on {results['numel']} iid normal gradients\n")
    grid = report.table(["", f"mean, {sizes[0]}", f"mean, {sizes[-1]}", "worst", "sum", "with residuals", "bias"])
    for row in results["rows"]:
        means = list(row["mean"].values())
        above = row["above"]
        cells = [
            percent(means[0]),
            percent(means[-1]),
            _marked(percent(max(means)), "mean" in above or "growth" in above),
            _marked(percent(row["sum"]), "sum" in above),
            percent(row["sum_with_residuals"]),
            _marked(percent(row["bias"]), "bias" in above),
        ]
        grid.add_row(f" {row['codec']}", *cells)
    out.print(grid)
    out.print(f"mean, W: of the mean over W ranks; worst: of {len(sizes)} numbers of ranks, {sizes[0]} to {sizes[-1]}.")
    out.print(f"sum: of {SUM_STEPS} means at 2 ranks with error feedback; with residuals: what they still")
    out.print(f"hold added. bias: of the average of {BIAS_DRAWS} stochastic roundings.")
    for row in results["rows"]:
        if row["above"]:
            out.print(f"[bold red]{row['codec']}: above the limit: {', '.join(row['above'])}[/bold red]")


def percent(value: float) -> str:
    """Percent, in three significant digits, or one where it is next to nothing."""
    return f"{100 * value:.3g} %" if value >= 1e-4 else f"{100 * value:.0e} %"


def _marked(text: str, is_above: bool) -> str:
    return f"[bold red]{text}[/bold red]" if is_above else text


def error(
    codec: Annotated[list[str] | None, typer.Option(help="May be repeated; all if left out.", show_default=False)] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="May be repeated; 2 to 512 if left out.", show_default=False)] = None,
    numel: Annotated[int, typer.Option(help="Elements of the gradient.")] = 65536,
    threads: Annotated[int, typer.Option(help="Threads on the CPU.")] = 1,
    json: Annotated[str | None, typer.Option(help="File for all figures.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option(help="Print the table only.")] = False,
) -> None:
    """Measure what every codec loses: in one mean, in a sum with error feedback, and in the mean of stochastic rounding."""
    try:
        if json:
            report.check_file(json)
        results = _run(codec, ranks, numel, threads, quiet)
    except (ValueError, TypeError, OSError) as problem:
        print(f"gsync bench error: {problem}", file=sys.stderr)
        raise typer.Exit(_WRONG_USE) from None
    print_table(results)
    if not report.save(results, json, "gsync bench error"):
        raise typer.Exit(_WRONG_USE)
    raise typer.Exit(_ABOVE_LIMIT if any(row["above"] for row in results["rows"]) else 0)


def _run(codec: list[str] | None, ranks: list[int] | None, numel: int, threads: int, quiet: bool) -> dict[str, Any]:
    for word in codec or ():
        if word not in CODECS:
            raise ValueError(f"--codec {word}: expected one of {', '.join(CODECS)}")
    for name, value, least in (("numel", numel, 1), ("threads", threads, 1), *(("ranks", value, 1) for value in ranks or ())):
        if value < least:
            raise ValueError(f"--{name} {value}: expected at least {least}")
    torch.set_num_threads(threads)
    sizes = sorted(set(ranks or WORLD_SIZES))
    with Progress(not quiet) as progress:
        rows = measure(codec or CODECS, sizes, numel, progress)
    return {
        "command": shlex.join(["gsync", *sys.argv[1:]]),
        **machine.circumstances(),
        "numel": numel,
        "world_sizes": sizes,
        "rows": rows,
    }


if __name__ == "__main__":
    typer.run(error)

"""`gsync bench grid`: codec="auto" beside every fixed choice and stock DDP, over many settings. docs/tuning.md has its table.

A setting is a number of hosts (network namespaces: root, iproute2), ranks on each, the rate of a link, and a model. Each is
one run of `gsync bench`, in which all choices train side by side. The codecs fixed are those that auto may use.

With --calibration each run is also predicted (`gsync plan --validate`).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from . import calibration as calibrations
from . import report, validate
from .timing import percentile

CODECS = ("fp32", "bf16", "int8")
HOSTS, RANKS_PER_HOST, RATES = (2, 4), (1, 2), ("100mbit", "1gbit", "10gbit", "")
MODELS = {
    "wide": ("mlp", "--layers", "3", "--width", "768", "--batch", "16"),
    "many small": ("mlp", "--layers", "64", "--width", "128", "--batch", "16"),
    "transformer": ("transformer", "--layers", "2", "--width", "192", "--heads", "4", "--batch", "4", "--sequence", "32",
                    "--vocabulary", "2000"),
}  # fmt: skip
_STEPS = {"100mbit": 8, "1gbit": 20, "10gbit": 60, "": 60}  # measured, of each choice: what is slow varies less
_LIMIT_S = 600.0
_NEAR_BEST, _ABOVE_STOCK = 1.05, 1.03  # what auto is measured against


@dataclass(frozen=True)
class Setting:
    """Where and what. `rate`: of a host's link, "" for none."""

    hosts: int
    ranks_per_host: int
    rate: str
    model: str

    def __str__(self) -> str:
        return f"{self.hosts} x {self.ranks_per_host}, {self.rate or 'no limit'}, {self.model}"

    def command(self, path: str, codecs: tuple[str, ...]) -> list[str]:
        """The run of `gsync bench` that writes `path`."""
        command = [sys.executable, "-m", "gsync.benchmarks.ddp", "--model", *MODELS[self.model], "--hosts", str(self.hosts)]
        command += ["--ranks-per-host", str(self.ranks_per_host), "--steps", str(_STEPS[self.rate]), "--quiet", "--json", path]
        command += ["--rate", self.rate] if self.rate else []
        for codec in (*codecs, "auto"):
            command += ["--codec", codec]
        for codec in codecs:
            command += ["--auto-codecs", codec]
        return [*command, "--rival", "stock again", "--rival", "gsync"]


def settings(every: bool) -> list[Setting]:
    """All 48, or half of them: each number of hosts and ranks with each rate once, with two hosts twice; models in turn."""
    places = list(itertools.product(HOSTS, RANKS_PER_HOST, RATES))
    if every:
        return [Setting(*place, model) for place, model in itertools.product(places, MODELS)]
    models = itertools.cycle(MODELS)
    return [Setting(*place, next(models)) for place in places for _ in range(2 if place[0] == HOSTS[0] else 1)]


def row_of(setting: Setting, results: dict[str, Any]) -> dict[str, Any]:
    """What a run says of auto.

    Raises:
        ValueError: a choice was wrong or refused, or auto is not there.
    """
    rows = {row["name"]: row for row in results["rows"]}
    for name, row in rows.items():
        if "step_ratio" not in row:
            raise ValueError(f"{setting}: {name}: {row.get('wrong') or row.get('refused')}")
    fixed = {name: row["step_ms"]["samples"] for name, row in rows.items() if name not in ("stock", "stock again", "auto auto")}
    auto = rows["auto auto"]["step_ms"]["samples"]
    best = min(fixed, key=lambda name: rows[name]["step_ratio"]["median"])
    # Round by round, as every ratio of the bench.
    to_best = percentile([own / other for own, other in zip(auto, fixed[best], strict=True)], 0.5)
    return {
        **vars(setting),
        "setting": str(setting),
        "stock_ms": rows["stock"]["step_ms"]["median"],
        "twin_ratio": rows["stock again"]["step_ratio"]["median"],
        "ratios": {name: rows[name]["step_ratio"]["median"] for name in fixed},
        "best": best,
        "best_ratio": rows[best]["step_ratio"]["median"],
        "auto_ratio": rows["auto auto"]["step_ratio"]["median"],
        "auto_interval": rows["auto auto"]["step_ratio"]["interval"],
        "to_best": to_best,
        "choice": rows["auto auto"]["stats"]["choice"],
    }


def grid(
    json_path: Annotated[str | None, typer.Option("--json", help="File for the table and all results.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All 48 settings, not 24.")] = False,
    only: Annotated[str, typer.Option(help="Settings that have this in their name.")] = "",
    codec: Annotated[list[str] | None, typer.Option(help="What auto may use, and what is fixed beside it.")] = None,
    calibration: Annotated[str | None, typer.Option(help="File of gsync plan --calibrate: predicts each run too.")] = None,
) -> None:
    """Measure codec="auto" against every fixed choice over a grid of hosts, links and models."""
    chosen = [one for one in settings(every) if only in str(one)]
    if not chosen:
        print(f"gsync bench grid: --only {only!r} is in no setting, such as {settings(every)[0]}", file=sys.stderr)
        raise typer.Exit(2)
    try:
        figures = calibrations.read(calibration) if calibration else None
        if json_path:
            report.check_file(json_path)
    except ValueError as error:
        print(f"gsync bench grid: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    out, rows, kept, errors, failed = report.console(), [], [], [], False
    for idx, setting in enumerate(chosen):
        try:
            results = _run(setting, tuple(codec or CODECS))
            row = row_of(setting, results)
            if figures is not None:
                row["predicted"] = [vars(one) | {"error": one.error} for one in validate.compare(results, figures)]
        except (ValueError, RuntimeError) as error:
            print(f"gsync bench grid: {error}", file=sys.stderr)
            failed = True
            continue
        errors += [abs(one["error"]) for one in row.get("predicted", ())]
        rows.append(row)
        kept.append(results)
        content = {"command": "gsync bench grid", "rows": rows, "results": kept}
        if not report.save(content, json_path, "gsync bench grid"):  # each time: the whole takes long
            raise typer.Exit(2)
        line = f"{idx + 1}/{len(chosen)} {setting}: auto {row['auto_ratio']:.3f} of stock, {row['to_best']:.3f} of {row['best']}"
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if rows:
        _print(rows, errors)
    raise typer.Exit(int(failed))


def _run(setting: Setting, codecs: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "results.json")
        try:
            ended = subprocess.run(setting.command(path, codecs), capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{setting}: took more than {_LIMIT_S:.0f} s") from None
        if ended.returncode:
            raise RuntimeError(f"{setting}: {ended.stderr.strip() or ended.stdout.strip()}")
        return dict(json.loads(Path(path).read_text()))


def _print(rows: list[dict[str, Any]], errors: list[float]) -> None:
    out = report.console()
    table = report.table(["hosts x ranks, link, model", "stock ms", "again", "best fixed", "", "auto", "to best", "auto uses"])
    for row in rows:
        numbers = [report.number(row["stock_ms"]), f"{row['twin_ratio']:.2f}", row["best"], f"{row['best_ratio']:.2f}"]
        table.add_row(row["setting"], *numbers, f"{row['auto_ratio']:.2f}", f"{row['to_best']:.2f}", row["choice"].split(" (")[0])
    out.print(table)
    slower = [row["setting"] for row in rows if row["to_best"] > _NEAR_BEST]
    above = [row["setting"] for row in rows if row["auto_ratio"] > _ABOVE_STOCK]
    for what, found in ((f"above {_NEAR_BEST} of the best fixed choice", slower), (f"above {_ABOVE_STOCK} of stock", above)):
        out.print(_count(what, found, len(rows)), markup=False, highlight=False, soft_wrap=True)
    if errors:
        text = f"error of {len(errors)} predictions: median {percentile(errors, 0.5):.1%}, worst {max(errors):.1%}"
        out.print(text, markup=False)


def _count(what: str, found: list[str], total: int) -> str:
    return f"auto {what}: {len(found)} of {total}" + (f" ({'; '.join(found)})" if found else "")

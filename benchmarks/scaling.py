"""The picture of `gsync plan`: which share of each step's time is computing, over the number of ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsync import cost

from .calibration import FAST, MEDIAN, SLOW
from .figures import BLACK, BLUE, GREEN, GREY, ORANGE, RED
from .planner import DDP, Choice, Planner

RANKS = tuple(2**power for power in range(13))
FORMATS = (".svg", ".png", ".pdf")
_CHOICES = 5
_STYLES: tuple[tuple[str, Any], ...] = ((BLACK, "-"), (GREY, "--"), (BLUE, "-"), (RED, "-."), (GREEN, "--"), (ORANGE, ":"))


@dataclass(frozen=True)
class Curve:
    """Efficiency of one choice: 1 where a step takes as long as alone.

    Attributes:
        label: in the legend.
        ranks: numbers of ranks.
        median, low, high: efficiency at each.
    """

    label: str
    ranks: tuple[int, ...]
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def check(path: Path) -> None:
    """Look before anything runs whether a picture can be drawn.

    Raises:
        ValueError: another ending than FORMATS.
        ModuleNotFoundError: matplotlib is missing; the message says how to get it.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot {path}: expected a file that ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "--plot draws with matplotlib: pip install --no-build-isolation '.[bench]' in gsync's source folder"
        )


def curves(planner: Planner, rows: Sequence[dict[str, Any]], ranks_per_host: int, step_ms: float) -> list[Curve]:
    """Return the efficiency of stock DDP and of the fastest choice of each exchange, from 1 to 4096 ranks.

    Below `ranks_per_host` ranks they are on one host.

    Args:
        rows: predictions, the fastest first.
    """
    chosen: dict[tuple[str, str], Choice] = {}
    for row in rows:
        choice = Choice(row["family"], row["codec"], row["exchange"], row["bucket_mb"])
        kind = choice.family, choice.name if choice.family == DDP else choice.exchange
        chosen.setdefault(kind, choice)
    found = []
    order = sorted(chosen.values(), key=lambda choice: (choice.family != DDP, choice.codec != "fp32"))
    for choice in [one for one in order if one.name != "fp16 hook"][: _CHOICES + 1]:
        points = []
        for ranks in RANKS:
            if ranks > ranks_per_host and ranks % ranks_per_host:
                continue
            topology = cost.Topology(ranks, min(ranks, ranks_per_host))
            if choice.family != DDP and planner.why_not(choice.codec, choice.exchange, topology):
                continue  # hierarchical on one host
            points.append((ranks, planner.predict(choice, topology)["step_ms"]))
        shares = {level: tuple(step_ms / steps[level] for _, steps in points) for level in (FAST, MEDIAN, SLOW)}
        label = f"DDP {choice.name}" if choice.family == DDP else choice.name
        found.append(Curve(label, tuple(ranks for ranks, _ in points), shares[MEDIAN], shares[SLOW], shares[FAST]))
    return found


def draw(curves: Sequence[Curve], results: dict[str, Any], path: str) -> None:
    """Write the picture to `path`."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for curve, (colour, dash) in zip(curves, _STYLES, strict=False):
        axes.plot(curve.ranks, curve.median, color=colour, ls=dash, lw=1.3, label=curve.label)
        axes.fill_between(curve.ranks, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.set_ylim(0, 1.05)
    axes.axvline(results["world_size"], color=GREY, lw=0.6, ls=":")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    axes.set_xlabel(f"ranks, {results['ranks_per_host']} a host", fontsize=8)
    axes.set_ylabel("step alone over predicted step", fontsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(path)

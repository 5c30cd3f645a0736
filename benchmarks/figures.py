"""The pictures of the report, as SVG: step times, overlap, wire bytes, errors, loss curves.

Colours are those of Okabe and Ito, which the colour-blind can tell apart. Stages also differ by pattern and curves by dashes, so
that a print in black says the same.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from .one_step import COMPUTE

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#999999"
_FAMILIES = {"ddp": GREY, "gsync": BLUE, "reducer": PINK}
# colour, pattern
_STAGES = {
    "forward": ("#DDDDDD", ""),
    "backward": (GREY, ""),
    "wait": (RED, "...."),
    "optimizer": ("#DDDDDD", ""),
    "pack": (ORANGE, "////"),
    "exchange": (SKY, ""),
    "unpack": (GREEN, "\\\\\\\\"),
}
_WIDTH = 5.6  # inches: a phone shows it at two thirds of its size
_ROW = 0.24
_CURVES = (BLACK, BLUE, RED, GREEN, ORANGE, PINK, SKY, GREY)
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":")
_SMOOTH = 5  # steps over which a loss curve is averaged


def label_of(row: dict[str, Any]) -> str:
    """Return how a rival is called beside its bar."""
    return row["name"] if row["family"] == "ddp" else f"{'gsync' if row['family'] == 'gsync' else 'reducer'} {row['name']}"


def step_times(results: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return bars of the median step, with p10 to p90 as whiskers, and a line where nothing is synchronised."""

    def draw(axes: Any) -> None:
        medians = [row["step_ms"]["median"] for row in rows]
        low = [row["step_ms"]["median"] - row["step_ms"]["p10"] for row in rows]
        high = [row["step_ms"]["p90"] - row["step_ms"]["median"] for row in rows]
        axes.barh(range(len(rows)), medians, color=_colours(rows))
        _, caps, _ = axes.errorbar(medians, range(len(rows)), xerr=[low, high], fmt="none", ecolor=BLACK, capsize=2, lw=0.8)
        for cap in caps:
            cap.set_markerfacecolor(BLACK)
        alone = results["no_sync_step_ms"]["median"]
        axes.axvline(alone, color=BLACK, ls="--", lw=0.8)
        axes.annotate("without synchronisation", (alone, -0.9), fontsize=7, ha="left", annotation_clip=False)
        axes.set_xlabel("step, ms: median, 10th to 90th percentile")

    return _bars(rows, draw)


def wire_bytes(rows: Sequence[dict[str, Any]]) -> str:
    """Return bars of the bytes that one rank sends per step."""
    largest = max((row["wire_bytes"] for row in rows), default=0.0)
    unit, name = (1e6, "MB") if largest >= 1e6 else (1e3, "kB")

    def draw(axes: Any) -> None:
        values = [row["wire_bytes"] / unit for row in rows]
        axes.barh(range(len(rows)), values, color=_colours(rows))
        for number, value in enumerate(values):
            axes.annotate(f" {value:.3g}", (value, number), va="center", fontsize=7)
        axes.set_xlim(right=1.15 * max(values, default=1.0))
        axes.set_xlabel(f"sent by one rank in a step, {name}")

    return _bars(rows, draw)


def errors(rows: Sequence[dict[str, Any]]) -> str:
    """Return the relative errors of the mean on a logarithmic axis."""

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        axes.hlines(range(len(rows)), 1e-9, [max(row["error"], 1e-9) for row in rows], color="#DDDDDD", lw=1)
        axes.scatter([max(row["error"], 1e-9) for row in rows], range(len(rows)), color=_colours(rows), s=24, zorder=3)
        axes.set_xlabel("relative error of the mean gradient")

    return _bars(rows, draw)


def losses(rows: Sequence[dict[str, Any]]) -> str:
    """Return the training loss on rank 0, averaged over a few steps, of every rival."""
    figure, axes = _figure(3.0)
    for number, row in enumerate(rows):
        values = row["train_losses"]
        reach = max(1, min(_SMOOTH, len(values) // 4))
        smooth = [
            sum(values[max(0, i - reach + 1) : i + 1]) / len(values[max(0, i - reach + 1) : i + 1]) for i in range(len(values))
        ]
        style = {"color": _CURVES[number % len(_CURVES)], "ls": _DASHES[number // 2 % len(_DASHES)], "lw": 1.1}
        axes.plot(range(1, len(values) + 1), smooth, label=label_of(row), **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return _svg(figure)


def overlap(rows: Sequence[dict[str, Any]]) -> str:
    """Return one step of each rival on rank 0: what computes above, what synchronises below."""
    figure, axes = _figure(0.62 * len(rows) + 0.9)
    for number, row in enumerate(rows):
        for span in row["one_step"]:
            colour, pattern = _STAGES[span["what"]]
            top = number - 0.36 if span["what"] in COMPUTE else number + 0.02
            width = span["end_ms"] - span["begin_ms"]
            axes.broken_barh([(span["begin_ms"], width)], (top, 0.32), facecolor=colour, hatch=pattern, edgecolor="white", lw=0.3)
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms from the begin of the step")
    from matplotlib.patches import Patch

    used = {span["what"] for row in rows for span in row["one_step"]}
    handles = [
        Patch(facecolor=_STAGES[what][0], hatch=_STAGES[what][1], edgecolor="white", label=what)
        for what in _STAGES
        if what in used
    ]
    axes.legend(
        handles=handles,
        fontsize=7,
        frameon=False,
        ncols=len(handles),
        loc="lower center",
        bbox_to_anchor=(0.4, 1.0),
        columnspacing=1.0,
        handlelength=1.4,
    )
    return _svg(figure)


def _colours(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [_FAMILIES[row["family"]] for row in rows]


def _bars(rows: Sequence[dict[str, Any]], draw: Callable[[Any], None]) -> str:
    figure, axes = _figure(_ROW * len(rows) + 0.7)
    draw(axes)
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows])
    axes.invert_yaxis()
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=[BLACK])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    return figure, axes


_drawn = 0


def _svg(figure: Any) -> str:
    """As an element to put into a page: as wide as there is room, text as text, names that no other picture has."""
    import matplotlib

    global _drawn
    _drawn += 1
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"gsync-{_drawn}", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1)
    for kind in ('id="', 'xlink:href="#', "url(#"):
        svg = svg.replace(kind, f"{kind}p{_drawn}-")
    return svg

"""What `gsync bench convergence` found, as tables and as a picture: training losses above, below where they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report

_SUFFIXES = (".svg", ".png")
_MODELS = {"digits-mlp": "digits, MLP", "digits-cnn": "digits, CNN", "text": "characters, transformer"}
_COLOURS = {
    "fp32": "black",
    "fp16": "tab:gray",
    "bf16": "tab:blue",
    "fp8_e4m3": "tab:green",
    "fp8_e5m2": "tab:olive",
    "int8": "tab:orange",
    "int4": "tab:red",
}
_SMOOTH = 10  # steps over which a curve is averaged
_POINTS = 40  # of a curve, at most
_LINEAR = 5.0  # percent: differences up to here are drawn on a linear axis, larger ones beyond it on a logarithmic one


def print_table(results: dict[str, Any]) -> None:
    """Print for each model and number of ranks one row per codec, with error feedback on the left and without on the right."""
    out = report.console()
    rows = results["rows"]
    for model, world_size in dict.fromkeys((row["model"], row["ranks"]) for row in rows):
        here = {(row["codec"], row["error_feedback"]): row for row in rows if (row["model"], row["ranks"]) == (model, world_size)}
        base = here["fp32", False]
        out.print(f"[bold]{model}[/bold], {world_size} ranks: fp32 ends at {base['loss']:.4f}, accuracy {base['accuracy']:.1f} %")
        grid = report.table(["", "with e.f.", "95 % interval", "acc", "without", "95 % interval", "acc"])
        for codec in dict.fromkeys(codec for codec, _ in here if codec != "fp32"):
            grid.add_row(f" {codec}", *_cells(here.get((codec, True))), *_cells(here.get((codec, False))))
        out.print(grid)
        out.print()
    out.print("loss - fp32 loss in % of the fp32 loss, mean over seeds, paired; interval by")
    out.print("Student's t. loss: in training, of all ranks, averaged over the last steps.")
    out.print("acc: %, on data kept back. e.f.: error feedback, on both encodings.")
    if results["quick"]:
        out.print("--quick: too few steps and seeds to judge by.")


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    low, high = (f"{100 * end:+.2f}" if math.isfinite(end) else "-" for end in row["interval"])
    difference = f"{100 * row['difference']:+.2f}"
    if row.get("within_limit") is False:
        difference = f"[bold red]{difference}[/bold red]"
    return [difference, f"{low} to {high}", f"{row['accuracy']:.1f}"]


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of docs/convergence.md: a row per codec, a column per model and number of ranks."""
    rows = results["rows"]
    columns = list(dict.fromkeys((row["model"], row["ranks"]) for row in rows))
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    lines_of: dict[tuple[str, bool], dict[tuple[str, int], Any]] = {}
    for row in rows:
        lines_of.setdefault((row["codec"], row["error_feedback"]), {})[row["model"], row["ranks"]] = row

    def difference(row: dict[str, Any]) -> str:
        low, high = row["interval"]
        return f"{100 * row['difference']:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"

    def accuracy(row: dict[str, Any]) -> str:
        return f"{row['accuracy']:.1f}"

    head = "| | " + " | ".join(f"{model}, {ranks}" for model, ranks in columns) + " |\n" + "|---" * (len(columns) + 1) + "|\n"
    tables = []
    for feedback, cell in ((True, difference), (False, difference), (True, accuracy), (False, accuracy)):
        lines = [
            f"| `{codec}` | " + " | ".join(cell(lines_of[codec, feedback][column]) for column in columns) + " |\n"
            for codec in codecs
            if (codec, feedback) in lines_of and (codec != "fp32" or cell is accuracy)
        ]
        tables.append(head + "".join(lines))
    return "\n".join(tables)


def check_picture(path: str) -> None:
    """Raise now what `draw` would raise after the work.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says how to install it.
        ValueError: the file has another ending than .svg or .png.
    """
    try:
        import matplotlib as _matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"--picture {path}: needs matplotlib: pip install matplotlib") from error
    if Path(path).suffix not in _SUFFIXES:
        raise ValueError(f"--picture {path}: expected a name that ends in {' or '.join(_SUFFIXES)}")


def draw(results: dict[str, Any], path: str) -> None:
    """Draw the results of `convergence.run` to the file `path`."""
    import matplotlib
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in results["rows"]))
    world_size = max(row["ranks"] for row in results["rows"])
    # Text stays text, and no identifier or date changes between two pictures of the same results.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gsync", "font.size": 8}):
        figure = Figure(figsize=(3.2 * len(models), 5.6), layout="constrained")
        axes = figure.subplots(2, len(models), squeeze=False)
        for column, model in enumerate(models):
            rows = [row for row in results["rows"] if row["model"] == model]
            _draw_curves(axes[0][column], rows, world_size)
            axes[0][column].set_title(f"{_MODELS.get(model, model)}, {world_size} ranks")
            _draw_differences(axes[1][column], rows)
        axes[0][0].set_ylabel("training loss, with error feedback")
        axes[0][-1].legend(fontsize=7)
        figure.legend(*axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=150)
    if path.endswith(".svg"):
        text = Path(path).read_text()
        Path(path).write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def smooth(curve: Sequence[float], num: int = _SMOOTH) -> list[float]:
    """Return at each step the mean of that step and up to `num` - 1 before it."""
    return [math.fsum(part) / len(part) for end in range(1, len(curve) + 1) for part in [curve[max(0, end - num) : end]]]


def _draw_curves(axes: Any, rows: list[dict[str, Any]], world_size: int) -> None:
    for row in rows:
        if row["ranks"] != world_size or not (row["error_feedback"] or row["codec"] in ("fp32", "int4")):
            continue
        curve = smooth(row["curve"])
        every = max(1, -(-len(curve) // _POINTS))
        steps = [*range(0, len(curve) - 1, every), len(curve) - 1]
        without = not row["error_feedback"] and row["codec"] != "fp32"
        style: dict[str, Any] = {"linewidth": 0.8, "linestyle": ":" if without else "-"}
        if row["codec"] == "fp32":
            style = {"linewidth": 2.5, "alpha": 0.35}
        axes.plot(
            [step + 1 for step in steps],
            [curve[step] for step in steps],
            color=_COLOURS[row["codec"]],
            label=row["codec"] + (" without" if without else ""),
            **style,
        )
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)


def _draw_differences(axes: Any, rows: list[dict[str, Any]]) -> None:
    codecs = list(dict.fromkeys(row["codec"] for row in rows if row["codec"] != "fp32"))
    sizes = sorted({row["ranks"] for row in rows})
    kinds = [(size, feedback) for feedback in (True, False) for size in sizes]
    for idx, (size, feedback) in enumerate(kinds):
        shift = 0.6 * ((idx + 0.5) / len(kinds) - 0.5)
        here = [row for row in rows if row["codec"] != "fp32" and (row["ranks"], row["error_feedback"]) == (size, feedback)]
        if not here:
            continue
        axes.errorbar(
            [100 * row["difference"] for row in here],
            [codecs.index(row["codec"]) + shift for row in here],
            xerr=[100 * (row["interval"][1] - row["difference"]) for row in here],
            fmt="o" if feedback else "x",
            markersize=3,
            linewidth=0.8,
            color="tab:blue" if feedback else "tab:red",
            alpha=1.0 if size == sizes[-1] else 0.5,
            label=f"{size} ranks, {'with' if feedback else 'without'} error feedback",
        )
    axes.axvline(0, color="black", linewidth=0.6)
    if 100 * max(abs(end) for row in rows for end in row["interval"] if math.isfinite(end)) > _LINEAR:
        axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.set_xlabel("loss - fp32 loss, % (95 % interval)")
    axes.set_yticks(range(len(codecs)), codecs)
    axes.invert_yaxis()

"""The table of `gsync plan`, 80 columns wide: the fastest first, stock DDP and torch's hooks always among them."""

from __future__ import annotations

from typing import Any

from . import planner
from .calibration import FAST, MEDIAN, SLOW
from .report import console, count, number, table

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def print_table(results: dict[str, Any], top: int) -> None:
    """Print at most `top` rows, and below them the rows of DDP that did not get a place, with how to read them."""
    rows = results["rows"]
    shown = rows[:top] + [row for row in rows[top:] if row["family"] == planner.DDP]
    wire, host, memory = (_unit(shown, name) for name in ("wire_bytes", "host_bytes", "memory"))
    out = console()
    hosts = results["world_size"] // results["ranks_per_host"]
    out.print(f"[bold]{results['model']}[/bold], {count(results['parameters'])} parameters", highlight=False)
    out.print(
        f"{results['world_size']} rank{'s' if results['world_size'] > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}, "
        f"{results['device']}: "
        f"{number(results['step_ms'])} ms a step, {number(results['backward_ms'])} of it backward\n"
    )
    many = len({row["bucket_mb"] for row in rows}) > 1
    columns = [*(["MiB"] if many else []), "step ms", "range", "ratio", "exposed"]
    grid = table(["", *columns, f"wire {wire[1]}", f"host {host[1]}", f"mem {memory[1]}"])
    for row in shown:
        step = row["step_ms"]
        name = row["name"] if row["family"] != planner.DDP else f"DDP {row['name']}"
        size = "dflt" if row["bucket_mb"] is None else f"{row['bucket_mb']:g}"
        cells = [
            *([size] if many else []),
            number(step[MEDIAN]),
            f"{number(step[FAST])}-{number(step[SLOW])}",
            f"{row['ratio']:.2f}",
            number(row["exposed_ms"][MEDIAN]),
            number(row["wire_bytes"] / wire[0]),
            number(row["host_bytes"] / host[0]),
            number(_memory(row) / memory[0]),
        ]
        grid.add_row(f"[bold]{name}[/bold]" if row["name"] == planner.STOCK else name, *cells)
    out.print(grid)
    left_out = len(rows) - len(shown)
    notes = [
        "",
        *([f"{left_out} slower rows left out; --top shows more, --json has all."] if left_out else []),
        "step, range: predicted, with every figure measured at its median, and from its",
        "faster quartile to its slower one. ratio: to stock. exposed: ms not hidden.",
        "wire: bytes one rank sends per step; host: what leaves a host; mem: payload",
        "buffers and residuals of a rank. What is left out: docs/tuning.md.",
    ]
    for note in notes:
        out.print(note, markup=False)
    out.print(f"figures: {results['calibration']}", markup=False, soft_wrap=True)


def _memory(row: dict[str, Any]) -> float:
    return float(row["buffer_bytes"] + row["residual_bytes"])


def _unit(rows: list[dict[str, Any]], name: str) -> tuple[float, str]:
    """The unit in which the largest value has at most four digits before the point."""
    largest = max((_memory(row) if name == "memory" else row[name] for row in rows), default=0.0)
    return next((unit for unit in _UNITS if largest >= 10 * unit[0]), _UNITS[-1])

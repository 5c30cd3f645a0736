"""Results as a table that fits 80 columns, and as JSON with all that is needed to repeat them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gsync.launch import Place
from gsync.machine import circumstances

from .options import Options
from .workloads import full_sizes

WIDTH = 80
FAMILIES = {"ddp": "PyTorch DDP", "gsync": "gsync", "reducer": "gsync.GradReducer"}


def with_circumstances(results: dict[str, Any], options: Options, place: Place) -> dict[str, Any]:
    """Return `results` together with what was typed, the machine, versions and commit."""
    return {
        "command": options.command,
        **circumstances(),
        "model": options.model,
        "sizes": {name: size for name, size in vars(full_sizes(options.model, options.sizes)).items() if size is not None},
        "hosts": options.hosts or max(1, place.world_size // place.local_world_size),
        "rate": options.rate,
        "steps": options.num_steps,
        "warmup": options.warmup,
        "seed": options.seed,
        "threads": options.threads,
        "gsync_config": dict(options.fields),
        "bucket_cap_mb": options.bucket_cap_mb,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        **results,
    }


def write_json(results: dict[str, Any], path: str) -> None:
    """Write `results` to `path` as indented JSON, lists of numbers on one line; NaN and infinity become null."""
    text = json.dumps(_finite(results), indent=1, allow_nan=False)
    text = re.sub(r'\[[^][{}"]*\]', lambda numbers: " ".join(numbers.group().split()), text)
    Path(path).write_text(text + "\n")


def save(results: dict[str, Any], path: str | None, command: str) -> bool:
    """Write `results` to `path`, if there is one, or say on standard error why not; return whether all is well."""
    try:
        if path:
            write_json(results, path)
    except OSError as error:  # a full disk, a folder that has gone
        print(f"{command}: {path} was not written: {error.strerror or error}", file=sys.stderr)
        return False
    return True


def check_file(path: str) -> None:
    """Look before anything runs whether `write_json` can write to `path`.

    Raises:
        ValueError: it cannot.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(f"--json {path}: there is no folder {str(folder)!r}")
    if Path(path).is_dir():
        raise ValueError(f"--json {path}: is a folder; expected the name of a file")
    if not os.access(Path(path) if Path(path).exists() else folder, os.W_OK):
        raise ValueError(f"--json {path}: no permission to write there")


def console() -> Any:
    """Return a rich console on standard output, 80 columns wide and plain enough for a file."""
    from rich.console import Console

    return Console(width=WIDTH, highlight=False, soft_wrap=False)


def print_table(results: dict[str, Any]) -> None:
    """Print the main job's table and how to read it."""
    out = console()
    rows = results["rows"]
    digits = any("accuracy" in row for row in rows)
    link = any("link_bytes" in row for row in rows)
    wire, wire_unit = _byte_unit(row.get("wire_bytes", 0.0) for row in rows)
    notes: list[str] = []
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("step ms", lambda row: number(row["step_ms"]["median"])),
        ("p10", lambda row: number(row["step_ms"]["p10"])),
        ("p90", lambda row: number(row["step_ms"]["p90"])),
        ("ratio", lambda row: f"{row['step_ratio']['median']:.3f}" if "step_ratio" in row else "-"),
        (f"wire {wire_unit}", lambda row: number(row["wire_bytes"] / wire)),
        ("exposed", lambda row: number(row["exposed_ms"]["median"]) if "exposed_ms" in row else "-"),
        ("error", lambda row: f"{row['error']:.0e}"),
    ]
    last: list[tuple[str, Callable[[dict[str, Any]], str]]] = []
    if link:
        columns.insert(5, (f"link {wire_unit}", lambda row: number(row["link_bytes"] / wire) if "link_bytes" in row else "-"))
    if digits:
        last = [("loss", lambda row: f"{row['loss']:.2f}"), ("acc", lambda row: f"{row['accuracy']:.1f}")]
    out.print(_headline(results))
    out.print(_table(rows, columns + ([] if link else last), notes))
    if link and last:
        out.print(_table([row for row in rows if "loss" in row], last, []))
    for note in [*notes, *_legend(results, digits, link)]:
        out.print(note, markup=False)


def table(columns: Sequence[str]) -> Any:
    """Return an empty rich table: first column to the left, numbers to the right."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for idx, name in enumerate(columns):
        grid.add_column(name, justify="left" if idx == 0 else "right", no_wrap=True)
    return grid


def _table(rows: list[dict[str, Any]], columns: list[tuple[str, Callable[[dict[str, Any]], str]]], notes: list[str]) -> Any:
    """A table of `rows`; what has to be said of a row in words is numbered and added to `notes`."""
    grid = table(["", *(name for name, _ in columns)])
    family = ""
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            grid.add_row(f"[bold]{FAMILIES[family]}[/bold]")
        remark, cells = row["note"], []
        if "refused" in row:
            remark, cells = f"not run: {row['refused']}", ["n/a"]
        elif "wrong" in row:
            remark, cells = f"WRONG, not timed: {row['wrong']}", ["[bold red]WRONG[/bold red]"]
        else:
            cells = [cell(row) for _, cell in columns]
        mark = ""
        if remark:
            notes.append(f"[{len(notes) + 1}] {row['name']}: {remark}")
            mark = f" \\[{len(notes)}]"
        grid.add_row(f" {row['name']}{mark}", *cells)
    return grid


def _headline(results: dict[str, Any]) -> str:
    hosts = f" on {results['hosts']} hosts" if results["hosts"] > 1 else ""
    links = f" with {results['rate']} links" if results["rate"] else ""
    sizes = ", ".join(f"{name} {size}" for name, size in results["sizes"].items())
    return (
        f"[bold]{results['model']}[/bold] ({sizes}), {count(results['parameters'])} parameters\n"
        f"{results['world_size']} ranks{hosts}{links}, {results['device']}, threads per rank: {results['threads']}, "
        f"{results['steps']} steps of each\n"
    )


def _legend(results: dict[str, Any], digits: bool, link: bool) -> list[str]:
    alone = results["no_sync_step_ms"]["median"]
    return [
        "",
        "step: forward, backward, optimizer of the slowest rank. ratio: to stock, paired",
        "step by step (median); what 'stock again' is off from 1 is noise.",
        "wire: bytes one rank sends per step; for DDP by formula, for gsync as counted.",
        *(["link: bytes the busiest host sent per step, read from its interface."] if link else []),
        f"exposed: ms a step takes longer than under no_sync in the same round ({number(alone)}).",
        "error: relative L2 error of the mean, against the fp64 mean of all ranks' fp32.",
        *(["loss, acc %: after training, on 360 digits kept back."] if digits else []),
    ]


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def count(value: int) -> str:
    """With one decimal in millions, or in thousands."""
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.0f} k"


def _byte_unit(values: Any) -> tuple[float, str]:
    return (1e6, "MB") if max(values, default=0.0) >= 1e6 else (1e3, "kB")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""`gsync bench --report FOLDER`: the results as one page that needs nothing else, neither files nor a network."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from . import figures, report

PAGE = "index.html"
_NEEDED = {"jinja2": "jinja2", "matplotlib": "matplotlib"}


def check(folder: str) -> None:
    """Look before anything runs whether the page can be made; make the folder where it is missing.

    Raises:
        ValueError: it cannot be written there.
        ModuleNotFoundError: a package of the extra `bench` is missing.
    """
    for module, package in _NEEDED.items():
        try:
            missing = importlib.util.find_spec(module) is None
        except ValueError:  # a module that is hidden
            missing = True
        if missing:
            raise ModuleNotFoundError(f"--report needs {package}: pip install {package}")
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise ValueError(f"--report {folder}: there is a file of that name; expected a folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise ValueError(f"--report {folder}: cannot be written: {error.strerror or error}") from None


def write(results: dict[str, Any], folder: str) -> Path:
    """Write the page and the results as JSON beside it, and return the page's path.

    Raises:
        OSError: there is no room, or the folder has gone.
    """
    page = Path(folder) / PAGE
    report.write_json(results, str(Path(folder) / "results.json"))
    part = page.with_suffix(".part")
    try:
        part.write_text(render(results), encoding="utf-8")
        os.replace(part, page)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return page


def render(results: dict[str, Any]) -> str:
    """Return the page."""
    import jinja2

    rows = results["rows"]
    ran = [row for row in rows if "step_ms" in row]
    shown = [row for row in ran if row.get("one_step")]
    curves = [row for row in ran if len(row.get("train_losses", ())) > 1]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pictures = {
        "steps": figures.step_times(results, ran),
        "overlap": figures.overlap(shown) if shown else "",
        "wire": figures.wire_bytes(ran),
        "errors": figures.errors(ran),
        "losses": figures.losses(curves) if curves else "",
    }
    return environment.get_template("report.html.j2").render(
        results=results,
        families=report.FAMILIES,
        columns=_columns(ran),
        rows=[_row(row, ran) for row in rows],
        pictures=pictures,
        facts=_facts(results),
        parameters=report.count(results["parameters"]),
        best=_best(ran),
    )


def _columns(ran: list[dict[str, Any]]) -> list[str]:
    link = ["link, MB"] if any("link_bytes" in row for row in ran) else []
    held_back = ["loss", "accuracy, %"] if any("accuracy" in row for row in ran) else []
    return ["step, ms", "p10–p90", "to stock", "wire, MB", *link, "exposed, ms", "error", *held_back]


def _row(row: dict[str, Any], ran: list[dict[str, Any]]) -> dict[str, Any]:
    """Its name, what goes into the columns, and what has to be said in words."""
    found = {"family": row["family"], "name": row["name"], "note": row["note"], "cells": []}
    if "refused" in row:
        return found | {"note": f"not run: {row['refused']}"}
    if "wrong" in row:
        return found | {"note": f"wrong, not timed: {row['wrong']}"}
    number = report.number
    cells = [
        number(row["step_ms"]["median"]),
        f"{number(row['step_ms']['p10'])}–{number(row['step_ms']['p90'])}",
        f"{row['step_ratio']['median']:.3f}" if "step_ratio" in row else "–",
        number(row["wire_bytes"] / 1e6),
    ]
    if any("link_bytes" in one for one in ran):
        cells.append(number(row["link_bytes"] / 1e6) if "link_bytes" in row else "–")
    cells += [number(row["exposed_ms"]["median"]) if "exposed_ms" in row else "–", f"{row['error']:.0e}"]
    if any("accuracy" in one for one in ran):
        cells += [f"{row['loss']:.3f}", f"{row['accuracy']:.1f}"] if "accuracy" in row else ["–", "–"]
    return found | {"cells": cells}


def _best(ran: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest rival against stock, and what the machine cannot resolve."""
    rivals = [row for row in ran if "step_ratio" in row and row["name"] not in ("stock", "stock again")]
    if not rivals:
        return None
    row = min(rivals, key=lambda one: one["step_ratio"]["median"])
    again = next((one["step_ratio"]["median"] for one in ran if one["name"] == "stock again"), None)
    low, high = row["step_ratio"]["interval"]
    return {"label": figures.label_of(row), "ratio": row["step_ratio"]["median"], "low": low, "high": high, "noise": again}


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The machine, and all that is needed to run it again."""
    machine, versions = results["machine"], results["versions"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "none"
    options = {**results["gsync_config"], "bucket_cap_mb": results["bucket_cap_mb"], "seed": results["seed"]}
    return [
        ("machine", f"{machine['host']}: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"),
        ("GPUs", gpus),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
        ("commit", results["commit"] or "not known"),
        ("threads of a rank", str(results["threads"])),
        ("options", ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)),
    ]

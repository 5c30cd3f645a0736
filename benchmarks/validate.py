"""Predicts the rows of a file that `gsync bench --json` wrote, and prints how far off it was: `gsync plan --validate FILE`.

The step without communication, forward and optimizer are taken from the same file: what is tested is the schedule and the costs,
not whether somebody guesses how long a model computes. Links between namespaces are what tc was told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsync import cost
from gsync.schedule import Training

from . import calibration as calibrations
from . import network, planner, report, shapes
from .calibration import FAST, MEDIAN, SLOW, Calibration
from .timing import percentile
from .workloads import Sizes

# tc counts Ethernet frames without preamble: of 1514 bytes 1448 are TCP's payload, with time stamps, at the usual MTU of 1500.
# What comes the other way is acknowledged every other frame, by one of 66 bytes.
FRAME_SHARE = 1448 / (1514 + 66 / 2)
_KINDS = {"stock": "fp32", "stock again": "fp32", "fp16 hook": "fp16", "bf16 hook": "bf16"}


@dataclass(frozen=True)
class Compared:
    """One row of a bench's results beside its prediction, in ms."""

    label: str
    measured_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def run(path: str, calibration_path: str | None, json_path: str | None, cores_per_rank: float | None = None) -> int:
    """Print the comparison, and write it; return the exit code.

    Args:
        cores_per_rank: where other programs ran beside the bench; None: all of the machine.

    Raises:
        ValueError: the file is none of `gsync bench --json`, or there is no calibration, or it does not fit.
    """
    results = read(path)
    if calibration_path is None:
        raise ValueError("--validate needs --calibration FILE of the same machine; gsync plan --calibrate FILE writes it")
    calibration = calibrations.read(calibration_path)
    rows = compare(results, calibration, cores_per_rank)
    out = report.console()
    out.print(f"[bold]{Path(path).name}[/bold]: {results['model']}, {results['world_size']} ranks, {results['hosts']} hosts, "
              f"{results['rate'] or 'no limit'}")  # fmt: skip
    grid = report.table(["", "measured ms", "predicted", "range", "error"])
    for row in rows:
        low, high = report.number(row.low_ms), report.number(row.high_ms)
        cells = [report.number(row.measured_ms), report.number(row.predicted_ms), f"{low}-{high}", f"{row.error:+.1%}"]
        grid.add_row(row.label, *cells)
    out.print(grid)
    sizes = sorted(abs(row.error) for row in rows)
    out.print(f"error of {len(rows)} predictions: median {percentile(sizes, 0.5):.1%}, worst {sizes[-1]:.1%}")
    out.print(f"figures: {calibration.source}", markup=False, soft_wrap=True)
    content = {
        "file": path,
        "calibration": calibration.source,
        "median_error": percentile(sizes, 0.5),
        "worst_error": sizes[-1],
        "rows": [{**vars(row), "error": row.error} for row in rows],
    }
    return 0 if report.save(content, json_path, "gsync plan") else 2


def read(path: str) -> dict[str, Any]:
    """Return the content of a bench's file.

    Raises:
        ValueError: it is none.
    """
    try:
        results = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--validate {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--validate {path}: is no JSON: {error}") from None
    needed = ("model", "sizes", "world_size", "hosts", "rate", "threads", "device", "no_sync_step_ms", "rows", "machine")
    missing = [name for name in needed if not isinstance(results, dict) or name not in results]
    if missing:
        raise ValueError(f"--validate {path}: has no {missing[0]!r}; expected what gsync bench --json writes")
    return dict(results)


def compare(results: dict[str, Any], calibration: Calibration, cores_per_rank: float | None = None) -> list[Compared]:
    """Return each row that was measured and can be predicted; `cores_per_rank` as for `run`.

    Raises:
        ValueError: no row can, or the calibration is of another device, or lacks a link.
    """
    if calibration.device != results["device"]:
        raise ValueError(f"the run was on {results['device']}, the calibration is of {calibration.device}")
    topology = cost.Topology(results["world_size"], results["world_size"] // results["hosts"])
    made = planner.Planner(
        _parameters(results), _settings(results, topology, cores_per_rank), calibration, _network(results, topology, calibration)
    )
    found = []
    for row in results["rows"]:
        choice = _choice(row, results["bucket_cap_mb"])
        if choice is None or "step_ms" not in row:
            continue
        steps = made.predict(choice, topology)["step_ms"]
        label = row["name"] if choice.family != planner.REDUCER else f"reducer {row['name']}"
        found.append(Compared(label, row["step_ms"]["median"], steps[MEDIAN], steps[FAST], steps[SLOW]))
    if not found:
        raise ValueError("the file has no row that was measured and can be predicted")
    return found


def _parameters(results: dict[str, Any]) -> list[shapes.Parameter]:
    sizes = {name: size for name, size in results["sizes"].items() if name in vars(Sizes())}
    return shapes.read_model(results["model"], Sizes(**sizes))[1]


def _settings(results: dict[str, Any], topology: cost.Topology, cores_per_rank: float | None = None) -> planner.Settings:
    """The step from no_sync; of it forward and optimizer as gsync's timelines had them."""
    alone_s = 1e-3 * results["no_sync_step_ms"]["median"]
    explained = [row["explained"] for row in results["rows"] if row.get("explained")]
    if explained:
        forward, optimizer = (1e-3 * percentile([one[name] for one in explained], 0.5) for name in ("forward_ms", "optimizer_ms"))
        shrink = min(1.0, 0.9 * alone_s / max(1e-9, forward + optimizer))  # they were measured with other steps beside them
        forward, optimizer = shrink * forward, shrink * optimizer
    else:
        forward, optimizer = alone_s / 3, 0.0
    cores = 0.0
    if results["device"] == "cpu":  # namespaces share this machine; ranks that a launcher started have one each host
        sharing = results["world_size"] if "--hosts" in results.get("command", "") else topology.ranks_per_host
        cores = cores_per_rank or results["machine"]["cores"] / sharing
    fields = results.get("gsync_config", {})
    return planner.Settings(
        Training(forward, alone_s - forward - optimizer, optimizer, min(results["threads"], cores or results["threads"]), cores),
        slice_mb=fields.get("slice_mb", 25.0),
        block_size=fields.get("block_size"),
        error_feedback=fields.get("error_feedback", False),
        exempt=tuple(fields["exempt"]) if fields.get("exempt") is not None else None,
        exempt_codec=fields.get("exempt_codec", "bf16"),
        copies=not results["gradient_as_bucket_view"],
    )


def _network(results: dict[str, Any], topology: cost.Topology, calibration: Calibration) -> Any:
    """Without a rate, namespaces are joined by this machine's memory: the link inside a host."""
    told = planner.Told(network.parse_rate(results["rate"]) / 8 * FRAME_SHARE if results["rate"] else None)
    inter = calibration.inter or calibration.intra
    for used, link, name in ((topology.hosts > 1, inter, "between"), (topology.ranks_per_host > 1, calibration.intra, "inside")):
        if used and link is None:
            raise ValueError(f"the link {name} hosts is not in the calibration; gsync plan --calibrate FILE measures it")
    links = {"inter": planner.link_of(told, inter), "intra": planner.link_of(planner.Told(), calibration.intra)}
    return planner.combine(calibration, topology, **links)


def _choice(row: dict[str, Any], bucket_mb: float | None) -> planner.Choice | None:
    """What a row of the bench is here; None for what is not predicted."""
    if row["family"] == planner.DDP:
        return planner.Choice(planner.DDP, _KINDS[row["name"]], bucket_mb=bucket_mb) if row["name"] in _KINDS else None
    codec, exchange = row["name"].split()
    if codec == "auto":
        return None
    return planner.Choice(row["family"], codec, exchange, bucket_mb)

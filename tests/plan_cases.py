"""What the tests of `gsync plan` share: a calibration of round numbers, and ways to run the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from gsync.benchmarks import plan
from gsync.benchmarks.calibration import CASTS, Calibration, LinkFigures, Spread, exactly
from typer.testing import CliRunner

from gsync.config import CODECS

# 10 GB/s for everything that computes, in 1 µs at least.
_OPERATION = Spread(0.9e-10, 1e-10, 1.2e-10)
FLAGS = ["--step-ms", "100", "--world-size", "8", "--ranks-per-host", "2", "--inter-rate", "1gbit", "--inter-latency-us", "50",
         "--cores-per-rank", "1"]  # fmt: skip


def link(bytes_per_s: float = 2e9, latency_s: float = 2e-5) -> LinkFigures:
    """A link that takes 0.2 ns of a core for each byte."""
    cpu = exactly(2e-10)
    return LinkFigures(exactly(1 / bytes_per_s), exactly(latency_s), exactly(5e-6), cpu, dict.fromkeys(("fp32", *CASTS), cpu))


def calibration(device: str = "cpu", intra: LinkFigures | None = None, inter: LinkFigures | None = None) -> Calibration:
    """Operations at 10 GB/s of gradients."""
    names = ("pack", "pack_feedback", "unpack", "reduce_read", "reduce_write")
    operations = {**dict.fromkeys(names, _OPERATION), "fixed": exactly(1e-6)}
    return Calibration(
        device,
        2,
        dict.fromkeys(CODECS, operations),
        _OPERATION,
        exactly(1e-6),
        {codec: {"to": _OPERATION, "back": _OPERATION} for codec in CASTS},
        intra,
        inter,
        "round numbers",
    )


def write_calibration(path: Path, device: str = "cpu") -> str:
    """A file of it, as --calibrate writes one, with a link inside the host."""
    path.write_text(json.dumps(calibration(device, intra=link()).to_dict()))
    return str(path)


def run(arguments: Sequence[str]) -> Any:
    """`gsync plan` with these arguments."""
    app = typer.Typer()
    app.command()(plan.plan)
    return CliRunner().invoke(app, list(arguments))

"""The table that `gsync bench` prints."""

from __future__ import annotations

from typing import Any

import pytest
from gsync.benchmarks import report, rivals

from gsync import config


def _row(rival: rivals.Rival, link: bool) -> dict[str, Any]:
    summary = {"median": 1234.5, "p10": 1100.4, "p90": 1344.6} if link else {"median": 24.25, "p10": 17.12, "p90": 61.34}
    row = {
        "family": rival.family,
        "name": rival.name,
        "note": rival.note,
        "step_ms": summary,
        "step_ratio": {"median": 0.567},
        "wire_bytes": 1510.0e6 if link else 451.0e3,
        "exposed_ms": summary,
        "error": 3e-8,
    }
    return row | ({"link_bytes": 1520.0e6} if link else {"loss": 0.123, "accuracy": 97.5})


@pytest.mark.parametrize("link", [False, True])
def test_every_row_is_whole_in_80_columns(link: bool, capsys: pytest.CaptureFixture[str]) -> None:
    everyone = rivals.make_rivals([*rivals.DDP_RIVALS, rivals.GSYNC, rivals.REDUCER], config.CODECS, (), {})
    results = {
        "model": "transformer",
        "sizes": {"layers": 12, "width": 2048},
        "parameters": 25.2e6,
        "world_size": 16,
        "hosts": 4,
        "rate": "1gbit",
        "device": "cpu",
        "threads": 1,
        "steps": 1000,
        "no_sync_step_ms": {"median": 217.0},
        "rows": [_row(rival, link) for rival in everyone],
    }
    report.print_table(results)
    shown = capsys.readouterr().out
    assert all(len(line) <= report.WIDTH for line in shown.splitlines())
    assert "…" not in shown
    for rival in everyone:
        assert any(line.startswith(f" {rival.name}") and "0.567" in line for line in shown.splitlines()), rival.label

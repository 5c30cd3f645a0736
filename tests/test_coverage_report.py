"""The report of covered lines: what counts as run. It is made by `make coverage`."""

from __future__ import annotations

from pathlib import Path

import coverage_report
import pytest


def report(*lines: tuple[int, int], file: str = "csrc/engine.cpp") -> dict[str, object]:
    counted = [{"line_number": number, "count": count} for number, count in lines]
    return {"current_working_directory": "/tree", "files": [{"file": file, "lines": counted}]}


def test_a_line_ran_if_one_object_ran_it(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, dict[int, bool]] = {}
    for one in (report((1, 0), (2, 3), (4, 0)), report((1, 2), (2, 0)), report((9, 1), file="/usr/include/vector")):
        coverage_report.add_report(found, one, Path("/tree"))
    assert found == {"csrc/engine.cpp": {1: True, 2: True, 4: False}}
    coverage_report.print_table(found)
    assert "| csrc/engine.cpp | 3 | 66.7 % | 4 |" in capsys.readouterr().out


def test_lines_are_shown_as_ranges() -> None:
    assert coverage_report.ranges([7, 3, 5, 6]) == "3, 5-7"
    assert coverage_report.ranges([]) == ""

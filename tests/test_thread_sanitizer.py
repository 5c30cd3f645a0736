"""The C++ engine under ThreadSanitizer: no race is reported, and a lock that is left out is.

`tests/thread_scenarios.py` is what runs, `tests/thread_sanitizer.py` how it is built. Every report counts: none is suppressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulated
import pytest
import thread_sanitizer
import thread_scenarios
from ranks import Outcome, watch_ranks

_MISSING = emulated.why_not() or thread_sanitizer.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test builds
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "ThreadSanitizer"),
]

ROOT = Path(__file__).resolve().parent.parent

# The scenario that notices when the lock at a place is left out. A place: file, function, number of the lock in it.
LOCKS = {
    ("executor.cpp", "WorkerExecutor::Signal::set", 0): "cpu, closed",
    ("executor.cpp", "WorkerExecutor::submit", 0): "cpu, hosts",
    ("executor.cpp", "WorkerExecutor::take_submitted", 0): "cpu, closed",
    ("engine_results.cpp", "Engine::stats", 1): "cpu, closed",
    ("engine_results.cpp", "Engine::sum_of_squares", 0): "cpu, closed",
    ("peer_lane.cpp", "PeerLane::exchange", 0): "cpu, closed",
    ("transport_c10d.cpp", "C10dTransport::lane", 0): "cpu, aborted",
    ("watchdog.cpp", "Watchdog::watch", 0): "device, closed",
}

TRIES = 3  # whether two threads meet at the place depends on timing


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the reports; processes started from now on run under ThreadSanitizer."""
    thread_sanitizer.build()
    for name, value in thread_sanitizer.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    yield tmp_path


def values(outcomes: list[Outcome]) -> list[object]:
    for outcome in outcomes:
        assert outcome.error is None, f"{outcome.error}\n{outcome.output[-4000:]}"
        assert "Traceback" not in outcome.output, outcome.output[-4000:]
    return [outcome.value for outcome in outcomes]


def test_no_race_between_the_threads_of_two_processes(reports: Path) -> None:
    """Both doors, several buckets and slices under way, read meanwhile; then a rank that raises in backward."""
    found = values(watch_ranks(thread_scenarios.two_processes, 2, timeout_s=100.0))
    assert found == [(16, ["SyncError"] * 2), (16, ["ZeroDivisionError"] * 2)]
    assert thread_sanitizer.reports_of(reports) == []


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_no_race_when_engines_end_while_buckets_are_under_way(reports: Path, where: str) -> None:
    """Closed, aborted, timed out, with NCCL's faults; stats, results and traces are read meanwhile."""
    names = [name for name in thread_scenarios.ENGINES if name.startswith(where)]
    assert values(watch_ranks(thread_scenarios.all_engines, 1, 150.0, None, (names,))) == [names]
    assert thread_sanitizer.reports_of(reports) == []


@pytest.mark.parametrize(
    "files", [("executor.cpp",), ("engine_results.cpp", "watchdog.cpp"), ("peer_lane.cpp", "transport_c10d.cpp")]
)
def test_a_lock_that_is_left_out_is_reported(reports: Path, files: tuple[str, ...]) -> None:
    left = [place for place in LOCKS if place[0] in files]
    for _ in range(TRIES):
        places = [(*place_of(*place), LOCKS[place]) for place in left]
        outcomes = watch_ranks(thread_scenarios.without_lock, len(places), 120.0, None, (places,))
        left = [place for place, outcome in zip(left, outcomes, strict=True) if outcome.exit_code != thread_scenarios.REPORTED]
        if not left:
            break
    assert not left, f"nothing is reported without these locks: {left}"
    found = thread_sanitizer.reports_of(reports)
    for file in files:
        assert any("data race" in report and f"csrc/{file}" in report for report in found), file


def place_of(file: str, function: str, number: int) -> tuple[str, int]:
    """Return file and line of the lock of that number in a function, which ends with a brace in the first column."""
    lines = (ROOT / "csrc" / file).read_text().splitlines()
    begin = next(idx for idx, line in enumerate(lines) if f" {function}(" in line and line[0] != " ")
    end = lines.index("}", begin)
    return file, [idx + 1 for idx in range(begin, end) if "std::lock_guard" in lines[idx]][number]

"""Which lines of csrc the tests run, on the CPU and emulated: `make coverage`, or `python tests/coverage_report.py [TEST ...]`.

Builds a copy of this tree in build/coverage with gcov's counters, the emulated CUDA kernels too, runs the tests there (by default
TESTS; about twenty minutes on two cores), and prints for each file of csrc how many lines there are, how many ran, and which not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "coverage"
COPIED = (
    "csrc",
    "gsync",
    "kernels",
    "benchmarks",
    "tests",
    "setup.py",
    "build_plan.py",
    "pyproject.toml",
    "LICENSE",
    "README.md",
)
TESTS = (
    *("test_ops*", "test_layout*", "test_block*", "test_decoding*"),
    *("test_engine*", "test_ddp_values", "test_ddp_surface", "test_hierarchical", "test_stats", "test_timeline"),
    *("test_reducer_[!e]*", "test_field_graphs", "test_faults", "test_field_faults", "test_emulated*"),
)
# Counters are written when a process ends, or by this function: ranks are killed (tests/ranks.py).
COMPILE = "--coverage -fprofile-update=atomic"
LINK = "--coverage -Wl,-u,__gcov_dump -Wl,-u,__gcov_reset"


def main(tests: Sequence[str]) -> int:
    tree = FOLDER / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
            shutil.rmtree(tree / name, ignore_errors=True)  # files that are gone by now
            shutil.copytree(ROOT / name, tree / name, dirs_exist_ok=True, ignore=left_out)
        else:
            shutil.copy2(ROOT / name, tree / name)
    compiler = FOLDER / "cxx"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -O1\n')  # after the build's own -O3
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "CFLAGS": COMPILE, "LDFLAGS": LINK}
    environment |= {"GSYNC_EMULATION_FLAGS": f"{COMPILE} {LINK}"}
    environment |= {"GSYNC_BUILD": "cpu", "PYTHONPATH": str(FOLDER / "site"), "GSYNC_COVERAGE": "1"}
    offline = ["--no-deps", "--no-build-isolation", "--upgrade", "--target", str(FOLDER / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *offline, str(tree)], env=environment, check=True)
    for counters in tree.rglob("*.gcda"):
        counters.unlink()
    files = tests or [str(file.name) for pattern in TESTS for file in sorted((tree / "tests").glob(f"{pattern}.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *files]
    code = subprocess.run(command, env=environment, cwd=tree / "tests", check=False).returncode
    print_table(lines_run(tree.rglob("*.gcda"), tree))
    return code


def lines_run(counters: Iterable[Path], tree: Path) -> dict[str, dict[int, bool]]:
    """Return by file of csrc which lines with code there are, and whether one of the objects that have it ran it."""
    found: dict[str, dict[int, bool]] = {}
    for file in counters:
        command = ["gcov", "--json-format", "--stdout", str(file)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=file.parent).stdout
        for report in map(json.loads, told.splitlines()):
            add_report(found, report, tree)
    return found


def add_report(found: dict[str, dict[int, bool]], report: dict[str, Any], tree: Path) -> None:
    """Add what gcov says of one object to `found`."""
    for source in report["files"]:
        path = Path(report["current_working_directory"], source["file"]).resolve()
        if not path.is_relative_to(tree / "csrc"):
            continue
        lines = found.setdefault(str(path.relative_to(tree)), {})
        for line in source["lines"]:
            number = line["line_number"]
            lines[number] = lines.get(number, False) or line["count"] > 0


def print_table(found: dict[str, dict[int, bool]]) -> None:
    """Print a table in Markdown: files, lines, lines run, those that were not."""
    print("\n| file | lines | run | not run |\n|---|---|---|---|")
    total = [0, 0]
    for name, lines in sorted(found.items()):
        ran = sum(lines.values())
        total = [total[0] + len(lines), total[1] + ran]
        missed = ranges(number for number, was_run in lines.items() if not was_run)
        print(f"| {name} | {len(lines)} | {100 * ran / max(len(lines), 1):.1f} % | {missed} |")
    print(f"| all | {total[0]} | {100 * total[1] / max(total[0], 1):.1f} % | |")


def ranges(numbers: Iterable[int]) -> str:
    """Return "3, 5-7" for 3, 5, 6, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

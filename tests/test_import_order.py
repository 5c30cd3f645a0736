"""Imports go one way, files stay short, and folders keep to what they may use."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Leaves import nothing of gsync. Of the others, each stage knows those after it in this list and none before it:
# doors -> state and engines -> operations -> their backends. Modules that are not listed only must not close a circle.
LEAVES = {"config", "errors", "env"}
STAGES = (
    {"cli", "doctor"},
    {"hook", "reducer"},
    {"state"},
    {"surface"},
    {"engine", "groups", "norm", "python_engine"},
    {"ops"},
    {"operators"},
    {"backends"},
    {"reference"},
    {"layout"},
    {"_native"},
)
MAX_LINES = 500
LONGER: dict[str, int] = {}
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh", ".pyi")
FOLDERS = ("gsync", "kernels", "csrc", "benchmarks", "tests", "examples")


def source_files() -> list[Path]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SOURCES]
    files += [ROOT / "setup.py", ROOT / "build_plan.py"]
    return [file for file in files if "__pycache__" not in file.parts and file.name != "_build_info.py"]


def imported_modules(file: Path, package: str) -> set[str]:
    """Return the absolute names of everything that `file`, a module of `package`, imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).rstrip(".")
            names |= {f"{base}.{alias.name}" for alias in node.names} if base == "gsync" else {base}
    return names


def of_gsync(names: set[str]) -> set[str]:
    """Return the first part below gsync of those names that lie in gsync; "" for gsync itself."""
    return {[*name.split("."), ""][1] for name in names if name.split(".")[0] == "gsync"}


MODULES = {
    file.stem: of_gsync(imported_modules(file, "gsync")) - {file.stem, "_C", "_build_info", "__version__"}
    for file in sorted((ROOT / "gsync").glob("*.py"))
    if file.stem not in {"__init__", "_build_info"}
}


def reached_from(module: str) -> dict[str, list[str]]:
    """Return each module of gsync that `module` imports, itself or through others, with the way there."""
    ways = {module: [module]}
    waiting = [module]
    while waiting:
        here = waiting.pop()
        for name in sorted(MODULES.get(here, set())):
            if name == module:
                ways["a circle"] = [*ways[here], name]
            if name not in ways:
                ways[name] = [*ways[here], name]
                waiting.append(name)
    del ways[module]
    return ways


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    ways = reached_from(module)
    assert "a circle" not in ways, " -> ".join(ways["a circle"])
    if module in LEAVES:
        assert not ways, f"{module} is a leaf and imports {sorted(ways)}"
    for number, stage in enumerate(STAGES):
        if module in stage:
            for earlier in set().union(*STAGES[:number]) & ways.keys():
                pytest.fail(f"{module} is used by {earlier} and must not know it: {' -> '.join(ways[earlier])}")


@pytest.mark.parametrize("file", sorted((ROOT / "kernels").glob("*.py")), ids=lambda file: file.stem)
def test_kernels_import_only_torch_and_triton(file: Path) -> None:
    allowed = {"torch", "triton", "gsync", *sys.stdlib_module_names}
    names = imported_modules(file, "gsync.kernels")
    assert {name.split(".")[0] for name in names} <= allowed, f"kernels/{file.name} imports {sorted(names)}"
    assert of_gsync(names) <= {"kernels"}, f"kernels/{file.name} imports {sorted(names)}; of gsync only its own folder"


def test_no_module_of_the_package_imports_its_benchmarks() -> None:
    for file in (ROOT / "gsync").glob("*.py"):
        if file.stem not in {"cli", "doctor"}:
            assert "benchmarks" not in of_gsync(imported_modules(file, "gsync")), f"gsync/{file.name} imports gsync.benchmarks"


@pytest.mark.parametrize("file", source_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short(file: Path) -> None:
    lines = len(file.read_text().splitlines())
    most = LONGER.get(str(file.relative_to(ROOT)), MAX_LINES)
    assert lines <= most, f"{file.relative_to(ROOT)} has {lines} lines; at most {most}: split it by subject"


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    found = [str(file.relative_to(ROOT)) for file in source_files() if file.stem in vague]
    assert not found, f"{found}: name a file after its subject"


def test_test_files_have_unique_names() -> None:
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


def test_kernels_know_no_torch() -> None:
    """A .cu file with Torch headers takes 2 minutes to compile, without 3 seconds."""
    for file in (
        *(ROOT / "csrc" / "cuda").glob("*.cu*"),
        *(ROOT / "csrc" / "common").glob("*.h"),
        *(ROOT / "csrc" / "codecs").glob("*.h"),
    ):
        included = [line for line in file.read_text().splitlines() if line.startswith("#include")]
        torch = [line for line in included if any(part in line for part in ("torch/", "ATen/", "c10/"))]
        assert not torch, f"{file.relative_to(ROOT)} includes {torch}"


def test_nothing_includes_the_whole_of_torch() -> None:
    """torch/extension.h costs 33 s a file."""
    for file in (*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")):
        assert "torch/extension.h" not in file.read_text(), file.relative_to(ROOT)

"""Documents tell the truth: what they point to exists, and their code compiles, or runs where it says so.

A Python block with `<!-- runs -->` on the line before it is executed by itself in a fresh interpreter. Other Python blocks must
compile. Paths are what stands in backticks and looks like a path of this repository, and the targets of links.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    file for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md") for file in ROOT.glob(pattern)
)
TOP_FOLDERS = {"gsync", "kernels", "csrc", "benchmarks", "tests", "docs", "examples", ".ci"}
MADE_BY_BUILDS = ("gsync/_build_info.py", "gsync/_C.")
RUNS = "<!-- runs -->"


class Block(NamedTuple):
    document: Path
    line: int
    language: str
    code: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    """Return the fenced blocks of `document`."""
    blocks: list[Block] = []
    lines = document.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        fence = re.match(r"^\s*```(\w*)", line)
        if not fence:
            continue
        if start is None:
            start = number
            continue
        opening = re.match(r"^(\s*)```(\w*)", lines[start])
        assert opening
        indent = len(opening.group(1))
        code = "\n".join(text[indent:] for text in lines[start + 1 : number]) + "\n"
        before = lines[start - 1].strip() if start else ""
        blocks.append(Block(document, start + 1, opening.group(2), code, before == RUNS))
        start = None
    assert start is None, f"{document.relative_to(ROOT)}:{(start or 0) + 1}: block is not closed"
    return blocks


def prose_of(document: Path) -> str:
    """Return `document` with its fenced blocks blanked out, line numbers kept."""
    text = document.read_text()
    return re.sub(r"^\s*```.*?^\s*```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(document: Path) -> set[str]:
    """Return the names that headings of `document` have as link targets."""
    headings = re.findall(r"^#+\s+(.+)$", prose_of(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


PYTHON_BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document) if block.language in ("python", "py")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_paths_exist(document: Path) -> None:
    for match in re.finditer(r"`([^`\n]+)`", prose_of(document)):
        path = match.group(1).strip().removesuffix("/")
        first = path.split("/")[0]
        looks_like_path = "/" in path and first in TOP_FOLDERS and re.fullmatch(r"[\w./*\-{},]+", path)
        if not looks_like_path or path.startswith(MADE_BY_BUILDS):
            continue
        for one in expand_braces(path):
            assert list(ROOT.glob(one)), f"{document.relative_to(ROOT)} names `{path}`, and {one} does not exist"


def expand_braces(path: str) -> list[str]:
    """Return the paths that `a/{b,c}.py` stands for."""
    match = re.search(r"\{([^{}]*)\}", path)
    if not match:
        return [path]
    return [
        one for part in match.group(1).split(",") for one in expand_braces(path[: match.start()] + part + path[match.end() :])
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.relative_to(ROOT)} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{document.relative_to(ROOT)} links to {target}, and there is no such heading"


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=str)
def test_python_blocks_compile(block: Block) -> None:
    compile("\n" * block.line + block.code, str(block.document), "exec")


@pytest.mark.parametrize("block", [block for block in PYTHON_BLOCKS if block.runs], ids=str)
def test_marked_python_blocks_run(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    file.write_text(block.code)
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"


def test_environment_variables_are_documented_in_one_file() -> None:
    """Every GSYNC_ variable that code or documents name is in gsync/env.py; only that file and the build read the environment."""
    documented = set(re.findall(r"^(GSYNC_[A-Z_]+)$", (ROOT / "gsync" / "env.py").read_text(), re.MULTILINE))
    assert documented
    files = [*(ROOT / "gsync").rglob("*.py"), *(ROOT / "kernels").rglob("*.py"), *DOCUMENTS]
    for file in files:
        named = set(re.findall(r"\bGSYNC_[A-Z_]+\b", file.read_text())) - {"GSYNC_WITH_CUDA"}
        assert named <= documented, f"{file.relative_to(ROOT)} names {sorted(named - documented)}, which gsync/env.py lacks"
    for file in [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]:
        assert "getenv" not in file.read_text(), f"{file.relative_to(ROOT)} reads the environment"


def test_environment_variables_are_checked() -> None:
    from gsync import env

    assert env.read({}) == env.Environment(build="auto", native="auto")
    assert env.read({"GSYNC_BUILD": " CPU ", "GSYNC_NATIVE": "off"}) == env.Environment(build="cpu", native="off")
    with pytest.raises(ValueError, match="GSYNC_BUILD='gpu': expected one of auto, cpu, cuda, python"):
        env.read({"GSYNC_BUILD": "gpu"})

"""C++ for 64-bit Arm, by a cross compiler (apt install g++-aarch64-linux-gnu) and the flags of the build. Nothing is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "aarch64-linux-gnu-g++"
OBJDUMP = "aarch64-linux-gnu-objdump"
# They need no torch; csrc/cpu has what is different on x86-64.
PLAIN = sorted([*(ROOT / "csrc" / "cpu").glob("*.cpp"), *(ROOT / "csrc" / "common").glob("*.cpp")])
WITH_TORCH = sorted((ROOT / "csrc").glob("*.cpp"))

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")


def flags() -> list[str]:
    """Those of setup.py, which builds when it is imported."""
    text = (ROOT / "setup.py").read_text()
    lines = re.findall(r"^CXX_FLAGS \+?= .*$", text, re.MULTILINE)
    values: dict[str, list[str]] = {}
    exec("\n".join(lines), values)
    return [*values["CXX_FLAGS"], "-fPIC", f"-I{ROOT / 'csrc'}"]


def compile_(source: Path, *options: str) -> str:
    """Return what the compiler complains about; "" if it does not."""
    done = subprocess.run([COMPILER, *flags(), *options, str(source)], capture_output=True, text=True, timeout=250)
    return done.stderr[-4000:] or "failed" if done.returncode else ""


@pytest.fixture(scope="module")
def complaints() -> dict[Path, str]:
    """Of all files that need torch's headers, which take ten seconds each: compiled side by side."""
    include = Path(torch.__file__).parent / "include"
    system = [f"-isystem{include}", f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    options = ["-fsyntax-only", *system, f"-I{sysconfig.get_path('include')}"]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(WITH_TORCH, pool.map(lambda source: compile_(source, *options), WITH_TORCH), strict=True))


@pytest.mark.parametrize("source", PLAIN, ids=lambda source: f"{source.parent.name}-{source.stem}")
def test_kernels_compile(source):
    assert "-ffp-contract=off" in flags()
    assert compile_(source, "-fsyntax-only") == ""


@pytest.mark.slow
@pytest.mark.parametrize("source", PLAIN, ids=lambda source: f"{source.parent.name}-{source.stem}")
def test_nothing_is_fused(source, tmp_path):
    """x * s + r in one rounding would be other bits than x86-64 writes; by itself this compiler fuses them."""
    fused = r"\bf(n?madd|n?msub|mla|mls)\b"
    assert compile_(source, "-c", "-o", str(tmp_path / "object.o")) == ""
    code = subprocess.run([OBJDUMP, "-d", tmp_path / "object.o"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert len(code) > 1000 and not re.findall(fused, code)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", WITH_TORCH, ids=lambda source: source.stem)
def test_the_rest_compiles_against_torchs_headers(source, complaints):
    assert complaints[source] == ""

"""Every barrier of the CUDA kernels is needed: without it, some order of the threads of a block gives other bytes or sums.

The kernels are compiled again with one `__syncthreads()` taken out, and run on the CPU.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import block_cases
import emulated_kernels
import pytest
import torch

from gsync.layout import CODEC_KINDS, Segment

pytestmark = [
    pytest.mark.skipif(bool(emulated_kernels.why_not()), reason=emulated_kernels.why_not() or "they run"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
BARRIER = re.compile(r"^\s*__syncthreads\(\);")


def _barriers() -> list[tuple[str, int]]:
    """File and line of each, the files as paths from the tree's root."""
    found = []
    for file in sorted((emulated_kernels.ROOT / "csrc" / "cuda").glob("*.cu*")):
        for number, line in enumerate(file.read_text().split("\n")):
            if BARRIER.match(line):
                found.append((str(file.relative_to(emulated_kernels.ROOT)), number))
    return found


def _without(file: str, number: int, folder: Path) -> Any:
    """The library of a tree that lacks this barrier."""
    root = folder / "tree"
    for part in ("csrc", "tests/emulation/cuda"):
        shutil.copytree(emulated_kernels.ROOT / part, root / part)
    lines = (root / file).read_text().split("\n")
    lines[number] = BARRIER.sub("", lines[number])
    (root / file).write_text("\n".join(lines))
    return emulated_kernels.open_library(emulated_kernels.build(root=root, folder=folder / "built"))


def _is_noticed(library: Any) -> bool:
    """Whether an order of threads gives something else than the reference does."""
    segments = tuple((n, torch.float32, codec) for n, codec in ((4097, "int8"), (9001, "int4"), (301, "bf16")))
    case = block_cases.Case(segments, block_size=2048, sums=True, stochastic=False)
    for order in emulated_kernels.ORDERS:
        for pattern in emulated_kernels.PATTERNS:
            backend = emulated_kernels.EmulatedBackend(order, pattern, seed=3, compiled=library)
            try:
                block_cases.compare(backend, case)
                _sum_twice(backend)
            except AssertionError:
                return True
    return False


def _sum_twice(backend: Any) -> None:
    """Launches of several blocks whose last one adds up what the others wrote."""
    from gsync.backends import BucketLayout

    layout = BucketLayout([Segment(n, 0, CODEC_KINDS["int8"], n) for n in (9000, 5000)], 1)
    gradients = [torch.linspace(-1, 1, n) for n in (9000, 5000)]
    payload = block_cases.memory(layout.python.payload_bytes)
    backend.pack(layout, gradients, payload, 1.0)
    for _ in range(2):
        written = [torch.empty_like(gradient) for gradient in gradients]
        partials, sums = torch.zeros(layout.python.num_partials, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        backend.unpack(layout, payload, written, partials, torch.zeros(1, dtype=torch.int32), sums)
        torch.testing.assert_close(sums, torch.stack([w.double().square().sum() for w in written]), rtol=1e-12, atol=0)


def test_the_kernels_as_they_are_pass() -> None:
    assert len(_barriers()) == 4
    assert not _is_noticed(emulated_kernels.load())


@pytest.mark.parametrize("which", range(len(_barriers())))
def test_a_missing_barrier_is_noticed(which: int, tmp_path: Path) -> None:
    file, number = _barriers()[which]
    line = (emulated_kernels.ROOT / file).read_text().split("\n")[number]
    assert _is_noticed(_without(file, number, tmp_path)), f"{file}:{number + 1}: nothing changes without {line.strip()}"

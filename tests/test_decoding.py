"""Payloads of random bytes and lengths: a clear error or a result, never a crash; under AddressSanitizer and UBSan, too."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import why_not
from hypothesis import given, settings
from hypothesis import strategies as st

from gsync import ops
from gsync.config import CODECS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "tests/sanitized_decoding.cpp",
    "csrc/common/layout.cpp",
    "csrc/cpu/block.cpp",
    "csrc/cpu/elementwise.cpp",
    "csrc/cpu/kernels.cpp",
)
# All of UBSan, or -O1, takes the compiler four times as long.
FLAGS = ("-std=c++20", "-O0", "-g1", "-ffp-contract=off", "-fno-trapping-math", "-fno-sanitize-recover=all")
FLAGS += ("-fsanitize=address,alignment,bounds,bool,shift,integer-divide-by-zero,signed-integer-overflow,null,return",)
ROUNDS = 400

BACKENDS = [name for name in ("reference", "native") if not why_not(name, on_gpu=False)]
SIZES = st.lists(st.sampled_from([0, 1, 31, 32, 33, 64, 255, 257, 1000, 4097]), min_size=1, max_size=4)


def bytes_of(seed: int, count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if seed % 4 == 0:  # all alike: the extremes of every format are among these
        return torch.full((count,), seed // 4 % 256, dtype=torch.uint8)
    return torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)


@settings(max_examples=150)
@given(SIZES, st.sampled_from(CODECS), st.integers(1, 4), st.integers(0, 2**20), st.sampled_from(BACKENDS))
def test_random_bytes_give_numbers_and_say_which_are_none(
    numels: list[int], codec: str, num_chunks: int, seed: int, backend: str
) -> None:
    cut: dict[str, Any] = {"codec": codec, "num_chunks": num_chunks}
    size = ops.payload_bytes(numels, **cut)
    gradients = [torch.full((numel,), 7.0) for numel in numels]
    found, squares = ops.unpack(bytes_of(seed, size), gradients, backend=backend, **cut)
    is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool(found) is not is_finite
    assert bool(squares.isfinite()) or not is_finite
    chunks = [bytes_of(seed + 1 + i, size // num_chunks) for i in range(3)]
    reduced = ops.reduce(chunks, numels, chunk_idx=seed % num_chunks, backend=backend, **cut)
    assert reduced.shape == (size // num_chunks,) and reduced.dtype == torch.uint8


@settings(max_examples=100)
@given(SIZES, st.sampled_from(CODECS), st.integers(1, 3), st.integers(0, 40_000), st.integers(0, 2**20))
def test_payloads_of_another_length_are_refused(numels: list[int], codec: str, num_chunks: int, length: int, seed: int) -> None:
    cut: dict[str, Any] = {"codec": codec, "num_chunks": num_chunks}
    size = ops.payload_bytes(numels, **cut)
    gradients = [torch.full((numel,), 7.0) for numel in numels]
    if length != size:
        for backend in BACKENDS:
            with pytest.raises(ValueError, match=rf"unpack: payload has shape \({length},\) .* expected contiguous \[{size}\]"):
                ops.unpack(bytes_of(seed, length), gradients, backend=backend, **cut)
    if length != size // num_chunks:
        chunk = size // num_chunks
        for backend in BACKENDS:
            with pytest.raises(
                ValueError, match=rf"reduce: payloads\[1\] has shape \({length},\) .* expected contiguous \[{chunk}\]"
            ):
                ops.reduce([bytes_of(seed, chunk), bytes_of(seed, length)], numels, backend=backend, **cut)
    assert all(bool((gradient == 7.0).all()) for gradient in gradients)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver with the CPU's kernels, compiled with sanitizers."""
    compiler, missing = _build_plan().find_compiler()
    if compiler is None:
        pytest.skip(str(missing))
    program = tmp_path_factory.mktemp("sanitized") / "decoding"
    probe = subprocess.run(
        [*compiler, "-fsanitize=address,undefined", "-x", "c++", "-", "-o", str(program)],
        input="int main() {}",
        capture_output=True,
        text=True,
        timeout=60,
    )
    if probe.returncode != 0:
        pytest.skip(f"the compiler has no sanitizers: {probe.stderr[-200:]}")
    includes, objects = [f"-I{ROOT / 'csrc'}"], [program.with_name(f"{Path(source).stem}.o") for source in SOURCES]

    def compile_one(pair: tuple[str, Path]) -> None:
        source, made = pair
        _run([*compiler, *FLAGS, *includes, "-c", "-o", made, ROOT / source])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, zip(SOURCES, objects, strict=True)))
    _run([*compiler, *FLAGS, "-o", program, *objects])
    return program


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_byte_is_read_or_written_beside_a_payload(sanitized: Path, seed: int) -> None:
    done = subprocess.run([sanitized, str(seed), str(ROUNDS)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout == f"{ROUNDS} rounds\n"


@pytest.mark.slow
def test_a_byte_beside_an_array_would_be_reported(sanitized: Path) -> None:
    done = subprocess.run([sanitized, "overrun"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def _run(command: list[Any]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def _build_plan():  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT))
    try:
        import build_plan
    finally:
        sys.path.remove(str(ROOT))
    return build_plan

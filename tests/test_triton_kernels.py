"""The Triton kernels: the same bytes as the reference, through the interpreter; and what they compile to, ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gsync.kernels import elementwise, kernels_for
from gsync.kernels.backend import TritonBackend
from kernel_cases import CODECS, DTYPES, NUMELS, Case, check, payload_of, place

from gsync import reference
from gsync.backends import BucketLayout
from gsync.layout import CODEC_KINDS, Segment, hash64

CPU = torch.device("cpu")
# The interpreter computes in NumPy, which warns of what is meant: overflow to Inf, and arithmetic on NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
MAX_REGISTERS = 128  # of 65,536 a multiprocessor has: two blocks of 256 threads


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_writes_the_bytes_of_the_reference(dtype: torch.dtype, codec: str) -> None:
    n = len(NUMELS)
    check(TritonBackend(), CPU, Case(NUMELS, [dtype] * n, [codec] * n))
    check(TritonBackend(), CPU, Case(NUMELS, [dtype] * n, [codec] * n, num_chunks=3, misaligned=True))


def test_triton_mixes_codecs_dtypes_slices_and_unused_parameters() -> None:
    dtypes = [DTYPES[i % 4] for i in range(len(NUMELS))]
    codecs = [CODECS[i // 2 % 3] for i in range(len(NUMELS))]
    check(TritonBackend(), CPU, Case(NUMELS, dtypes, codecs, num_chunks=3, num_slices=2, unused=(3, 8), misaligned=True))


def test_triton_takes_empty_buckets() -> None:
    check(TritonBackend(), CPU, Case([0, 0], DTYPES[:2], ["fp32", "bf16"], num_chunks=2))
    check(TritonBackend(), CPU, Case([], [], []))


def test_triton_sums_do_not_depend_on_alignment_or_slices() -> None:
    shape = ((9000, 20000, 4097, 33), DTYPES, ("bf16", "fp16", "fp32", "fp16"))
    sums = check(TritonBackend(), CPU, Case(*shape, num_chunks=3, finite=True))
    assert torch.equal(sums, check(TritonBackend(), CPU, Case(*shape, num_chunks=3, num_slices=3, misaligned=True, finite=True)))


def test_triton_writes_nan_when_the_exchange_failed() -> None:
    layout = BucketLayout([Segment(5003, 0, CODEC_KINDS["bf16"], hash64("w"))], 1)
    gradient = place(torch.ones(5003), CPU, 0)
    payload = payload_of(layout.python.payload_bytes, CPU)
    reference.pack(layout.python, [gradient], payload, 1.0)
    partials, found = torch.zeros(layout.python.num_partials, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    sums, ticket = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    shares, tiles, segments = layout.tables_on(CPU)
    pointers = torch.tensor([gradient.data_ptr()])
    for failed, expected in ((0, 1.0), (1, float("nan"))):
        elementwise.unpack(
            shares, tiles, pointers, payload, layout.python.chunk_bytes, partials, found, ticket, segments, sums,
            failed=torch.tensor([failed], dtype=torch.int32),
        )  # fmt: skip
        torch.testing.assert_close(gradient, torch.full((5003,), expected), equal_nan=True, rtol=0, atol=0)
        assert found.item() == failed
        assert ticket.item() == 0
    assert sums.isnan().all()


def test_one_operation_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: grids.append(grid)

    class Recording:
        pack_kernel = reduce_kernel = unpack_kernel = Recorder()

    monkeypatch.setattr(elementwise, "kernels_for", lambda name, tensor: Recording)
    for num_segments in (1, 300):
        layout = BucketLayout([Segment(10, 0, 2, hash64(str(i))) for i in range(num_segments)], 1)
        gradients = [torch.zeros(10) for _ in range(num_segments)]
        payload = payload_of(layout.python.payload_bytes, CPU)
        backend, partials = TritonBackend(), torch.zeros(layout.python.num_partials, dtype=torch.float64)
        sums, found = torch.zeros(num_segments, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
        backend.pack(layout, gradients, payload, 1.0)
        backend.reduce(layout, 0, [payload, payload], payload.clone(), 1.0)
        backend.unpack(layout, payload, gradients, partials, found, sums)
        assert grids == [(layout.python.num_tiles,)] * 3
        grids.clear()


def test_kernels_run_interpreted_where_there_is_no_gpu() -> None:
    assert kernels_for(elementwise.__name__, torch.zeros(1)).__name__.endswith("_interpreted")
    with pytest.raises(ValueError, match="meta"):
        kernels_for(elementwise.__name__, torch.zeros(1, device="meta"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Its own process: this one may have imported triton with the interpreter on.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("kernel_report.py")
    done = subprocess.run([sys.executable, script, "triton"], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", ["pack_kernel", "reduce_kernel", "unpack_kernel"])
def test_triton_compiles_to_16_byte_accesses_without_local_memory(report: dict[str, Any], arch: str, kernel: str) -> None:
    found = report[arch][kernel]
    assert found["spill_bytes"] == 0 and found["local_bytes"] == 0, found
    assert found["registers"] <= MAX_REGISTERS, found
    assert found["ptx_loads_v4"] >= 4 and found["ptx_stores_v4"] >= 4, found
    assert found["loads_16"] >= 4 and found["stores_16"] >= 4, found

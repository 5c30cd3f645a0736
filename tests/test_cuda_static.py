"""The CUDA kernels as compiled, and the launches that the launchers make; needs nvcc, not a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kernel_report
import pytest

TOOLKIT = kernel_report.find_toolkit()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(TOOLKIT is None, reason="nvcc is not to be found")]

ARCHS = ("sm_80", "sm_90", "sm_100")
# Addresses by value: few, up to 32,000 bytes of them, and in a table in device memory.
KERNELS = tuple(f"{operation}_kernel<{capacity}>" for operation in ("pack", "reduce", "unpack") for capacity in (128, 4000, 0))
# Of 65,536 a multiprocessor has: four blocks of 256 threads.
MAX_REGISTERS = 64


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return kernel_report.cuda_report()


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert TOOLKIT is not None
    if shutil.which("g++") is None:
        pytest.skip("g++ is not to be found")
    folder = tmp_path_factory.mktemp("recorder")
    csrc = kernel_report.ROOT / "csrc"
    include = [word for path in TOOLKIT.include_dirs for word in ("-isystem", str(path))]
    launchers = folder / "elementwise.o"
    source, runtime = csrc / "cuda" / "elementwise.cu", Path(__file__).with_name("cuda_launch_recorder.cpp")
    for command in (
        [TOOLKIT.nvcc, *kernel_report.NVCC_FLAGS, *include, "-arch=sm_90", "-c", "-o", launchers, source],
        ["g++", "-std=c++20", f"-I{csrc}", *include, "-o", folder / "recorder", runtime, launchers],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    return folder / "recorder"


def launches(recorder: Path, num_segments: int, device_table: bool) -> dict[str, list[str]]:
    """By operation: the error, then kernel, grid and block of each launch."""
    command = [str(recorder), str(num_segments), str(int(device_table))]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_kernel_fits_its_registers_and_moves_16_bytes(report: dict[str, Any], arch: str, kernel: str) -> None:
    found = report[arch][kernel]
    assert found["spill_bytes"] == 0 and found["local_bytes"] == 0, found
    assert found["registers"] <= MAX_REGISTERS, found
    # One load of codes per thread and group at least for each codec; the gradients' side adds to that.
    assert found["loads_16"] >= 8 and found["stores_16"] >= 8, found
    assert found["generic"] == 0, "an access whose memory space the compiler does not know"


@pytest.mark.parametrize(("num_segments", "capacity"), [(1, 128), (128, 128), (129, 4000), (4000, 4000), (4001, 0), (20000, 0)])
def test_one_operation_is_one_launch_whatever_the_number_of_segments(recorder: Path, num_segments: int, capacity: int) -> None:
    for operation, (error, *rest) in launches(recorder, num_segments, device_table=True).items():
        assert error == "0"
        kernel, grid, block = rest  # of one launch
        assert kernel_report.plain_name(kernel) == f"{operation}_kernel<{capacity}>"
        assert (int(grid), int(block)) == (num_segments + 1, 256)  # the recorder's layout has one tile more than segments


def test_nothing_to_do_is_no_launch(recorder: Path) -> None:
    assert launches(recorder, 0, device_table=False) == {"pack": ["0"], "reduce": ["0"], "unpack": ["0"]}


def test_a_long_table_without_device_memory_is_an_error(recorder: Path) -> None:
    invalid_value = "1"
    assert launches(recorder, 4001, device_table=False) == {name: [invalid_value] for name in ("pack", "reduce", "unpack")}


def test_kernels_are_launched_in_one_place() -> None:
    for file in (kernel_report.ROOT / "csrc").rglob("*.cu*"):
        text = file.read_text()
        assert "<<<" not in text, file
        assert text.count("cudaLaunchKernel(") == (1 if file.name == "launch.cuh" else 0), file

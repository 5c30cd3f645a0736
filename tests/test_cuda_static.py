"""The CUDA kernels as compiled, and the launches that the launchers make; needs nvcc, not a GPU."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import kernel_report
import pytest

from gsync import _native

TOOLKIT = kernel_report.find_toolkit()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(TOOLKIT is None, reason="nvcc is not to be found")]

ARCHS = ("sm_80", "sm_90", "sm_100")
# Addresses by value: few, up to 32,000 bytes of them, and in a table in device memory.
CAPACITIES = (128, 4000, 0)
KERNELS = tuple(f"{operation}_kernel<{capacity}>" for operation in ("pack", "reduce", "unpack") for capacity in CAPACITIES)
# Of 65,536 a multiprocessor has: four blocks of 256 threads; three of the kernels that keep a tile and its scales in registers.
MAX_REGISTERS = {"pack_kernel": 64, "reduce_kernel": 64, "unpack_kernel": 64}
MAX_REGISTERS |= {"block_pack_kernel": 80, "block_reduce_kernel": 80, "shard_reduce_kernel": 80, "block_unpack_kernel": 64}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of the extension where it has these kernels, else of a compilation of its own."""
    built = kernel_report.built_report(Path(_native.C.__file__)) if _native.has_cuda() else {}
    return built or kernel_report.cuda_report()


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert TOOLKIT is not None
    if shutil.which("g++") is None:
        pytest.skip("g++ is not to be found")
    folder = tmp_path_factory.mktemp("recorder")
    csrc = kernel_report.ROOT / "csrc"
    include = [word for path in TOOLKIT.include_dirs for word in ("-isystem", str(path))]
    objects = [folder / "elementwise.o", folder / "block.o"]
    runtime, launch = Path(__file__).with_name("cuda_launch_recorder.cpp"), csrc / "cuda" / "launch.cpp"
    nvcc = [TOOLKIT.nvcc, *kernel_report.NVCC_FLAGS, *include, "-arch=sm_90", "-c", "-o"]
    for command in (
        *([*nvcc, file, csrc / "cuda" / f"{file.stem}.cu"] for file in objects),
        ["g++", "-std=c++20", f"-I{csrc}", *include, "-o", folder / "recorder", runtime, launch, *objects],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    return folder / "recorder"


def launches(recorder: Path, num_segments: int, device_table: bool, scales: bool = False) -> dict[str, list[str]]:
    """By operation: the error, then kernel, grid and block of each launch."""
    command = [str(recorder), str(num_segments), str(int(device_table)), str(int(scales))]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_kernel_fits_its_registers_and_moves_16_bytes(report: dict[str, Any], arch: str, kernel: str) -> None:
    found = report[arch][kernel]
    assert found["spill_bytes"] == 0 and found["local_bytes"] == 0, found
    assert found["registers"] <= MAX_REGISTERS[kernel.split("<")[0]], found
    # One load of codes per thread and group at least for each codec; the gradients' side adds to that.
    assert found["loads_16"] >= 8 and found["stores_16"] >= 8, found
    assert found["generic"] == 0, "an access whose memory space the compiler does not know"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("operation", ["pack", "reduce", "unpack"])
def test_block_kernel_fits_its_registers_and_moves_16_bytes(report: dict[str, Any], arch: str, operation: str) -> None:
    names = [f"block_{operation}_kernel", *(["shard_reduce_kernel"] if operation == "reduce" else [])]
    for name, capacity in itertools.product(names, CAPACITIES):
        found = report[arch][f"{name}<{capacity}>"]
        assert found["spill_bytes"] == 0 and found["local_bytes"] == 0, found
        assert found["registers"] <= MAX_REGISTERS[name], found
        # Gradients in, codes of all ranks in, gradients out: four accesses each at least.
        wide = {"pack": found["loads_16"], "reduce": found["loads_16"], "unpack": found["stores_16"]}
        assert wide[operation] >= 4, found


def test_no_kernel_is_worse_than_its_budget(report: dict[str, Any]) -> None:
    budgets = json.loads(kernel_report.BUDGETS.read_text())
    assert TOOLKIT is not None
    if TOOLKIT.version != budgets["nvcc"]:
        pytest.skip(f"budgets are of nvcc {budgets['nvcc']}, and this is {TOOLKIT.version}")
    losses, gains = kernel_report.compare(report, budgets["kernels"])
    how = "python tests/kernel_report.py budgets writes what they have now"
    assert not losses, "\n".join([*losses, f"if that is meant: {how}"])
    if gains:
        warnings.warn("\n".join(["kernels are better than their budgets:", *gains, how]), stacklevel=1)


@pytest.mark.parametrize(("num_segments", "capacity"), [(1, 128), (128, 128), (129, 4000), (4000, 4000), (4001, 0), (20000, 0)])
@pytest.mark.parametrize("scales", [False, True])
def test_one_operation_is_one_launch_whatever_the_number_of_segments(
    recorder: Path, num_segments: int, capacity: int, scales: bool
) -> None:
    for operation, (error, *rest) in launches(recorder, num_segments, True, scales).items():
        assert error == "0"
        kernel, grid, block = rest  # of one launch
        assert kernel_report.plain_name(kernel) == f"{'block_' if scales else ''}{operation}_kernel<{capacity}>"
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

"""What all tests share: the backends and devices to run under, and the rules by which tests skip.

backend, device   each test that takes both runs under every pair that exists: reference, native and triton, on the CPU and
                  on the GPU. CPU tensors go through Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
from fnmatch import fnmatch

import hypothesis
import pytest
import setuptools  # noqa: F401  (first: it puts its own distutils in place of Python's and fails if that is half loaded by then)
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from gsync import _native  # noqa: E402

# The short lane (-m quick), run under more than one torch: what depends on torch's interfaces, and is done in a few minutes.
QUICK_MODULES = (
    *("test_config", "test_layout", "test_ops_checks", "test_ops_cpu", "test_ops_registration", "test_packaging*", "test_cli"),
    *("test_engine_values", "test_engine_buckets", "test_engine_caller", "test_ddp_*", "test_reducer_values"),
)

hypothesis.settings.register_profile("gsync", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("gsync")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(no_gpu)
        if not item.get_closest_marker("slow") and any(fnmatch(item.path.stem, pattern) for pattern in QUICK_MODULES):
            item.add_marker(pytest.mark.quick)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that holds the gradients."""
    return torch.device(request.param)


@pytest.fixture(params=["reference", "native", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend that computes; tests without `device` run it on the CPU."""
    on_gpu = "device" in request.fixturenames and request.getfixturevalue("device").type == "cuda"
    reason = why_not(request.param, on_gpu)
    if reason:
        pytest.skip(reason)
    return str(request.param)


def why_not(backend: str, on_gpu: bool) -> str:
    """Return why `backend` cannot run here, or ""."""
    if backend == "native":
        if _native.C is None:
            return _native.MISSING
        if on_gpu and not _native.has_cuda():
            return "the extension was built without CUDA"
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton's interpreter is off where there is a GPU"
    return ""

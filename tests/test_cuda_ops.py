"""The operations on a real GPU, against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kernel_cases import CODECS, DTYPES, NUMELS, Case, bits, check, payload_of

from gsync import _native, backends
from gsync.layout import CODEC_KINDS, DTYPE_CODES, Segment, hash64

pytestmark = pytest.mark.gpu
MIXED = Case(NUMELS, [DTYPES[i % 4] for i in range(len(NUMELS))], [CODECS[i // 2 % 3] for i in range(len(NUMELS))], num_chunks=3)


@pytest.fixture(params=["native", "triton"])
def on_gpu(request: pytest.FixtureRequest) -> backends.Backend:
    if request.param == "native" and not _native.has_cuda():
        pytest.skip("the extension was built without CUDA")
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return backends.get(request.param, torch.device("cuda"))


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("misaligned", [False, True])
def test_gpu_writes_the_bytes_of_the_reference(
    on_gpu: backends.Backend, gpu: torch.device, dtype: torch.dtype, codec: str, misaligned: bool
) -> None:
    n = len(NUMELS)
    for num_chunks in (1, 3):
        check(on_gpu, gpu, Case(NUMELS, [dtype] * n, [codec] * n, num_chunks=num_chunks, misaligned=misaligned))


def test_gpu_mixes_codecs_dtypes_slices_and_unused_parameters(on_gpu: backends.Backend, gpu: torch.device) -> None:
    check(on_gpu, gpu, Case(NUMELS, MIXED.dtypes, MIXED.codecs, 3, num_slices=2, unused=(3, 8), misaligned=True))


@pytest.mark.parametrize("num_segments", [129, 4000, 4001])
def test_gpu_takes_any_number_of_segments(on_gpu: backends.Backend, gpu: torch.device, num_segments: int) -> None:
    check(on_gpu, gpu, Case([5] * num_segments, [torch.float32] * num_segments, ["bf16"] * num_segments, finite=True))


def test_gpu_sums_do_not_depend_on_alignment_or_slices(on_gpu: backends.Backend, gpu: torch.device) -> None:
    shape = ((900_000, 20_000, 4097, 33), DTYPES, ("bf16", "fp16", "fp32", "fp16"))
    sums = [check(on_gpu, gpu, Case(*shape, num_chunks=3, finite=True)) for _ in range(2)]
    sums.append(check(on_gpu, gpu, Case(*shape, num_chunks=3, num_slices=3, misaligned=True, finite=True)))
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("num_segments", [1, 1000, 5000])
def test_gpu_operation_is_one_launch(on_gpu: backends.Backend, gpu: torch.device, num_segments: int) -> None:
    layout, gradients, payload, measures = bucket([64] * num_segments, torch.float32, "bf16", gpu)
    reduced = payload_of(payload.numel(), gpu)

    def run() -> None:
        on_gpu.pack(layout, gradients, payload, 0.5)
        on_gpu.reduce(layout, 0, [payload, payload], reduced, 1.0)
        on_gpu.unpack(layout, reduced, gradients, *measures)

    run()  # compiles, uploads the tables
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name]
    assert len(kernels) == 3, kernels
    for operation, kernel in zip(("pack", "reduce", "unpack"), kernels, strict=True):
        assert f"{operation}_kernel" in kernel


def test_gpu_follows_the_current_stream(on_gpu: backends.Backend, gpu: torch.device) -> None:
    layout, gradients, payload, measures = bucket([100_003, 17], torch.float32, "fp32", gpu)
    run_on = torch.cuda.Stream(gpu)
    on_gpu.pack(layout, gradients, payload, 1.0)  # compiles, uploads the tables
    torch.cuda.synchronize()
    for attempt in range(20):
        with torch.cuda.stream(run_on):
            torch.cuda._sleep(2_000_000)  # about 1 ms: whatever ran on another stream would come first
            for gradient in gradients:
                gradient.fill_(attempt + 1)
            on_gpu.pack(layout, gradients, payload, 1.0)
            for gradient in gradients:
                gradient.zero_()
            on_gpu.unpack(layout, payload, gradients, *measures)
        run_on.synchronize()
        assert all((gradient == attempt + 1).all() for gradient in gradients)
        assert measures[2].tolist() == [100_003 * (attempt + 1) ** 2, 17 * (attempt + 1) ** 2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_other_than_the_current_one_is_served(on_gpu: backends.Backend) -> None:
    with torch.cuda.device(0):
        before = torch.cuda.memory_allocated(0)
        check(on_gpu, torch.device("cuda", 1), MIXED)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_allocated(0) == before


def test_gpu_addresses_beyond_2_to_the_31_elements(on_gpu: backends.Backend, gpu: torch.device) -> None:
    numel = 2**31 + 4096 + 5
    if torch.cuda.mem_get_info(gpu)[0] < 5 * 2 * numel:
        pytest.skip("needs 22 GB of free GPU memory")
    layout, gradients, payload, measures = bucket([numel], torch.bfloat16, "bf16", gpu)
    tail = torch.randn(5000, device=gpu).bfloat16()
    gradients[0].zero_()
    gradients[0][-5000:] = tail
    on_gpu.pack(layout, gradients, payload, 1.0)
    gradients[0].fill_(7)
    on_gpu.unpack(layout, payload, gradients, *measures)
    assert torch.equal(bits(gradients[0][-5000:]), bits(tail))
    assert not gradients[0][:-5000].any()
    torch.testing.assert_close(measures[2], tail.double().square().sum().view(1), rtol=1e-12, atol=0)


def bucket(
    numels: Sequence[int], dtype: torch.dtype, codec: str, gpu: torch.device
) -> tuple[backends.BucketLayout, list[torch.Tensor], torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A layout, gradients of ones, a payload, and what unpack measures."""
    segments = [Segment(n, DTYPE_CODES[dtype], CODEC_KINDS[codec], hash64(f"layer.{i}")) for i, n in enumerate(numels)]
    layout = backends.BucketLayout(segments, 1)
    gradients = [torch.ones(n, dtype=dtype, device=gpu) for n in numels]
    measures = (
        torch.zeros(layout.python.num_partials, dtype=torch.float64, device=gpu),
        torch.zeros(1, dtype=torch.int32, device=gpu),
        torch.zeros(len(numels), dtype=torch.float64, device=gpu),
    )
    return layout, gradients, payload_of(layout.python.payload_bytes, gpu), measures

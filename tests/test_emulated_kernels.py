"""The CUDA kernels on the CPU (tests/emulated_kernels.py): the bytes of the reference, from every instance of every kernel."""

from __future__ import annotations

import itertools

import block_cases
import emulated_kernels
import kernel_cases
import pytest
import torch
from block_cases import BLOCK_CODECS
from emulated_kernels import ORDERS, PATTERNS, EmulatedBackend
from kernel_cases import CODECS, DTYPES, NUMELS, bits
from ops_cases import special_values

from gsync import backends, reference
from gsync.encoding import EncodeOptions, random_key
from gsync.layout import CODEC_KINDS, Segment, hash64

CPU = torch.device("cpu")
SCHEDULES = tuple(itertools.product(ORDERS, PATTERNS))
pytestmark = pytest.mark.skipif(bool(emulated_kernels.why_not()), reason=emulated_kernels.why_not() or "they run")
needs_sanitizers = pytest.mark.skipif(
    not emulated_kernels.why_not() and not emulated_kernels.sanitizer_runtime(), reason="the compiler has no libasan"
)
MIXED = {
    "dtypes": [DTYPES[i % 4] for i in range(len(NUMELS))],
    "codecs": [CODECS[i // 2 % 3] for i in range(len(NUMELS))],
}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    emulated_kernels.build()


def emulated(schedule: int = 0, sanitized: bool = False, failed: int | None = None) -> EmulatedBackend:
    order, pattern = SCHEDULES[schedule % len(SCHEDULES)]
    return EmulatedBackend(order, pattern, schedule, sanitized, failed)


# ---- codecs without a scale --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_write_the_bytes_of_the_reference(dtype: torch.dtype, codec: str) -> None:
    n = len(NUMELS)
    number = CODECS.index(codec) * len(DTYPES) + DTYPES.index(dtype)
    for i, (num_chunks, misaligned) in enumerate(itertools.product((1, 3), (False, True))):
        case = kernel_cases.Case(NUMELS, [dtype] * n, [codec] * n, num_chunks=num_chunks, misaligned=misaligned)
        kernel_cases.check(emulated(4 * number + i), CPU, case)


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
def test_codecs_dtypes_slices_and_unused_parameters_mix_in_any_order(schedule: int) -> None:
    case = kernel_cases.Case(NUMELS, **MIXED, num_chunks=3, num_slices=2, unused=(3, 8), misaligned=True)
    kernel_cases.check(emulated(schedule), CPU, case)


def test_special_values_are_encoded_as_the_reference_does() -> None:
    x = special_values().repeat(40)  # whole groups and a tail
    for codec, scale in itertools.product(CODECS, (1.0, 1 / 3, -0.0)):
        layout = backends.BucketLayout([Segment(x.numel(), 0, CODEC_KINDS[codec], 1)], 2)
        want, got = (kernel_cases.payload_of(layout.python.payload_bytes, CPU) for _ in range(2))
        reference.pack(layout.python, [x], want, scale)
        emulated().pack(layout, [x], got, scale)
        assert torch.equal(want, got), (codec, scale)


# ---- codecs with a scale, and options of encoding ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(36))
def test_block_kernels_write_the_bytes_of_the_reference(seed: int) -> None:
    block_cases.compare(emulated(seed), block_cases.random_case(1000 + seed))


@pytest.mark.parametrize("codec", [*BLOCK_CODECS, "bf16", "fp16", "fp32"])
def test_one_codec_with_everything(codec: str) -> None:
    segments = ((4097, torch.float32, codec), (63, torch.bfloat16, codec), (0, torch.float32, codec), (301, torch.float64, codec))
    schedules = range(len(SCHEDULES)) if codec == "int8" else (CODEC_KINDS[codec],)
    for schedule, stochastic in itertools.product(schedules, (False, True)):
        case = block_cases.Case(segments, chunks=2, stochastic=stochastic, sums=True)
        block_cases.compare(emulated(schedule), case)


@pytest.mark.parametrize("block_size", [32, 64, 128, 512, 1024, 2048, 4096])
def test_every_block_size(block_size: int) -> None:
    segments = tuple((9001, dtype, codec) for dtype, codec in zip((torch.float32, torch.float16) * 2, BLOCK_CODECS, strict=True))
    block_cases.compare(emulated(block_size // 32), block_cases.Case(segments, block_size=block_size, residuals=block_size > 64))


# ---- instances ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("few", "residuals"), [(128, 64), (129, 65), (4000, 2000), (4001, 2001)])
def test_addresses_come_by_value_or_from_a_table(few: int, residuals: int) -> None:
    for num_segments, codec in ((few, "bf16"), (residuals, "int8")):
        numels = [i % 5 if i % 37 == 0 else 0 for i in range(num_segments - 1)] + [5003]  # each that is not empty is a tile
        codecs = [codec] * (num_segments - 1) + ["fp16"]
        segments = [Segment(n, 0, CODEC_KINDS[c], hash64(f"w{i}")) for i, (n, c) in enumerate(zip(numels, codecs, strict=True))]
        gradients: list[torch.Tensor | None] = [
            torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(numels)
        ]
        gradients[37] = None
        layout = backends.BucketLayout(segments, 1)
        outcomes = []
        for backend in (backends.ReferenceBackend(), emulated(num_segments)):
            options = EncodeOptions(residuals=[torch.full((n,), 0.25) for n in numels] if codec == "int8" else None)
            payload, out = (kernel_cases.payload_of(layout.python.payload_bytes, CPU) for _ in range(2))
            backend.pack(layout, gradients, payload, 0.5, None, options)
            backend.reduce(layout, 0, [payload, payload], out, 0.5, options)
            written = [torch.empty(n) for n in numels]
            partials, found = torch.zeros(layout.python.num_partials, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
            sums = torch.full((num_segments,), -1.0, dtype=torch.float64)
            backend.unpack(layout, out, written, partials, found, sums)
            outcomes.append([payload, out, torch.cat(written), found, *(options.residuals or ())])
            assert torch.allclose(sums, torch.stack([w.double().square().sum() for w in written]), rtol=1e-12, atol=0)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*outcomes, strict=True))


def test_every_instance_of_every_kernel_runs() -> None:
    library = emulated_kernels.load()
    library.emulated_take_num_kernels()
    backend = emulated(5)
    for count, codec in itertools.product((1, 129, 4001), ("fp32", "int4")):
        numels = [1] + [0] * (count - 1)
        layout = backends.BucketLayout([Segment(n, 0, CODEC_KINDS[codec], i) for i, n in enumerate(numels)], 1)
        gradients = [torch.full((n,), 7.0) for n in numels]
        payload = kernel_cases.payload_of(layout.python.payload_bytes, CPU)
        backend.pack(layout, gradients, payload, 1.0)
        partials = torch.zeros(1, dtype=torch.float64)
        backend.unpack(layout, payload, gradients, partials, torch.zeros(1, dtype=torch.int32), None)
        assert gradients[0].item() == 7.0 and partials.item() == 49.0

        few = backends.BucketLayout([Segment(300, 0, CODEC_KINDS[codec], 7)], 1)
        sent, want, got = (kernel_cases.payload_of(few.python.payload_bytes, CPU) for _ in range(3))
        reference.pack(few.python, [torch.linspace(-1, 1, 300)], sent, 1.0)
        reference.reduce(few.python, 0, [sent] * count, want, 1 / count)
        backend.reduce(few, 0, [sent] * count, got, 1 / count)
        assert torch.equal(want, got)
        if codec == "int4":
            plain = kernel_cases.payload_of(few.uncompressed.python.payload_bytes, CPU)
            reference.pack(few.uncompressed.python, [torch.linspace(-1, 1, 300)], plain, 1.0)
            reference.reduce(few.python, 0, [plain] * count, want, 1 / count, uncompressed=True)
            backend.reduce(few, 0, [plain] * count, got, 1 / count, uncompressed=True)
            assert torch.equal(want, got)
    # Three operations, with and without a scale, and the encoding of a shard; three ways to pass addresses.
    assert library.emulated_take_num_kernels() == 21


# ---- unpack: sums and failure ------------------------------------------------------------------------------------------


def test_sums_depend_on_neither_order_nor_alignment_nor_slices() -> None:
    shape = ((140_003, 20_000, 4097, 33), DTYPES, ("bf16", "fp16", "fp32", "fp16"))
    sums = [kernel_cases.check(emulated(i), CPU, kernel_cases.Case(*shape, num_chunks=3, finite=True)) for i in (0, 2, 5)]
    cut = kernel_cases.Case(*shape, num_chunks=3, num_slices=3, misaligned=True, finite=True)
    sums.append(kernel_cases.check(emulated(3), CPU, cut))
    assert all(torch.equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_failed_exchange_becomes_nan_everywhere(codec: str) -> None:
    numels = (4097, 300, 0)
    layout = backends.BucketLayout([Segment(n, i, CODEC_KINDS[codec], i) for i, n in enumerate(numels)], 1)
    payload = kernel_cases.payload_of(layout.python.payload_bytes, CPU)
    gradients = [torch.ones(n, dtype=dtype) for n, dtype in zip(numels, DTYPES, strict=False)]
    emulated().pack(layout, gradients, payload, 1.0)
    for failed in (0, 1):
        found, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.float64)
        partials = torch.zeros(layout.python.num_partials, dtype=torch.float64)
        emulated(failed=failed).unpack(layout, payload, gradients, partials, found, sums)
        assert found.item() == failed and sums[:2].isnan().all() == bool(failed) and sums[2] == 0
        assert all(gradient.isnan().all() if failed else gradient.eq(1).all() for gradient in gradients)


# ---- errors, and what reports mistakes ---------------------------------------------------------------------------------


def run_fault(name: str, mistake: bool, schedule: int = 0, num_bytes: int = 512) -> tuple[str, torch.Tensor]:
    """The error of a kernel of tests/emulation/cuda/faults.cu, and what it wrote."""
    library = emulated_kernels.load()
    order, pattern = SCHEDULES[schedule]
    library.emulated_schedule(ORDERS.index(order), 7, pattern)
    given, out = (torch.arange(num_bytes) * 7 % 251).to(torch.uint8), torch.full((num_bytes,), pattern, dtype=torch.uint8)
    error = library.emulated_fault(name.encode(), mistake, given.data_ptr(), out.data_ptr(), num_bytes)
    return (library.emulated_error().decode() if error else ""), out


def test_an_unwritten_output_shows_under_two_patterns() -> None:
    for mistake in (False, True):
        outputs = [run_fault("written", mistake, schedule)[1] for schedule in (0, 1)]
        assert torch.equal(*outputs) == (not mistake)


def test_a_missing_barrier_shows_in_some_order() -> None:
    right = (torch.arange(512) * 7 % 251).to(torch.uint8).view(2, 256).flip(1).reshape(-1)
    schedules = range(len(SCHEDULES))
    assert all(torch.equal(run_fault("ordered", False, schedule)[1], right) for schedule in schedules)
    wrong = {SCHEDULES[schedule][0] for schedule in schedules if not torch.equal(run_fault("ordered", True, schedule)[1], right)}
    assert wrong == set(ORDERS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("met", ("thread 0 of block 1 waits at __syncthreads in line ", "thread 255 of block 1 has ended")),
        ("same", ("thread 31 of block 0 waits at __shfl_xor_sync in line ", "thread 0 of block 0 waits at __shfl_sync in line ")),
    ],
)
def test_threads_that_do_not_meet_are_reported(name: str, words: tuple[str, str]) -> None:
    assert run_fault(name, mistake=False)[0] == ""
    error, _ = run_fault(name, mistake=True)
    assert all(word in error for word in words), error
    assert run_fault(name, mistake=False)[0] == "", "a grid that was stopped leaves nothing behind"


FAULT_SCRIPT = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.emulated_fault.argtypes = (ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
allocate = ctypes.CDLL(None).malloc
allocate.restype = ctypes.c_void_p
name, mistake, offset = sys.argv[2].encode(), sys.argv[3] == "True", int(sys.argv[4])
given = allocate(200 + offset) + offset  # ends where it is read to
assert library.emulated_fault(name, mistake, given, allocate(200), 200) == 0
print("clean")
"""


@needs_sanitizers
@pytest.mark.parametrize(
    ("name", "offset", "words"), [("aligned", 4, "misaligned address"), ("bounded", 0, "heap-buffer-overflow")]
)
def test_sanitizers_report_a_bad_access(name: str, offset: int, words: str) -> None:
    library = str(emulated_kernels.build(sanitized=True))
    for mistake in (False, True):
        arguments = ["-c", FAULT_SCRIPT, library, name, str(mistake), str(offset)]
        done = emulated_kernels.run_sanitized(arguments, timeout_s=60)
        assert (done.returncode == 0 and "clean" in done.stdout) if not mistake else words in done.stderr, done.stderr[-3000:]


def sanitized_cases() -> None:
    """What runs under the sanitizers: every codec, dtype, alignment, option and way to pass addresses."""
    backend = emulated(5, sanitized=True)
    n = len(NUMELS)
    for i, (codec, misaligned) in enumerate(itertools.product(CODECS, (False, True))):
        dtypes = [DTYPES[(i + j) % 4] for j in range(n)]
        kernel_cases.check(backend, CPU, kernel_cases.Case(NUMELS, dtypes, [codec] * n, 1 + 2 * (i % 2), misaligned=misaligned))
    for seed in range(12):
        block_cases.compare(backend, block_cases.random_case(2000 + seed))
    for num_segments in (129, 4001):
        numels = [5 if i % 100 == 0 else 0 for i in range(num_segments)]
        layout = backends.BucketLayout([Segment(n, 0, CODEC_KINDS["int8"], i) for i, n in enumerate(numels)], 1)
        payload = kernel_cases.payload_of(layout.python.payload_bytes, CPU)
        residuals = [torch.zeros(n) for n in numels]
        options = EncodeOptions(
            residuals, random_key(1, 2, "pack", 3), torch.zeros(layout.python.num_tiles, 4, dtype=torch.float64)
        )
        backend.pack(layout, [torch.ones(n) for n in numels], payload, 1.0, None, options)
        backend.reduce(layout, 0, [payload] * 2, kernel_cases.payload_of(payload.numel(), CPU), 1.0, options)
        written = [torch.empty(n) for n in numels]
        partials = torch.zeros(layout.python.num_partials, dtype=torch.float64)
        backend.unpack(layout, payload, written, partials, torch.zeros(1, dtype=torch.int32), torch.zeros(num_segments).double())


@needs_sanitizers
def test_kernels_are_clean_under_sanitizers() -> None:
    script = "import test_emulated_kernels as t; t.sanitized_cases(); print('clean')"
    done = emulated_kernels.run_sanitized(["-c", script], timeout_s=240)
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]

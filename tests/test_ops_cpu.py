"""The CPU kernels: one binary, several instruction sets, the same bits from each."""

from pathlib import Path

import pytest
import torch
from ops_cases import INTEGERS, SIZES, gradient, same_bits

from gsync import _native, ops

pytestmark = pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "extension loaded")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def run(level, codec, gradients, num_chunks=3):
    """Every byte and every bit that the kernels write at one level."""
    c = _native.C
    numels = [g.numel() for g in gradients]
    dtypes = [DTYPES.index(g.dtype) for g in gradients]
    layout = c.layout(numels, dtypes, [codec] * len(gradients), list(range(len(gradients))), num_chunks)
    payload = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    counters = torch.zeros(2, dtype=torch.int64)
    c.pack(layout, gradients, payload, 1 / 3, counters, cpu_level=level)
    chunks = payload.view(num_chunks, -1)
    out = torch.empty_like(chunks[1])
    c.reduce(layout, 1, [chunks[1], chunks[1].clone(), chunks[1]], out, 1 / 3, cpu_level=level)
    written = [torch.empty_like(g) for g in gradients]
    partials = torch.zeros(layout.num_partials, dtype=torch.float64)
    found = torch.zeros(1, dtype=torch.int32)
    sums = torch.empty(len(gradients), dtype=torch.float64)
    c.unpack(layout, payload, written, partials, found, True, sums, cpu_level=level)
    return [payload, counters, out, partials, sums, found, *written]


@pytest.mark.parametrize("codec", [0, 1, 2])
@pytest.mark.parametrize("special", [False, True])
def test_every_instruction_set_gives_the_same_bits(codec, special):
    if special:
        gradients = [gradient(n, dtype, seed=n) for n in SIZES for dtype in DTYPES]
    else:  # sums of squares that are finite
        gradients = [torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(n)) for n in SIZES for dtype in DTYPES]
    levels = _native.C.cpu_levels()
    assert levels[0] == "baseline"
    expected = run("baseline", codec, gradients)
    for level in levels[1:]:
        for a, b in zip(expected, run(level, codec, gradients), strict=True):
            assert same_bits(a, b), level


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bucket_written_past_the_caches_is_written_whole_and_nothing_else(codec, dtype):
    sizes = [700_001, 3, 500_002, 17, 70_000]  # above 4 MiB, gradients at every misalignment, steps that end anywhere
    values = torch.randn(sum(sizes) + 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload = ops.pack(list(values[1:-1].split(sizes)), codec)
    written = {}
    for backend in ("reference", "native"):
        buffer = torch.full_like(values, 7.0)
        gradients = list(buffer[1:-1].split(sizes))
        ops.unpack(payload, gradients, codec, backend=backend)
        assert buffer[0] == 7.0 and buffer[-1] == 7.0
        written[backend] = buffer
    assert same_bits(written["reference"], written["native"])


def test_large_payloads_are_aligned_and_writable_to_the_end():
    for size in (1, 2**21 - 1, 2**21, 2**21 + 1, 5 * 2**20 + 3):
        payload = _native.C.empty_payload(size)
        assert payload.shape == (size,) and payload.dtype == torch.uint8 and payload.data_ptr() % 16 == 0
        assert int(payload.fill_(1).sum(dtype=torch.int64)) == size


def test_number_of_threads_changes_no_bit():
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (300000, 17, 70000)]
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(run(None, 2, gradients))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_sum_of_a_parameter_does_not_depend_on_its_neighbours():
    weight = torch.randn(20011, generator=torch.Generator().manual_seed(0))
    sums = []
    for others in ([], [torch.randn(4097)], [torch.randn(300), torch.randn(70000)]):
        gradients = [*others, weight]
        names = [*(f"other{i}" for i in range(len(others))), "weight"]
        payload = ops.pack(gradients, "bf16", 1.0, 3, names=names, backend="native")
        copies = [g.clone() for g in gradients]
        sums.append(torch.ops.gsync.unpack(payload, copies, ["bf16"] * len(names), 3, names, "native", 0)[1][-1:])
    assert same_bits(sums[0], sums[1]) and same_bits(sums[0], sums[2])


def test_unknown_instruction_set_is_named():
    with pytest.raises(ValueError, match="cpu_level is 'sse9', expected one this processor has: baseline"):
        run("sse9", 2, [torch.ones(3)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradients": [torch.ones(4)]}, r"gradients\[0\] is Float \[4\]"),
        ({"gradients": []}, "0 gradients, expected 1"),
        ({"gradients": [torch.ones(3).double()]}, r"gradients\[0\] is Double"),
        ({"gradients": [torch.ones(6)[::2]]}, r"gradients\[0\] is Float \[3\] strides \[2\]"),
        ({"payload": torch.empty(1, dtype=torch.uint8)}, r"payload is Byte \[1\], expected contiguous uint8 \[32\]"),
        ({"payload": torch.empty(33, dtype=torch.uint8)[1:]}, "payload begins at .*, expected a multiple of 16"),
        ({"counters": torch.zeros(2)}, r"counters is Float \[2\] on cpu, expected contiguous Long \[2\]"),
    ],
)
def test_memory_that_does_not_fit_is_refused(change, message):
    layout = _native.C.layout([3], [0], [2], [0], 1)
    arguments = {"gradients": [torch.ones(3)], "payload": torch.empty(32, dtype=torch.uint8), "scale": 1.0, "counters": None}
    _native.C.pack(layout, **arguments)
    with pytest.raises(ValueError, match=message):
        _native.C.pack(layout, **{**arguments, **change})


@pytest.mark.slow
def test_elements_beyond_two_to_the_31_are_right():
    numel = 2**31 + 8
    needed = 2 * numel * 2 + 4 * 2**30
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    if available < needed:
        pytest.skip(f"needs {needed >> 30} GiB of memory, {available >> 30} GiB are free")
    big = torch.zeros(numel, dtype=torch.bfloat16)
    big[-1], big[2**31], big[0] = 3.0, 5.0, 7.0
    payload = ops.pack([big], "bf16", num_chunks=2, backend="native")
    assert payload.numel() == ops.payload_bytes([numel], "bf16", num_chunks=2) > 2**32
    big.zero_()
    found, squares = ops.unpack(payload, [big], "bf16", 2, backend="native")
    assert (float(big[-1]), float(big[2**31]), float(big[0])) == (3.0, 5.0, 7.0)
    assert float(squares) == 9.0 + 25.0 + 49.0 and not bool(found)
    assert INTEGERS[big.dtype] == torch.int16 and int((big[:: 2**20] != 0).sum()) == 2

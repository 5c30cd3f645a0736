"""One test, all backends: the same payload, the same gradients, whatever computes them."""

import math
import os

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from ops_cases import CODECS, DTYPES, SIZES, gradient, same_bits

from gsync import _native, backends, ops, reference
from gsync.layout import CODEC_KINDS, DTYPE_CODES, Segment, build_layout, hash64


def numels_of(gradients):
    return [g.numel() * (2 if g.is_complex() else 1) for g in gradients]


def bytes_by_hand(gradients, codecs, scale, num_chunks):
    """The payload from the formulas, element by element of the layout."""
    flat = [torch.view_as_real(g).reshape(-1) if g.is_complex() else g.reshape(-1) for g in gradients]
    segments = [
        Segment(g.numel(), DTYPE_CODES[g.dtype], CODEC_KINDS[c], hash64(str(i)))
        for i, (g, c) in enumerate(zip(flat, codecs, strict=True))
    ]
    layout = build_layout(segments, num_chunks)
    payload = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    reference.pack(layout, flat, payload, scale)
    return payload


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5])
def test_pack_writes_the_bytes_of_the_reference(backend, device, codec, scale, num_chunks):
    gradients = [gradient(n, dtype, seed=n) for n in SIZES for dtype in DTYPES]
    expected = bytes_by_hand(gradients, [codec] * len(gradients), scale, num_chunks)
    gradients = [g.to(device) for g in gradients]
    payload = ops.pack(gradients, codec, scale, num_chunks, backend=backend)
    assert payload.device.type == device.type and payload.dtype == torch.uint8
    assert torch.equal(payload.cpu(), expected)
    assert payload.numel() == ops.payload_bytes(numels_of(gradients), codec, num_chunks=num_chunks)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_unpack_writes_the_gradients_of_the_reference(backend, device, codec, num_chunks):
    gradients = [gradient(n, dtype, seed=n) for n in SIZES for dtype in DTYPES]
    payload = ops.pack(gradients, codec, 0.5, num_chunks, backend="reference")
    expected = [torch.empty_like(g) for g in gradients]
    found, _ = ops.unpack(payload, expected, codec, num_chunks, backend="reference")
    got = [torch.empty_like(g, device=device) for g in gradients]
    got_found, got_squares = ops.unpack(payload.to(device), got, codec, num_chunks, backend=backend)
    for a, b in zip(expected, got, strict=True):
        assert same_bits(a, b.cpu())
    assert got_found.dtype == torch.bool and got_found.shape == () and bool(got_found) == bool(found) is True
    assert got_squares.dtype == torch.float64 and got_squares.shape == () and not got_squares.isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_sum_of_squares_is_of_the_values_written(backend, device, codec, dtype):
    gradients = [torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(n)).to(device) for n in SIZES]
    payload = ops.pack(gradients, codec, 0.5, 3, backend=backend)
    found, squares = ops.unpack(payload, gradients, codec, 3, backend=backend)
    assert not bool(found)
    exact = math.fsum(
        v * v for g in gradients for v in (torch.view_as_real(g) if g.is_complex() else g).double().flatten().tolist()
    )
    # Each of n additions of non-negative numbers errs by at most 2^-53 of the sum.
    num_additions = sum(numels_of(gradients))
    assert float(squares) == pytest.approx(exact, rel=num_additions * 2.0**-53)


def test_square_of_the_largest_number_does_not_overflow(backend, device):
    gradients = [torch.full((4096,), 3.4028234663852886e38, device=device)]
    found, squares = ops.unpack(ops.pack(gradients, "fp32", backend=backend), gradients, "fp32", backend=backend)
    assert not bool(found)
    assert float(squares) == pytest.approx(4096 * 3.4028234663852886e38**2)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("codec", CODECS)
def test_one_nonfinite_element_is_found_wherever_it_lies(backend, device, codec, value):
    for spot in (0, 255, 4095, 4096, 9999):
        gradients = [torch.ones(7, device=device), torch.ones(10000, device=device)]
        gradients[1][spot] = value
        payload = ops.pack(gradients, codec, num_chunks=2, backend=backend)
        found, _ = ops.unpack(payload, gradients, codec, 2, backend=backend)
        assert bool(found)
        assert int((~gradients[1].isfinite()).sum()) == 1


def test_value_that_overflows_the_gradient_dtype_is_found(backend, device):
    payload = ops.pack([torch.full((300,), 1e5, device=device)], "bf16", backend=backend)
    half = [torch.empty(300, dtype=torch.float16, device=device)]
    found, squares = ops.unpack(payload, half, "bf16", backend=backend)
    assert bool(found) and math.isinf(float(squares)) and bool(half[0].isinf().all())


@pytest.mark.parametrize("codec", [*CODECS, ["fp32", "bf16", "fp16", "bf16", "fp32", "fp16", "bf16", "fp32", "bf16"]])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_reduce_is_the_fp32_sum_in_rank_order(backend, device, codec, num_chunks, scale):
    per_segment = [codec] * len(SIZES) if isinstance(codec, str) else codec
    ranks = [[gradient(n, torch.float32, seed=n + 100 * rank) for n in SIZES] for rank in range(3)]
    sent = [ops.pack(gradients, codec, 1.0, num_chunks, backend="reference").view(num_chunks, -1) for gradients in ranks]
    summed = []
    for i, kind in enumerate(per_segment):
        decoded = [reference.decode(reference.encode(gradients[i], CODEC_KINDS[kind])) for gradients in ranks]
        summed.append((decoded[0] + decoded[1]) + decoded[2])
    expected = bytes_by_hand(summed, per_segment, scale, num_chunks).view(num_chunks, -1)
    for chunk in range(num_chunks):
        payloads = [payload[chunk].to(device) for payload in sent]
        got = ops.reduce(payloads, list(SIZES), codec, num_chunks, chunk, scale, backend=backend)
        assert torch.equal(got.cpu(), expected[chunk])


def test_reduce_of_one_payload_keeps_negative_zero(backend, device):
    payload = ops.pack([torch.tensor([-0.0, 1.0], device=device)], "bf16", backend=backend)
    assert torch.equal(ops.reduce([payload], [2], "bf16", backend=backend), payload)


def test_mixed_codecs_travel_in_one_payload(backend, device):
    codecs = ["fp32", "bf16", "fp16", "fp32"]
    gradients = [gradient(n, torch.float32, seed=n) for n in (4097, 300, 0, 5)]
    for num_chunks in (1, 2, 3):
        expected = bytes_by_hand(gradients, codecs, 1.0, num_chunks)
        got = ops.pack([g.to(device) for g in gradients], codecs, num_chunks=num_chunks, backend=backend)
        assert torch.equal(got.cpu(), expected)
        back = [torch.empty_like(g, device=device) for g in gradients]
        ops.unpack(got, back, codecs, num_chunks, backend=backend)
        for g, b, codec in zip(gradients, back, codecs, strict=True):
            expected = reference.round_to(reference.decode(reference.encode(g, CODEC_KINDS[codec])), g.dtype)
            assert same_bits(b.cpu(), expected)


def test_parameter_not_used_packs_as_zeros_without_its_flag(backend):
    segments = [Segment(300, 0, 2, 1), Segment(300, 0, 2, 2)]
    layout = backends.BucketLayout(segments, 1)
    payload = torch.full((layout.sizes.payload_bytes,), 255, dtype=torch.uint8)
    backends.get(backend, payload.device).pack(layout, [torch.ones(300), None], payload, 1.0)
    codes = payload.view(torch.bfloat16).float()
    assert codes[:2].tolist() == [1.0, 0.0]
    assert codes[8:308].unique().tolist() == [1.0] and codes[312:].unique().tolist() == [0.0]


def test_flags_of_all_ranks_are_combined_with_or(backend):
    for codecs in ([2, 2, 2], [0, 0, 0], [1, 2, 0]):
        layout = backends.BucketLayout([Segment(5, 0, codec, i) for i, codec in enumerate(codecs)], 1)
        computer = backends.get(backend, torch.device("cpu"))
        sent = []
        for used in ([True, False, False], [True, True, False]):
            payload = torch.empty(layout.sizes.payload_bytes, dtype=torch.uint8)
            computer.pack(layout, [torch.ones(5) if flag else None for flag in used], payload, 1.0)
            sent.append(payload)
        out = torch.empty_like(sent[0])
        computer.reduce(layout, 0, sent, out, 1.0)
        assert torch.equal(out[:16], sent[1][:16])


def test_elements_that_vanish_are_counted(backend):
    values = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 1.0, math.nan, 2.0**-25, 2.0**-24]).repeat(1000)
    layout = backends.BucketLayout([Segment(8000, 0, 1, 0)], 2)
    counters = torch.tensor([10, 20])
    payload = torch.empty(layout.sizes.payload_bytes, dtype=torch.uint8)
    backends.get(backend, payload.device).pack(layout, [values], payload, 1.0, counters)
    assert counters.tolist() == [10 + 6000, 20 + 3000]


def test_slices_give_the_gradients_and_sums_of_the_whole(backend):
    sizes = [0, 257, 20000, 4097]
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes]
    segments = [Segment(n, 0, 2, hash64(str(n))) for n in sizes]
    computer = backends.get(backend, torch.device("cpu"))
    results = []
    for num_slices in (1, 2, 5):
        written = [torch.full_like(g, math.nan) for g in gradients]
        found = torch.zeros(1, dtype=torch.int32)
        sums = torch.empty(len(sizes), dtype=torch.float64)
        partials = None
        for slice_idx in range(num_slices):
            layout = backends.BucketLayout(segments, 2, slice_idx, num_slices)
            if partials is None:
                partials = torch.empty(layout.sizes.num_partials, dtype=torch.float64)
            payload = torch.empty(layout.sizes.payload_bytes, dtype=torch.uint8)
            computer.pack(layout, gradients, payload, 0.5)
            last = slice_idx == num_slices - 1
            computer.unpack(layout, payload, written, partials, found, sums if last else None)
        results.append((torch.cat(written), sums, int(found)))
    for other in results[1:]:
        assert same_bits(results[0][0], other[0]) and same_bits(results[0][1], other[1]) and other[2] == 0


BUCKETS = (
    st.lists(st.tuples(st.integers(0, 9000), st.sampled_from(DTYPES), st.sampled_from(CODECS)), max_size=5),
    st.integers(1, 6),
    st.floats(-1e3, 1e3, width=32),
    st.integers(0, 1000),
)


def check_bucket(backend, parameters, num_chunks, scale, seed):
    gradients = [gradient(n, dtype, seed + i) for i, (n, dtype, _) in enumerate(parameters)]
    codecs = [codec for _, _, codec in parameters]
    expected = ops.pack(gradients, codecs, scale, num_chunks, backend="reference")
    payload = ops.pack(gradients, codecs, scale, num_chunks, backend=backend)
    assert torch.equal(payload, expected)
    a, b = ([torch.zeros_like(g) for g in gradients] for _ in range(2))
    found_a, squares_a = ops.unpack(expected, a, codecs, num_chunks, backend="reference")
    found_b, squares_b = ops.unpack(payload, b, codecs, num_chunks, backend=backend)
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    assert bool(found_a) == bool(found_b)
    assert float(squares_a) == pytest.approx(float(squares_b), rel=1e-12, nan_ok=True)


@pytest.mark.skipif(_native.C is None, reason=_native.MISSING or "extension loaded")
@hypothesis.given(*BUCKETS)
def test_any_bucket_gives_the_bytes_of_the_reference_natively(parameters, num_chunks, scale, seed):
    check_bucket("native", parameters, num_chunks, scale, seed)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off where there is a GPU")
@hypothesis.given(*BUCKETS)
@hypothesis.settings(max_examples=10)  # the interpreter takes milliseconds a tile
def test_any_bucket_gives_the_bytes_of_the_reference_in_triton(parameters, num_chunks, scale, seed):
    pytest.importorskip("triton")
    # Triton's interpreter makes 0 of a scalar -0.
    check_bucket("triton", parameters, num_chunks, scale + 0.0, seed)

"""The same bytes from every backend: codecs with a scale, residuals, stochastic rounding, exempt segments beside coded ones."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from block_cases import BLOCK_CODECS, Case, compare, random_case, values
from conftest import why_not
from ops_cases import same_bits

from gsync import _native, backends, ops
from gsync.encoding import EncodeOptions, random_key

needs_native = pytest.mark.skipif(bool(why_not("native", False)), reason=why_not("native", False) or "it is there")
needs_triton = pytest.mark.skipif(bool(why_not("triton", False)), reason=why_not("triton", False) or "it is there")


@needs_native
@hypothesis.settings(max_examples=60)
@hypothesis.given(st.integers(0, 2**20))
def test_native_writes_the_reference_bytes(seed):
    compare(backends.get("native", torch.device("cpu")), random_case(seed))


@needs_triton
@pytest.mark.parametrize("seed", range(5))
def test_triton_writes_the_reference_bytes(seed):
    compare(backends.get("triton", torch.device("cpu")), random_case(seed, largest=4097))


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_one_codec_with_everything(backend, codec):
    case = Case(((4097, torch.float32, codec), (63, torch.bfloat16, codec)), chunks=2, stochastic=True, sums=True)
    compare(backends.get(backend, torch.device("cpu")), case)


@needs_native
@pytest.mark.parametrize(("codec", "stochastic"), list(itertools.product((*BLOCK_CODECS, "bf16", "fp16"), (False, True))))
def test_every_instruction_set_writes_the_same_bytes(codec, stochastic):
    gradients = [values(n, dtype, n) for n, dtype in ((9001, torch.float32), (257, torch.float16), (1000, torch.float64))]
    layout = ops.layout_for([g.numel() for g in gradients], [codec] * 3, ["a", "b", "c"], 1, 0)
    segments = [s.__class__(s.numel, d, s.codec, s.name_hash) for s, d in zip(layout.segments, (0, 1, 3), strict=True)]
    handle = backends.BucketLayout(segments, 1).native
    results = []
    for level in _native.C.cpu_levels():
        residuals = [torch.ones(g.numel()) for g in gradients]
        payload = torch.empty(handle.payload_bytes, dtype=torch.uint8)
        key = random_key(1, 2, "pack", 3) if stochastic else None
        sums = torch.zeros(handle.num_tiles, 4, dtype=torch.float64)
        _native.C.pack(handle, gradients, payload, 0.5, None, residuals, key, sums, cpu_level=level)
        out = torch.empty(handle.chunk_bytes, dtype=torch.uint8)
        _native.C.reduce(handle, 0, [payload, payload], out, 0.5, residuals, key, None, cpu_level=level)
        written = [torch.empty_like(g) for g in gradients]
        partials, found = torch.zeros(handle.num_partials, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
        squares = torch.zeros(3, dtype=torch.float64)
        _native.C.unpack(handle, out, written, partials, found, True, squares, cpu_level=level)
        results.append([payload, out, sums, *residuals, *written, partials, found, squares])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_triton_refuses_two_block_sizes_of_one_width():
    pytest.importorskip("triton")
    from gsync.kernels.backend import _block_sizes

    from gsync.layout import Segment, build_layout

    with pytest.raises(ValueError, match=r"block sizes \[64, 256\] in one bucket"):
        _block_sizes(build_layout([Segment(1, 0, 5, 0, 64), Segment(1, 0, 3, 0)], 1))


@pytest.mark.parametrize("codec", (*BLOCK_CODECS, "bf16"))
def test_a_parameter_does_not_depend_on_its_bucket(backend, codec):
    weight = torch.randn(5003, generator=torch.Generator().manual_seed(0))
    results = []
    for others in ([], [torch.randn(300)], [torch.randn(1), torch.randn(4500)]):
        gradients = [*others, weight]
        names = [*(f"other{i}" for i in range(len(others))), "weight"]
        codecs = [*(["int4", "bf16"][: len(others)]), codec]
        residuals = [torch.full((g.numel(),), 0.25) for g in gradients]
        where = {"names": names, "backend": backend}
        how = {"rounding": "stochastic", "seed": 3, "step": 4}
        payload = ops.pack(gradients, codecs, 0.5, 3, rank=1, residuals=residuals, **where, **how)
        chunks = payload.view(3, -1)
        reduced = []
        kept = []
        for chunk in range(3):
            held = [torch.full((n,), 0.125) for n in ops.chunk_numels([g.numel() for g in gradients], codecs, 3, chunk, names)]
            arguments = ([chunks[chunk]] * 2, [g.numel() for g in gradients], codecs, 3, chunk)
            reduced.append(ops.reduce(*arguments, residuals=held, **where, **how))
            kept.append(held[-1])
        back = [torch.empty_like(g) for g in gradients]
        ops.unpack(torch.cat(reduced), back, codecs, 3, **where)
        results.append([back[-1], residuals[-1], *kept])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_random_state_of_the_user_is_untouched_and_results_repeat(backend):
    x = torch.randn(300)
    before = torch.get_rng_state()
    first, again = (ops.pack([x], "int8", rounding="stochastic", seed=1, backend=backend) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    for change in ({"seed": 2}, {"seed": 1, "step": 1}, {"seed": 1, "rank": 1}, {"seed": 1, "names": ["other"]}):
        other = ops.pack([x], "int8", rounding="stochastic", backend=backend, **change)
        assert not torch.equal(first, other), change


def test_error_sums_add_up_over_calls(backend):
    layout = backends.BucketLayout(ops.layout_for([5000], ["int4"], ["w"], 1, 0).segments, 1)
    which = backends.get(backend, torch.device("cpu"))
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    sums = torch.zeros(layout.python.num_tiles, 4, dtype=torch.float64)
    payload = torch.empty(layout.python.payload_bytes + 16, dtype=torch.uint8)
    payload = payload[-payload.data_ptr() % 16 :][: layout.python.payload_bytes]
    for _ in range(2):
        which.pack(layout, [x], payload, 1.0, None, EncodeOptions(error_sums=sums))
    back = torch.empty_like(x)
    ops.unpack(payload, [back], "int4", names=["w"])
    lost = (x - back).double()
    expected = [lost.square().sum(), x.double().square().sum(), (x != 0).sum(), ((x != 0) & (back == 0)).sum()]
    torch.testing.assert_close(sums.sum(0), 2 * torch.stack([e.double() for e in expected]), rtol=1e-12, atol=0)

"""What the codecs with a scale lose, against bounds derived from their formats, and what they weigh."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from block_cases import BLOCK_CODECS, round_trip
from gsync.benchmarks import error

from gsync import ops, reference_block

# Half the largest step between two codes, over the largest code: int8 1/2 / 127; e4m3 32/2 / 448; e5m2 8192/2 / 57344. int4:
# 1/2 / 7 times the most that rounding the scale up to bf16 adds, 2^-7.
ERROR_OF_ABSMAX = {"int8": 1 / 254, "int4": 0.0725, "fp8_e4m3": 16 / 448, "fp8_e5m2": 4096 / 57344}
# Rounding of inv, x * inv, scale and code * scale in fp32: four times 2^-24, of at most absmax.
FLOAT_ERROR = 2.0**-22
BLOCK = {"int8": 256, "int4": 64, "fp8_e4m3": 256, "fp8_e5m2": 256}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def absmax_of(x, block_size):
    blocks = reference_block.as_blocks(x, block_size)
    return blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: x.numel()]


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("magnitude", [1.0, 1e-15, 1e30])
def test_error_of_one_encoding_is_within_its_bound(backend, codec, magnitude):
    x = normal(10007) * magnitude
    x[:2560] *= 10.0 ** torch.linspace(-6, 6, 2560)
    lost = (round_trip(x, codec, backend=backend) - x).abs()
    bound = absmax_of(x, BLOCK[codec]) * (ERROR_OF_ABSMAX[codec] + FLOAT_ERROR)
    assert bool((lost <= bound).all()), float((lost / bound).max())


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 1024, 4096])
def test_bound_holds_for_every_block_size(codec, block_size):
    x = normal(9001, seed=block_size)
    lost = (round_trip(x, codec, block_size=block_size) - x).abs()
    assert bool((lost <= absmax_of(x, block_size) * (ERROR_OF_ABSMAX[codec] + FLOAT_ERROR)).all())


@hypothesis.given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
def test_finite_stays_finite_and_zero_stays_zero(numbers):
    x = torch.tensor(numbers)
    for codec in BLOCK_CODECS:
        back = round_trip(x, codec)
        assert bool(back.isfinite().all())
        assert bool((back[x == 0] == 0).all())
        bound = absmax_of(x, BLOCK[codec]).double() * (ERROR_OF_ABSMAX[codec] + FLOAT_ERROR)
        zero_block = absmax_of(x, BLOCK[codec]) < 2.0**-80
        assert bool(((back.double() - x.double()).abs() <= torch.where(zero_block, 2.0**-80, bound)).all())


# Measured as `gsync bench error` does.


@pytest.mark.parametrize(("codec", "bound"), [("int8", 8e-4), ("int4", 1.2e-2), ("fp8_e4m3", 3e-3), ("fp8_e5m2", 6e-3)])
def test_stochastic_rounding_is_unbiased(codec, bound):
    assert error.bias(codec, 16384, draws=256) <= bound


@pytest.mark.parametrize(("codec", "bound"), [("bf16", 0.0026), ("int8", 0.011), ("fp8_e4m3", 0.04), ("int4", 0.165)])
def test_error_does_not_grow_with_the_number_of_ranks(codec, bound):
    errors = {world_size: error.error_of_mean(codec, world_size, 8192) for world_size in (2, 8, 64, 512)}
    assert max(errors.values()) <= bound, errors
    assert all(abs(value / errors[2] - 1) <= 0.1 for value in errors.values()), errors


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.0025), ("int4", 0.04), ("fp8_e4m3", 0.008), ("fp8_e5m2", 0.016)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_error_feedback_keeps_the_sum_over_40_steps(codec, bound, rounding):
    found, with_residuals = error.error_of_sum(codec, 8192, world_size=2, rounding=rounding, steps=40)
    # Stochastic rounding errs by up to a whole step, and so does what is left over in the residuals.
    assert found <= bound * (1 if rounding == "nearest" else 2)
    # Nothing is lost: what did not arrive is in the residuals.
    assert with_residuals <= 1e-5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_one_nonfinite_element_spoils_its_block_alone_and_for_one_step(backend, codec, value):
    where = {"codec": codec, "backend": backend}
    numel, block = 1000, BLOCK[codec]
    spoilt = slice(300 // block * block, 300 // block * block + block)
    residuals, kept = [torch.full((numel,), 0.5)], [torch.full((numel,), 0.25)]
    good, bad = normal(numel), normal(numel, seed=1)
    bad[300] = value
    payloads = [ops.pack([good], scale=0.5, **where), ops.pack([bad], scale=0.5, residuals=residuals, **where)]
    back = torch.empty(numel)
    found, squares = ops.unpack(ops.reduce(payloads, [numel], residuals=kept, **where), [back], **where)
    assert bool(found) and not math.isfinite(float(squares))
    expected = torch.zeros(numel, dtype=torch.bool)
    expected[spoilt] = True
    assert torch.equal(~back.isfinite(), expected)
    assert torch.equal(residuals[0][spoilt], torch.full_like(residuals[0][spoilt], 0.5))
    assert torch.equal(kept[0][spoilt], torch.full_like(kept[0][spoilt], 0.25))
    assert residuals[0].isfinite().all() and kept[0].isfinite().all()
    payload = ops.pack([good], scale=0.5, residuals=residuals, **where)
    found, _ = ops.unpack(ops.reduce([payload, payload], [numel], residuals=kept, **where), [back], **where)
    assert not bool(found) and bool(back.isfinite().all())


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_a_block_too_small_to_scale_goes_to_the_residual(backend, codec):
    x = torch.full((300,), 2.0**-81)
    residuals = [torch.zeros(300)]
    back = torch.empty(300)
    ops.unpack(ops.pack([x], codec, residuals=residuals, backend=backend), [back], codec, backend=backend)
    assert torch.equal(back, torch.zeros(300)) and torch.equal(residuals[0], x)


def test_a_parameter_that_no_rank_used_keeps_its_residuals(backend):
    from gsync import backends
    from gsync.encoding import EncodeOptions

    layout = backends.BucketLayout(ops.layout_for([300, 300], ["int8", "bf16"], ["a", "b"], 1, 0).segments, 1)
    which = backends.get(backend, torch.device("cpu"))
    room = [torch.empty(layout.python.payload_bytes + 16, dtype=torch.uint8) for _ in range(2)]
    payload, out = (r[-r.data_ptr() % 16 :][: layout.python.payload_bytes] for r in room)
    residuals = [torch.ones(300), torch.ones(300)]
    which.pack(layout, [None, None], payload, 1.0, None, EncodeOptions(residuals))
    which.reduce(layout, 0, [payload, payload], out, 1.0, EncodeOptions(residuals))
    assert not payload.any() and not out.any()
    assert all(torch.equal(r, torch.ones(300)) for r in residuals)


def test_sizes():
    numel = 2**20
    for codec, share in (("int8", 1.02), ("fp8_e4m3", 1.02), ("fp8_e5m2", 1.02), ("int4", 0.54)):
        for num_chunks in (1, 2, 8):
            assert ops.payload_bytes([numel], codec, num_chunks=num_chunks) <= share * numel
    assert ops.payload_bytes([64] * 1000, "int8") <= 0.28 * 4 * 64000
    # One chunk: a flag, padded to 16; 4 bytes of scale for each 256 elements, padded; a byte of code for each element, padded.
    assert ops.payload_bytes([1000], "int8") == 16 + 16 + 1008
    assert ops.payload_bytes([1000], "int4") == 16 + 32 + 512
    assert ops.payload_bytes([1000], "int8", block_size=32) == 16 + 128 + 1008


# Published test vectors of Philox4x32-10 (Random123): counter, key, words.
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter, key):
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & mask, p0 >> 32 ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return tuple(c)


def test_random_words_are_those_of_philox():
    for counter, key, expected in PHILOX_VECTORS:
        assert philox(counter, key) == expected
    key, name_hash = 0x299F31D0A4093822, 0x0370734413198A2E
    for element in (0, 8, 2**33, 2**34 + 4):
        got = reference_block.random_words(key, name_hash, element, 7, torch.device("cpu")).tolist()
        quads = [element // 4, element // 4 + 1]
        counters = [(quad & 0xFFFFFFFF, quad >> 32, 0x13198A2E, 0x03707344) for quad in quads]
        expected = [word for counter in counters for word in philox(counter, (0xA4093822, 0x299F31D0))]
        assert got == expected[:7]

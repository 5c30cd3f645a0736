"""The reference against exact arithmetic: rounding, NaN, range, and the layout of the bytes."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from ops_cases import special_values

from gsync import reference
from gsync.layout import CODEC_KINDS

# codec: integer type of its codes, bits of the significand, exponent of the smallest positive number, largest finite number
FORMATS = {
    "fp16": (torch.int16, 11, -24, Fraction(65504)),
    "bf16": (torch.int16, 8, -133, Fraction((2 - Fraction(1, 2**7)) * 2**127)),
}


def round_exactly(value: float, codec: str) -> float:
    """`value` rounded to nearest even in exact arithmetic."""
    if not math.isfinite(value) or value == 0:
        return value
    _, precision, lowest, largest = FORMATS[codec]
    exact = abs(Fraction(value))
    exponent = max(math.frexp(value)[1] - precision, lowest)
    step = Fraction(2) ** exponent
    rounded = round(exact / step) * step  # Fraction rounds halves to even
    magnitude = math.inf if rounded > largest else float(rounded)
    return math.copysign(magnitude, value)


@pytest.mark.parametrize("codec", FORMATS)
def test_reference_rounds_as_exact_arithmetic_does(codec):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator).to(torch.int32).view(torch.float32)
    values = torch.cat([bits, special_values()])
    codes = reference.encode(values, CODEC_KINDS[codec])
    decoded = reference.decode(codes).tolist()
    for value, got in zip(values.tolist(), decoded, strict=True):
        expected = round_exactly(value, codec)
        if math.isnan(value):
            assert math.isnan(got)
        else:
            assert (got, math.copysign(1, got)) == (expected, math.copysign(1, expected)), value


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(FORMATS)))
def test_reference_rounds_any_bits_as_exact_arithmetic_does(bits, codec):
    value = torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32).view(torch.float32)
    got = float(reference.decode(reference.encode(value, CODEC_KINDS[codec])))
    expected = round_exactly(float(value), codec)
    assert math.isnan(got) if math.isnan(expected) else got == expected


@pytest.mark.parametrize("codec", FORMATS)
def test_every_code_comes_back_from_its_value(codec):
    kind = FORMATS[codec][0]
    codes = torch.arange(-(2**15), 2**15).to(kind)
    values = reference.decode(codes.view(reference.CODE_DTYPES[CODEC_KINDS[codec]]))
    again = reference.encode(values, CODEC_KINDS[codec]).view(kind)
    nan = 0x7E00 if codec == "fp16" else 0x7FC0
    assert torch.equal(again, torch.where(values.isnan(), nan, codes))


@pytest.mark.parametrize(("codec", "nan"), [("fp32", 0x7FC00000), ("fp16", 0x7E00), ("bf16", 0x7FC0)])
def test_each_format_has_one_nan(codec, nan):
    values = special_values()
    codes = reference.encode(values, CODEC_KINDS[codec])
    bits = codes.view(torch.int32 if codec == "fp32" else torch.int16)
    assert set(bits[values.isnan()].tolist()) == {nan}
    if codec == "fp32":
        assert torch.equal(bits[~values.isnan()], values[~values.isnan()].view(torch.int32))


def test_error_is_within_half_a_unit_in_the_last_place():
    values = torch.randn(100000, generator=torch.Generator().manual_seed(1))
    for codec, bound in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        error = (reference.decode(reference.encode(values, CODEC_KINDS[codec])) - values).abs()
        assert bool((error <= torch.maximum(bound * values.abs(), torch.tensor(2.0**-25))).all())

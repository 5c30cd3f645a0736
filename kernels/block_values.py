"""Single values under the codecs with one scale per block, and random words, in Triton: the twin of csrc/codecs/block.h and
csrc/common/philox.h, for the kernels of block.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_E4M3, FP8_E5M2, INT8, INT4 = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
QUADS = tl.constexpr(1024)  # of a tile
NAN = tl.constexpr(0x7FC00000)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


# ---- random words --------------------------------------------------------------------------------------------------------


@triton.jit
def random_words(share, first, key_low, key_high):
    """Philox words [TILE] uint32 of the tile's elements."""
    quad = (tl.load(share) + first) // 4 + tl.arange(0, QUADS)
    name = tl.load(share + 5)
    c0 = (quad & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((quad >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.full([QUADS], 0, tl.uint32) + (name & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.full([QUADS], 0, tl.uint32) + ((name >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = tl.full([QUADS], 0, tl.uint32) + (key_low.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)
    k1 = tl.full([QUADS], 0, tl.uint32) + (key_high.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)
    m0 = tl.full([QUADS], 0xD2511F53, tl.uint32)
    m1 = tl.full([QUADS], 0xCD9E8D57, tl.uint32)
    w0 = tl.full([QUADS], 0x9E3779B9, tl.uint32)
    w1 = tl.full([QUADS], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        n0 = tl.umulhi(m1, c2) ^ c1 ^ k0
        n2 = tl.umulhi(m0, c0) ^ c3 ^ k1
        c1 = m1 * c2
        c3 = m0 * c0
        c0 = n0
        c2 = n2
        k0 += w0
        k1 += w1
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def _unit(words):
    """Words as numbers in [0, 1)."""
    return (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8


# ---- one value -----------------------------------------------------------------------------------------------------------


@triton.jit
def round_magnitude(magnitude, words, mantissa: tl.constexpr, bias: tl.constexpr):
    """Codes of magnitudes (bits of fp32), up or down by the words."""
    dropped: tl.constexpr = 23 - mantissa
    fraction = magnitude & ((1 << dropped) - 1)
    normal = ((magnitude - ((127 - bias) << 23)) >> dropped) + ((words >> (32 - dropped)) < fraction).to(tl.uint32)
    is_subnormal = magnitude < ((128 - bias) << 23)
    steps = tl.where(is_subnormal, magnitude, 0).to(tl.uint32).to(tl.float32, bitcast=True) * (2.0 ** (bias + mantissa - 1))
    below = steps.to(tl.int32)
    rest = steps - below.to(tl.float32)
    subnormal = below.to(tl.uint32) + (_unit(words) < rest).to(tl.uint32)
    return tl.where(is_subnormal, subnormal, normal)


@triton.jit
def _encode_fp8(y, words, stochastic: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr, max_bits: tl.constexpr):
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if stochastic:
        code = round_magnitude(tl.minimum(magnitude, max_bits), words, mantissa, bias)
    else:
        dropped: tl.constexpr = 23 - mantissa
        bump = ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
        normal = (magnitude - ((127 - bias) << 23) + bump) >> dropped
        # 2^(24 - bias - mantissa): its last bit is the step of the subnormal numbers, so the addition rounds.
        raise_bits: tl.constexpr = (127 + 24 - bias - mantissa) << 23
        magic = tl.full(magnitude.shape, raise_bits, tl.uint32)
        raised = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
        code = tl.where(magnitude < ((128 - bias) << 23), raised.to(tl.uint32, bitcast=True) - magic, normal)
    return ((bits >> 24) & 0x80) | code


@triton.jit
def _decode_fp8(code, mantissa: tl.constexpr, bias: tl.constexpr):
    magnitude = code & 0x7F
    normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23)
    subnormal = (magnitude.to(tl.int32).to(tl.float32) * (2.0 ** (1 - bias - mantissa))).to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude < (1 << mantissa), subnormal, normal)
    return (((code & 0x80) << 24) | bits).to(tl.float32, bitcast=True)


@triton.jit
def _encode_integer(y, words, stochastic: tl.constexpr, width: tl.constexpr):
    if stochastic:
        largest = (1 << (width - 1)) - 1
        y = tl.minimum(tl.maximum(y, -largest), largest)
        truncated = y.to(tl.int32)
        below = truncated - (truncated.to(tl.float32) > y).to(tl.int32)
        rest = y - below.to(tl.float32)
        code = (below + (_unit(words) < rest).to(tl.int32)).to(tl.uint32, bitcast=True)
    else:
        code = (y + 12582912.0).to(tl.uint32, bitcast=True)  # leaves the integer in the low bits
    return code & ((1 << width) - 1)


@triton.jit
def _decode_integer(code, width: tl.constexpr):
    sign: tl.constexpr = 1 << (width - 1)
    return ((code ^ sign).to(tl.int32) - sign).to(tl.float32)


@triton.jit
def encode_scaled(y, words, kind, stochastic: tl.constexpr):
    """Codes uint32 of x * inv."""
    if kind == FP8_E4M3:
        code = _encode_fp8(y, words, stochastic, 3, 7, 0x43E00000)
    elif kind == FP8_E5M2:
        code = _encode_fp8(y, words, stochastic, 2, 15, 0x47600000)
    elif kind == INT8:
        code = _encode_integer(y, words, stochastic, 8)
    else:
        code = _encode_integer(y, words, stochastic, 4)
    return code


@triton.jit
def decode_scaled(code, scale, kind):
    """Values of codes uint32 under their scales."""
    if kind == FP8_E4M3:
        number = _decode_fp8(code, 3, 7)
    elif kind == FP8_E5M2:
        number = _decode_fp8(code, 2, 15)
    elif kind == INT8:
        number = _decode_integer(code, 8)
    else:
        number = _decode_integer(code, 4)
    value = number * scale
    # NaN passes: both comparisons are false.
    value = tl.where(value > FLOAT_MAX, FLOAT_MAX, value)
    return tl.where(value < -FLOAT_MAX, -FLOAT_MAX, value)


@triton.jit
def block_scales(absmax, kind, is_int4: tl.constexpr):
    """scale and inv of blocks from the bits of their largest magnitude."""
    if is_int4:
        largest_code = 7.0
    else:
        largest_code = tl.where(kind == INT8, 127.0, tl.where(kind == FP8_E4M3, 448.0, 57344.0))
    usable = (absmax >= 0x17800000) & (absmax < 0x7F800000)
    largest = tl.where(usable, absmax, 0x3F800000).to(tl.uint32).to(tl.float32, bitcast=True)
    fmax = (tl.full(absmax.shape, 0.0, tl.float32) + largest_code).to(tl.float32)
    scale = tl.div_rn(largest, fmax)
    if is_int4:
        scale = ((scale.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
        inv = tl.div_rn(tl.full(absmax.shape, 1.0, tl.float32), scale)
    else:
        inv = tl.div_rn(fmax, largest)
    useless = tl.where(absmax >= 0x7F800000, NAN, 0).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, useless), tl.where(usable, inv, 0.0)

"""The codecs with one scale per block, residuals and stochastic rounding, in plain PyTorch; part of gsync/reference.py.

Per block of n consecutive elements of one parameter, x in fp32, every operation rounded to fp32:

    absmax     largest |x|
    scale      absmax / fmax                               fmax: fp8_e4m3 448, fp8_e5m2 57344, int8 127
    inv        fmax / absmax
    code       round(clamp(x * inv, -fmax, fmax))
    decoded    clamp(code * scale, -FLT_MAX, FLT_MAX)

int4: scale = absmax / 7 rounded up to bf16, inv = 1 / scale, fmax = 7. An absmax below 2^-80 makes a zero block: scale 0,
codes 0. Inf or NaN in a block makes scale NaN and codes 0. round() is to nearest even, or stochastic: up with the probability
of the fraction dropped, by one word of Philox4x32-10 (Salmon et al., SC 2011) that belongs to seed, step, stage, rank, name and
element.

With a residual r (error feedback: Seide et al., Interspeech 2014), under any codec:

    x = value + r          then, unless the code is Inf or NaN,          r = x - decoded
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import CODEC_KINDS, SCALE_BYTES, Share, codes_bytes

FLOAT32_MAX = torch.finfo(torch.float32).max
ABSMAX_NONFINITE = 0x7F800000  # bits of absmax from here on: Inf or NaN
ABSMAX_ZERO = 0x17800000  # bits of absmax below: less than 2^-80
FP8_E4M3, FP8_E5M2, INT8, INT4 = (CODEC_KINDS[name] for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4"))
CODE_MAX = {FP8_E4M3: 448.0, FP8_E5M2: 57344.0, INT8: 127.0, INT4: 7.0}
_FP8_DTYPES = {FP8_E4M3: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}
# Mantissa bits and exponent bias of the formats that are rounded bit by bit.
_FP8_FORMATS = {FP8_E4M3: (3, 7), FP8_E5M2: (2, 15)}


def block_scales(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """scale and inv [num_blocks, 1] fp32 of the blocks x [num_blocks, block_size] fp32; inv is 0 where all codes are 0."""
    absmax = (x.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    usable = (absmax >= ABSMAX_ZERO) & (absmax < ABSMAX_NONFINITE)
    largest = torch.where(usable, absmax, 0x3F800000).view(torch.float32)
    fmax = torch.full_like(largest, CODE_MAX[kind])  # a tensor: torch may divide by a number through its inverse
    scale = largest / fmax
    if kind == INT4:
        scale = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
        inv = torch.ones_like(scale) / scale
    else:
        inv = fmax / largest
    useless = torch.where(absmax >= ABSMAX_NONFINITE, torch.nan, 0.0)
    return torch.where(usable, scale, useless), torch.where(usable, inv, 0.0)


def encode_blocks(x: Tensor, kind: int, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [num_blocks, block_size] uint8 and scales [num_blocks, 1] fp32; int4 codes in the low half of their bytes."""
    scale, inv = block_scales(x, kind)
    y = (torch.where(inv == 0, 0.0, x) * inv).clamp(-CODE_MAX[kind], CODE_MAX[kind])
    if kind in _FP8_DTYPES:
        codes = y.to(_FP8_DTYPES[kind]).view(torch.uint8) if words is None else _round_up_or_down_fp8(y, kind, words)
    else:
        whole = y.round() if words is None else y.floor() + (_unit(words) < y - y.floor())
        codes = whole.to(torch.int32).to(torch.uint8)
    return torch.where(inv == 0, 0, codes & 0x0F if kind == INT4 else codes), scale


def decode_blocks(codes: Tensor, scale: Tensor, kind: int) -> Tensor:
    """Values [num_blocks, block_size] fp32 of codes and scales as `encode_blocks` makes them."""
    if kind in _FP8_DTYPES:
        numbers = codes.view(_FP8_DTYPES[kind]).float()
    else:
        sign = 8 if kind == INT4 else 128
        numbers = ((codes.to(torch.int32) ^ sign) - sign).float()
    return (numbers * scale).clamp(-FLOAT32_MAX, FLOAT32_MAX)


def as_blocks(flat: Tensor, block_size: int) -> Tensor:
    """[num_blocks, block_size] of [n], filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)


def read_blocks(chunk: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """Codes and scales of a share in its chunk, as `encode_blocks` makes them."""
    num_bytes = codes_bytes(share.kind, share.numel)
    codes = chunk[share.codes_offset : share.codes_offset + num_bytes]
    if share.kind == INT4:
        codes = torch.stack([codes & 0x0F, codes >> 4], 1).view(-1)[: share.numel]
    codes = as_blocks(codes, share.block_size)
    scale_bytes = SCALE_BYTES[share.kind]
    scales = chunk[share.scales_offset : share.scales_offset + codes.shape[0] * scale_bytes]
    if share.kind == INT4:
        return codes, scales.clone().view(torch.bfloat16).float()[:, None]
    return codes, scales.clone().view(torch.float32)[:, None]


def write_blocks(chunk: Tensor, share: Share, codes: Tensor, scales: Tensor) -> None:
    """Writes codes and scales of a share to its chunk; the bytes after them stay as they are."""
    flat = codes.reshape(-1)[: share.numel]
    if share.kind == INT4:
        pairs = as_blocks(flat, 2)
        flat = pairs[:, 0] | pairs[:, 1] << 4
        bits = (scales.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    else:
        bits = scales.contiguous().view(torch.uint8)
    chunk[share.codes_offset : share.codes_offset + flat.numel()] = flat
    chunk[share.scales_offset : share.scales_offset + bits.numel()] = bits.view(-1)


def random_words(key: int, name_hash: int, element: int, numel: int, device: torch.device) -> Tensor:
    """Words [numel] int64, 32 bits each, of elements `element` .. of a parameter; `element` is a multiple of 4.

    Philox4x32-10; counter: (element // 4, name_hash), word element % 4.
    """
    quads = torch.arange(element // 4, -(-(element + numel) // 4), dtype=torch.int64, device=device)
    mask = 0xFFFFFFFF
    c0, c1 = quads & mask, quads >> 32
    c2, c3 = (torch.full_like(quads, part) for part in (name_hash & mask, name_hash >> 32))
    k0, k1 = key & mask, key >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits; the sign bit is one of them
        c0, c1, c2, c3 = ((p1 >> 32) & mask) ^ c1 ^ k0, p1 & mask, ((p0 >> 32) & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack([c0, c1, c2, c3], 1).view(-1)[:numel]


def round_up_or_down(x: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """x [n] fp32 rounded stochastically to fp16 or bf16; Inf from the first number past the format's on. fp32 stays as it is."""
    if dtype == torch.float32:
        return x
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    if dtype == torch.bfloat16:
        code = (magnitude + (words >> 16)) >> 16
        code = torch.where(magnitude >= 0x7F800000, magnitude >> 16, code)
    else:
        code = _round_magnitude(magnitude, 10, 15, words)
        code = torch.where(magnitude >= 0x47800000, 0x7C00, code)
    rounded = (sign | code).to(torch.int32).to(torch.int16).view(dtype)
    return torch.where(x != x, torch.nan, rounded)


def _round_up_or_down_fp8(y: Tensor, kind: int, words: Tensor) -> Tensor:
    bits = y.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ((bits >> 24) & 0x80 | _round_magnitude(bits & 0x7FFFFFFF, *_FP8_FORMATS[kind], words)).to(torch.uint8)


def _round_magnitude(magnitude: Tensor, mantissa: int, bias: int, words: Tensor) -> Tensor:
    """Codes without sign, int64, of fp32 magnitudes (bits, int64) in a format with subnormal numbers."""
    dropped = 23 - mantissa
    fraction = magnitude & ((1 << dropped) - 1)
    normal = ((magnitude - ((127 - bias) << 23)) >> dropped) + ((words >> (32 - dropped)) < fraction)
    # Below the smallest normal number 2^(1 - bias): a whole number of steps of 2^(1 - bias - mantissa), and a rest.
    is_subnormal = magnitude < (128 - bias) << 23
    steps = torch.where(is_subnormal, magnitude, 0).to(torch.int32).view(torch.float32) * 2.0 ** (bias + mantissa - 1)
    subnormal = steps.floor().long() + (_unit(words) < steps - steps.floor())
    return torch.where(is_subnormal, subnormal, normal)


def _unit(words: Tensor) -> Tensor:
    """Words as fp32 numbers in [0, 1)."""
    return (words >> 8).float() * 2.0**-24

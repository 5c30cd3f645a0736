"""Gradients that the tests of the operations share."""

import math

import torch

CODECS = ("fp32", "fp16", "bf16")
SIZES = (0, 1, 255, 256, 257, 4095, 4096, 4097, 10007)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def special_values() -> torch.Tensor:
    """fp32 values at which an implementation of a codec may go wrong, with both signs."""
    values = [0.0, 1.0, 1 / 3, 3.0, math.inf, 3.4028234663852886e38, 1.1754943508222875e-38, 1.401298464324817e-45, 1e-40]
    values += [65504.0, 65519.99, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 3 * 2.0**-25, 1e-8]
    values += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8 + 2.0**-20]  # ties and just above one
    values += [3.3895313892515355e38, 3.396e38, 6.1e-5, 5.96e-8, 2.98e-8]
    bits = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FA00000, 0x7FC0DEAD]  # NaN, quiet and signalling
    positive = torch.cat([torch.tensor(values), torch.tensor(bits, dtype=torch.int32).view(torch.float32)])
    return torch.cat([positive, (positive.view(torch.int32) | -(2**31)).view(torch.float32)])


def gradient(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A gradient of `numel` elements: magnitudes over the range of fp32, special values in between."""
    generator = torch.Generator().manual_seed(seed)
    parts = 2 if dtype.is_complex else 1
    values = torch.randn(numel * parts, generator=generator)
    values *= 10.0 ** torch.randint(-12, 6, values.shape, generator=generator)
    special = special_values()
    spots = torch.randperm(values.numel(), generator=generator)[: special.numel()]
    values[spots] = special[: spots.numel()]
    if dtype.is_complex:
        return torch.view_as_complex(values.view(-1, 2).contiguous())
    return values.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits, NaN included."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = INTEGERS.get(a.dtype, a.dtype)
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))

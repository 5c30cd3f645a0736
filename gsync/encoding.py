"""How values are encoded beyond the codec: residuals, stochastic rounding, measuring; and the key of the random words.

The twin of `EncodeOptions` in csrc/common/kernels.h and of csrc/common/philox.h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

STAGES = {"pack": 0, "reduce": 1}
# Columns of EncodeOptions.error_sums.
ERROR_SUMS = ("residual_squares", "input_squares", "nonzero", "vanished")
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
    """Defaults: to nearest even, nothing carried over, nothing measured.

    Args:
        residuals: one per segment, fp32, flat: added before encoding, then replaced by what encoding lost; unchanged where the
            code is Inf or NaN and where no rank used the parameter. In `pack` of the parameter's size; in `reduce` of the
            part of it that the chunk holds (layout.share_of). An entry may be None.
        random_key: from `random_key`; None rounds to nearest.
        error_sums [num_tiles, 4] fp64: each tile adds ERROR_SUMS over its elements whose code is finite: the squares of what
            encoding lost, those of its input, how many inputs are not zero and how many of those became zero. In `reduce` the
            tiles are those of the chunk.
    """

    residuals: Sequence[Tensor | None] | None = None
    random_key: int | None = None
    error_sums: Tensor | None = None


NEAREST = EncodeOptions()


def random_key(seed: int, step: int, stage: str, rank: int) -> int:
    """Key of one encoding's random words: 64 bits of all that is the same for its elements.

    Args:
        seed, step: any integers; 64 bits of them count.
        stage: "pack" or "reduce".
        rank: the sender's in the group; 0 in stage "reduce", whoever reduces.
    """
    who = STAGES[stage] << 32 | rank
    return _mix64(_mix64(_mix64(seed + 0x9E3779B97F4A7C15) + step) + who)


def _mix64(x: int) -> int:
    """Finaliser of splitmix64."""
    x &= _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31

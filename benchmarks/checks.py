"""What has to be right before it may be timed: every rank holds the same bits, and they are the mean.

The mean is computed once in fp64 from every rank's own gradients, which no rival has touched. A rival's gradients, from the same
weights and the same batch, may differ from it by the rival's bound (rivals.Bound), element by element.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .rivals import Bound

_RERUN_FACTOR = 8.0  # two runs show some of the noise of kernels that are not deterministic, not its maximum


@dataclass
class Reference:
    """The exact mean of all ranks' gradients, as fp64 on the CPU.

    Attributes:
        mean: per parameter, the mean.
        mean_abs: per parameter, the mean of |g|, to which bounds refer.
        noise: largest difference between two runs of the same backward pass, on any rank; 0 where kernels are deterministic.
        own: this rank's gradients.
    """

    mean: list[Tensor]
    mean_abs: list[Tensor]
    noise: float
    own: list[Tensor]
    _absmax: dict[int, list[Tensor]] = field(default_factory=dict)

    def block_absmax(self, block_size: int) -> list[Tensor]:
        """Return per parameter and element the mean over ranks of the largest |g| in the element's block. Collective once."""
        if block_size not in self._absmax:
            found = []
            for gradient in self.own:
                flat = gradient.flatten().double().abs()
                if flat.numel():
                    blocks = nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
                    largest = blocks.amax(1) / dist.get_world_size()
                    dist.all_reduce(largest)
                    flat = largest.repeat_interleave(block_size)[: flat.numel()]
                found.append(flat.view(gradient.shape))
            self._absmax[block_size] = found
        return self._absmax[block_size]


@dataclass(frozen=True)
class Verdict:
    """Outcome for one rival: the relative L2 error of its mean and, if it is wrong, why."""

    error: float
    problem: str = ""


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of `module` on the CPU, zeros where there is none (aliases `.grad` on a CPU)."""
    return [
        torch.zeros_like(parameter, device="cpu") if parameter.grad is None else parameter.grad.detach().cpu()
        for parameter in module.parameters()
        if parameter.requires_grad
    ]


def make_reference(first: Sequence[Tensor], second: Sequence[Tensor]) -> Reference:
    """Return the mean over all ranks of `first`; `second` is the same backward pass run again. Collective."""
    world_size = dist.get_world_size()
    noise = torch.tensor(max((float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel()), default=0.0))
    dist.all_reduce(noise, dist.ReduceOp.MAX)
    mean, mean_abs = [], []
    for gradient in first:
        exact = gradient.double() / world_size
        size = exact.abs()
        dist.all_reduce(exact)
        dist.all_reduce(size)
        mean.append(exact)
        mean_abs.append(size)
    return Reference(mean, mean_abs, float(noise), list(first))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of `tensors`."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def odd_ranks(value: object) -> list[int]:
    """Return the ranks whose `value` is not rank 0's. Collective."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [rank for rank, other in enumerate(values) if other != values[0]]


def check_mean(found: Sequence[Tensor], reference: Reference, bound: Bound | None) -> Verdict:
    """Return whether `found` is the same on all ranks and within `bound` of `reference`. Collective; the same on all ranks.

    Args:
        found: this rank's synchronised gradients, on the CPU.
        reference: the exact mean.
        bound: None checks the equality of ranks only.
    """
    odd = odd_ranks(digest(found))
    squares, norm = 0.0, 0.0
    problem = ""
    sizes = reference.block_absmax(bound.block_size) if bound is not None and bound.block_size else reference.mean_abs
    for idx, (value, mean, size) in enumerate(zip(found, reference.mean, sizes, strict=True)):
        difference = value.double() - mean
        squares += float(difference.square().sum())
        norm += float(mean.square().sum())
        if bound is not None and not problem and value.numel():
            world_size = dist.get_world_size()
            allowed = size * bound.relative(world_size) + bound.absolute(world_size) + _RERUN_FACTOR * reference.noise
            excess = float((difference.abs() - allowed).nan_to_num(nan=math.inf).max())
            if excess > 0:
                problem = f"parameter {idx} is off by up to {float(difference.abs().max()):.3g}, more than its bound allows"
    error = math.sqrt(squares / norm) if norm else math.sqrt(squares)
    if odd:
        problem = f"ranks {', '.join(map(str, odd))} hold other gradients than rank 0"
    elif not math.isfinite(error):
        problem = "the gradients are not finite"
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return Verdict(error, next((text for text in problems if text), ""))

"""Buckets on their way through the Python engine: steps, jobs and slices."""

from __future__ import annotations

from typing import Any

import torch

from .bucket_plan import BucketPlan, Part
from .encoding import EncodeOptions, random_key


class Step:
    """What is gathered while one backward pass is synchronised."""

    def __init__(self, number: int, seed: int, num_params: int, device: torch.device) -> None:
        self.number, self.seed = number, seed
        self.sums = torch.zeros(num_params, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)


class Job:
    """One bucket on its way, and the future that DDP waits for."""

    def __init__(self, bucket: Any, step: Step, plan: BucketPlan | None, norm_idx: list[int]) -> None:
        self.norm_idx = norm_idx  # of its parameters
        self.index, self.is_last = bucket.index(), bucket.is_last()
        self.buffer, self.parameters = bucket.buffer(), bucket.parameters()
        self.step, self.plan = step, plan  # plan None: a sparse gradient
        self.is_used = [param.grad is not None for param in self.parameters]  # whether this rank's backward pass reached it
        cut = [(part, i) for part in plan.parts for i in range(len(part.layouts))] if plan is not None else []
        self.slices = [Slice(self, part, i) for part, i in cut] or [Slice(self)]
        self.slices_left = len(self.slices)
        devices = [self.buffer.device] if self.buffer.is_cuda else None
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)


class Slice:
    """One slice under way."""

    def __init__(self, job: Job, part: Part | None = None, slice_idx: int = 0) -> None:
        self.job, self.part, self.slice_idx = job, part, slice_idx
        self.started = 0.0
        self.collective: Any = None
        self.payload: torch.Tensor | None = None
        self.received: torch.Tensor | None = None

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Where the means of this part go."""
        assert self.part is not None
        return [self.job.buffer[begin : begin + numel] for begin, numel in self.part.spans]

    @property
    def sent(self) -> list[torch.Tensor | None]:
        """What is packed: the gradients that this rank has."""
        assert self.part is not None
        pairs = zip(self.part.parameter_idx, self.gradients, strict=True)
        return [gradient if self.job.is_used[i] else None for i, gradient in pairs]

    def encoding(self, stage: str, rounding: str, rank: int) -> EncodeOptions:
        """How `pack` or `reduce` of this slice encodes."""
        part, step = self.part, self.job.step
        assert part is not None
        which = ("pack", "reduce").index(stage)
        residuals = [None if pair is None else pair[which] for pair in part.residuals] if part.has_residuals else None
        errors = (part.pack_errors, part.reduce_errors)[which]
        sender = rank if stage == "pack" else 0
        key = random_key(step.seed, step.number, stage, sender) if rounding == "stochastic" else None
        return EncodeOptions(residuals, key, errors[self.slice_idx] if errors else None)

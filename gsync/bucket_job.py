"""Buckets on their way through the Python engine: steps, jobs and slices."""

from __future__ import annotations

from typing import Any

import torch

from .bucket_plan import BucketPlan, Part
from .encoding import EncodeOptions, random_key
from .gradient_list import empty_gradient, fill_nan, fill_nan_gradients, flat
from .layout import CODE_BYTES


class Step:
    """What is gathered while one backward pass is synchronised."""

    def __init__(self, number: int, seed: int, num_params: int, device: torch.device) -> None:
        self.number, self.seed = number, seed
        self.sums = torch.zeros(num_params, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self.buckets: list[list[int]] = []  # positions of their parameters in the order of names


class Job:
    """One bucket on its way, and the future that DDP waits for. Gradients are in DDP's buffer, or where autograd left them."""

    def __init__(self, bucket: Any, step: Step, plan: BucketPlan | None, norm_idx: list[int]) -> None:
        self.norm_idx = norm_idx  # of its parameters
        self.index, self.is_last = bucket.index(), bucket.is_last()
        self.buffer, self.parameters = bucket.buffer(), bucket.parameters()
        self.gradients: list[torch.Tensor | None] | None = getattr(bucket, "gradient_list", None)
        self.step, self.plan = step, plan  # plan None: a sparse gradient
        # Whether this rank's backward pass reached it.
        used = [param.grad for param in self.parameters] if self.gradients is None else self.gradients
        self.is_used = [gradient is not None for gradient in used]
        cut = [(part, i) for part in plan.parts for i in range(len(part.layouts))] if plan is not None else []
        self.slices = [Slice(self, part, i, number) for number, (part, i) in enumerate(cut)] or [Slice(self)]
        self.slices_left = len(self.slices)
        step.buckets.append([i for part in plan.parts for i in part.norm_idx] if plan is not None else norm_idx)
        self.wire_bytes = 0
        self.ready = 0.0  # when it was handed over
        device = self.parameters[0].device if self.buffer is None else self.buffer.device
        devices = [device] if device.type == "cuda" else None
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    @property
    def is_sparse(self) -> bool:
        return self.buffer is not None and self.buffer.is_sparse

    def poison(self) -> None:
        """Fills the gradients with NaN."""
        if self.buffer is not None:
            fill_nan(self.buffer)
        if self.gradients is not None or self.is_sparse:
            fill_nan_gradients(self.parameters)


class Slice:
    """One slice under way: number `slice_idx` of its part, `number` of its bucket."""

    def __init__(self, job: Job, part: Part | None = None, slice_idx: int = 0, number: int = 0) -> None:
        self.job, self.part, self.slice_idx, self.number = job, part, slice_idx, number
        self.started = 0.0
        self.collective: Any = None
        self.payload: torch.Tensor | None = None
        self.received: torch.Tensor | None = None

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Where the means of this part go, flat."""
        assert self.part is not None
        if self.job.gradients is None:
            return [self.job.buffer[begin : begin + numel] for begin, numel in self.part.spans]
        found = [self.job.gradients[i] for i in self.part.parameter_idx]
        return [None if gradient is None else flat(gradient) for gradient in found]

    def make_missing(self) -> None:
        """Makes memory for the means of parameters that only other ranks used, as the flags in the payload tell.

        The one place where this engine waits for a device, and only on a rank whose backward pass did not reach every parameter.
        """
        job, part, payload = self.job, self.part, self.payload
        assert part is not None and payload is not None
        if job.gradients is None or all(job.is_used[i] for i in part.parameter_idx):
            return
        kinds = {segment.codec for segment in part.segments}
        flag_bytes = CODE_BYTES.get(kinds.pop(), 1) if len(kinds) == 1 else 1
        flags = payload[: len(part.segments) * flag_bytes].view(-1, flag_bytes).ne(0).any(1).tolist()
        for i, is_used in zip(part.parameter_idx, flags, strict=True):
            if is_used and job.gradients[i] is None:
                job.gradients[i] = empty_gradient(job.parameters[i])

    @property
    def sent(self) -> list[torch.Tensor | None]:
        """What is packed: the gradients that this rank has."""
        assert self.part is not None
        pairs = zip(self.part.parameter_idx, self.gradients, strict=True)
        return [gradient if self.job.is_used[i] else None for i, gradient in pairs]

    def encoding(self, stage: str, rounding: str, rank: int, measures: bool) -> EncodeOptions:
        """How `pack` or `reduce` of this slice encodes."""
        part, step = self.part, self.job.step
        assert part is not None
        which = ("pack", "reduce").index(stage)
        residuals = [None if pair is None else pair[which] for pair in part.residuals] if part.has_residuals else None
        errors = (part.pack_errors, part.reduce_errors)[which]
        sender = rank if stage == "pack" else 0
        key = random_key(step.seed, step.number, stage, sender) if rounding == "stochastic" else None
        return EncodeOptions(residuals, key, errors[self.slice_idx] if errors and measures else None)

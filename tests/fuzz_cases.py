"""Examples for tests/test_fuzz.py: models and configurations at random, what two ranks make of them.

The reference is one process: each rank's gradients by autograd alone, then `gsync.ops` in plain PyTorch over the whole model as
one bucket. What gsync promises to be independent of (buckets, slices, door, engine) is not in it, so its bits are those expected.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from field_cases import ONE_ROUNDING, Door

from gsync import ops
from gsync.config import BLOCK_CODECS
from gsync.gradient_list import dense_like

WORLD_SIZE = 2
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "complex64": torch.complex64,
}
WIRE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Weight:
    """One parameter. `unused`: pairs of rank and step in which no loss of that rank's depends on it."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    order: str = "plain"
    is_frozen: bool = False
    is_shared: bool = False
    unused: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Example:
    weights: list[Weight]
    door: str = "reducer"
    backend: str = "native"
    passes: list[int] = field(default_factory=lambda: [1, 1])  # of each step; all but the last under no_sync
    bucket_mb: float = 1.0
    seed: int = 0
    spread: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # of SyncConfig


class Fuzzed(nn.Module):
    """The gradient of each parameter is what is passed for it; shared ones are used twice, for half of it each."""

    def __init__(self, weights: list[Weight]) -> None:
        super().__init__()
        self.weights = weights
        self.all = nn.ParameterList([nn.Parameter(in_order(weight), not weight.is_frozen) for weight in weights])
        self.twice = nn.ParameterList([param for param, weight in zip(self.all, weights, strict=True) if weight.is_shared])

    def forward(self, inputs: list[torch.Tensor | None]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        shared = iter(self.twice)
        for param, weight, x in zip(self.all, self.weights, inputs, strict=True):
            other = next(shared) if weight.is_shared else None
            if x is None:
                continue
            for each in (param,) if other is None else (param, other):
                product = (each * (x if other is None else x / 2)).sum()
                total = total + (product.real if product.is_complex() else product).double()
        return total


def in_order(weight: Weight) -> torch.Tensor:
    """Zeros in the memory order asked for, where a tensor of that shape has one."""
    made = torch.zeros(weight.shape, dtype=DTYPES[weight.dtype])
    if weight.order == "transposed" and len(weight.shape) >= 2:
        return made.transpose(-1, -2).contiguous().transpose(-1, -2)
    if weight.order == "channels_last" and len(weight.shape) == 4:
        return made.contiguous(memory_format=torch.channels_last)
    if weight.order == "gap" and weight.shape:
        return torch.zeros((*weight.shape[:-1], 2 * weight.shape[-1]), dtype=made.dtype)[..., ::2]
    return made


def inputs_of(example: Example, rank: int, step: int, number: int) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(example.seed + 1000 * rank + 100 * step + number)
    inputs: list[torch.Tensor | None] = []
    for weight in example.weights:
        x = torch.randn((*weight.shape, 2), generator=draw) * example.spread
        x[torch.rand(x.shape, generator=draw) < 0.05] = 0.0
        x = (torch.view_as_complex(x) if weight.dtype == "complex64" else x[..., 0]).to(DTYPES[weight.dtype])
        inputs.append(None if (rank, step) in weight.unused else x)
    return inputs


def run(rank: int, world_size: int, example: Example) -> dict[str, Any] | str:
    """What a rank ends up with after each step; an error comes back as its text, so that the process can go on."""
    try:
        return _run(rank, example)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _run(rank: int, example: Example) -> dict[str, Any]:
    door = Door(
        example.door,
        Fuzzed(example.weights),
        example.backend,
        bucket_mb=example.bucket_mb,
        ddp={"find_unused_parameters": any(weight.unused for weight in example.weights)},
        **example.options,
    )
    found: dict[str, Any] = {"gradients": [], "norms": [], "nonfinite": []}
    for step, passes in enumerate(example.passes):
        door.module.zero_grad()
        for number in range(passes):
            with contextlib.nullcontext() if number == passes - 1 else door.no_sync():
                door(inputs_of(example, rank, step, number)).backward()
        found["gradients"].append([None if p.grad is None else p.grad.clone() for p in door.module.all])
        found["norms"].append(door.sync.grad_norm().item())
        found["nonfinite"].append(bool(door.sync.found_nonfinite()))
    door.close()
    dist.barrier()
    return found


def local_gradients(example: Example, rank: int, step: int) -> list[torch.Tensor | None]:
    """What autograd alone gives a rank, in the memory order of the parameters."""
    module = Fuzzed(example.weights)
    for number in range(example.passes[step]):
        loss = module(inputs_of(example, rank, step, number))
        if loss.requires_grad:
            loss.backward()
    return [None if p.grad is None else dense_like(p, p.grad) for p in module.all]


class Reference:
    """The same steps in one process."""

    def __init__(self, example: Example) -> None:
        self.example = example
        module = Fuzzed(example.weights)
        names = {id(param): name for name, param in module.named_parameters()}
        self.params = list(module.all)
        self.trained = [i for i, weight in enumerate(example.weights) if not weight.is_frozen]
        self.names = [names[id(self.params[i])] for i in self.trained]
        options = example.options
        self.codec = options["codec"]
        block = self.codec in BLOCK_CODECS
        self.feedback = options.get("error_feedback", False)
        self.scatter = block or self.feedback or options.get("exchange") == "scatter_gather"
        self.chunks = WORLD_SIZE if self.scatter else 1
        self.numels = [self.params[i].numel() * (2 if self.params[i].is_complex() else 1) for i in self.trained]
        self.cut = {"codec": self.codec, "num_chunks": self.chunks, "names": self.names}
        if block and options.get("block_size"):
            self.cut["block_size"] = options["block_size"]
        held = [ops.chunk_numels(self.numels, chunk_idx=chunk, **self.cut) for chunk in range(self.chunks)]
        if self.feedback:
            self.sent = [[torch.zeros(numel) for numel in self.numels] for _ in range(WORLD_SIZE)]
            self.reduced = [[torch.zeros(numel) for numel in row] for row in held]

    def step(self, step: int) -> tuple[list[torch.Tensor | None], list[list[torch.Tensor | None]]]:
        """The synchronised gradients, None where no rank has one; and each rank's own."""
        own = [local_gradients(self.example, rank, step) for rank in range(WORLD_SIZE)]
        options = self.example.options
        how: dict[str, Any] = {"backend": "reference", "rounding": options.get("rounding", "nearest"), "step": step}
        how["seed"] = options.get("seed", 0)
        payloads = []
        for rank in range(WORLD_SIZE):
            zeros = [dense_like(self.params[i], torch.zeros_like(self.params[i])) for i in self.trained]
            packed = [zero if own[rank][i] is None else own[rank][i] for i, zero in zip(self.trained, zeros, strict=True)]
            kept = {"residuals": self.sent[rank]} if self.feedback else {}
            payloads.append(ops.pack(packed, scale=1 / WORLD_SIZE, rank=rank, **self.cut, **how, **kept))
        if self.scatter:
            rows = [payload.view(self.chunks, -1) for payload in payloads]
            parts = []
            for chunk in range(self.chunks):
                kept = {"residuals": self.reduced[chunk]} if self.feedback else {}
                received = [row[chunk].clone() for row in rows]
                parts.append(ops.reduce(received, self.numels, chunk_idx=chunk, **self.cut, **how, **kept))
            result = torch.cat(parts)
        else:
            result = (payloads[0].view(WIRE[self.codec]) + payloads[1].view(WIRE[self.codec])).view(torch.uint8)
        means = [dense_like(self.params[i], torch.zeros_like(self.params[i])) for i in self.trained]
        ops.unpack(result, means, backend="reference", **self.cut)
        expected: list[torch.Tensor | None] = [None] * len(self.params)
        for i, mean in zip(self.trained, means, strict=True):
            if any(own[rank][i] is not None for rank in range(WORLD_SIZE)):
                expected[i] = mean
        return expected, own


def bound_of(codec: str, rounding: str, own: list[torch.Tensor], mean: torch.Tensor) -> torch.Tensor:
    """How far a gradient may lie from the mean: two encodings, the second of what the first left, and the dtype's."""
    one = ONE_ROUNDING[codec] * (2 if rounding == "stochastic" else 1)
    if codec in BLOCK_CODECS:  # relative to the largest in a block, which is at most that of the parameter
        sent = sum(_largest(g) / WORLD_SIZE for g in own)
        least = len(own) * 2.0**-80  # below it a block is zero
        second = one * (_largest(mean) + one * sent)
        return (one * sent + second + least) * (1 + 2.0**-10) + _own_rounding(own[0].dtype) * mean.abs()
    sent = sum(g.abs().double() / WORLD_SIZE for g in own)
    tiny = 2.0**-24 if codec == "fp16" else 2.0**-130  # subnormal numbers round by a fixed amount
    return one * (2 + one) * sent + one * mean.abs() + 3 * tiny + _own_rounding(own[0].dtype) * mean.abs() + 2.0**-24


def _largest(gradient: torch.Tensor) -> float:
    parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return parts.double().abs().max().item() if parts.numel() else 0.0


def _own_rounding(dtype: torch.dtype) -> float:
    return {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype, 2.0**-22)

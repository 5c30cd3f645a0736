"""What the tests of block codecs behind the door share: synchronisation simulated in one process by the plain operations."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from ddp_cases import batch, gradients, mlp, wrap
from torch import Tensor

import gsync
from gsync import ops

BLOCK_CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
NEAREST = {"rounding": "nearest", "seed": 0}
STOCHASTIC = {"rounding": "stochastic", "seed": 7}
latest: list[nn.Module] = []  # trained last: a state holds its model weakly, and is asked for what needs it afterwards


class Simulation:
    """All ranks of a world, one parameter at a time, by `gsync.ops` on the reference backend.

    One parameter at a time is enough, since its gradient must not depend on what travels with it.

    Args:
        codecs: by parameter name.
        feedback: whether residuals are kept.
        scale: of gradients; None: 1 / world_size.
        options: block_size, rounding and seed of the operations.
    """

    def __init__(
        self, world_size: int, codecs: dict[str, str], feedback: bool = False, scale: float | None = None, **options: Any
    ) -> None:
        self.world_size, self.codecs, self.feedback = world_size, codecs, feedback
        self.scale = 1 / world_size if scale is None else scale
        self.block_size = options.pop("block_size", None)
        self.options = {**NEAREST, **options}
        self.sent: dict[str, list[Tensor]] = {}
        self.kept: dict[str, list[Tensor]] = {}

    def mean(self, name: str, everyone: Sequence[Tensor], step: int) -> Tensor:
        """The synchronised gradient of one parameter, from that of each rank."""
        codec, world_size = self.codecs[name], self.world_size
        blocks = {"block_size": self.block_size if codec in BLOCK_CODECS else None}
        shared: dict[str, Any] = {"codec": codec, "num_chunks": world_size, "names": [name], "backend": "reference", **blocks}
        rounding = {"step": step, **(self.options if codec != "fp32" else {})}
        numel = everyone[0].numel()
        has_residuals = self.feedback and codec != "fp32"
        if has_residuals and name not in self.sent:
            self.sent[name] = [torch.zeros(numel) for _ in range(world_size)]
            held = [ops.chunk_numels([numel], codec, world_size, chunk, [name], **blocks)[0] for chunk in range(world_size)]
            self.kept[name] = [torch.zeros(numel) for numel in held]
        payloads = []
        for rank, gradient in enumerate(everyone):
            residuals = [self.sent[name][rank]] if has_residuals else None
            payload = ops.pack([gradient], scale=self.scale, rank=rank, residuals=residuals, **shared, **rounding)
            payloads.append(payload.view(world_size, -1))
        reduced = []
        for chunk in range(world_size):
            residuals = [self.kept[name][chunk]] if has_residuals else None
            chunks = [payload[chunk].clone() for payload in payloads]
            reduced.append(ops.reduce(chunks, [numel], chunk_idx=chunk, residuals=residuals, **shared, **rounding))
        result = torch.empty_like(everyone[0])
        ops.unpack(torch.cat(reduced), [result], **shared)
        return result


def local_gradients(module: nn.Module, world_size: int, step: int, width: int = 31) -> dict[str, list[Tensor]]:
    """By parameter name, what each rank's backward pass leaves before synchronisation."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for rank in range(world_size):
        module.zero_grad()
        module(batch(rank, step, width)).square().sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            found[name].append(parameter.grad.clone())
    return found


def codecs_by(module: nn.Module, patterns: dict[str, str]) -> dict[str, str]:
    """The codec of each parameter of `module` by the first pattern that matches."""
    names = [name for name, _ in module.named_parameters()]
    return {name: next(codec for pattern, codec in patterns.items() if fnmatch.fnmatchcase(name, pattern)) for name in names}


def train(
    rank: int, backend: str, steps: range, sync_options: dict[str, Any], ddp: dict[str, Any] | None = None, loaded: Any = None
) -> tuple[list[Tensor], gsync.SyncState]:
    """The gradients of all parameters after each step, of a new model without an optimizer; and its state."""
    model, sync = wrap(mlp(), backend, ddp=ddp or {"bucket_cap_mb": 0.02}, **sync_options)
    latest[:] = [model]
    if loaded is not None:
        sync.load_state_dict(loaded)
    every = []
    for step in steps:
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        every += [gradient.clone() for gradient in gradients(model)]
    return every, sync

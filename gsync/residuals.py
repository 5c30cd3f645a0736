"""What encoding lost, kept from step to step: the memory of error feedback.

A parameter has two residuals on each rank. `sender` is what its own payloads lost: of the whole parameter, or under hierarchical,
where the ranks of a host sum before one of them encodes, of the elements of its shard. `reducer` is what the encoded sum lost, of
the elements that this rank reduces. Which those are depends on the parameter's name, size, codec and block size and on the hosts
alone (docs/wire_format.md), so residuals stay where they are however DDP cuts its buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import backends
from .hosts import Place
from .layout import BLOCK_SIZES, CODEC_KINDS, Segment, hash64, shard_of, share_of
from .model import Model
from .operators import is_dense


@dataclass
class Residual:
    """The residuals of one parameter: fp32, flat, elements in the order in which they are encoded.

    Attributes:
        sender: of the elements sender_first, ... that this rank encodes first; a complex element counts as two.
        reducer: of the elements first, first + 1, ... that this rank reduces.
        shape, stride: of the parameter; of a complex one as pairs of real numbers.
    """

    sender: torch.Tensor
    sender_first: int
    reducer: torch.Tensor
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Of the parameter."""
        return math.prod(self.shape)

    @property
    def is_shard(self) -> bool:
        """Whether `sender` is of a part of the parameter only."""
        return self.sender.numel() != self.numel

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of `flat` [numel] in the parameter's shape."""
        return flat.as_strided(self.shape, self.stride)


class Residuals:
    """Those of a model on one rank. Memory: see `SyncConfig.error_feedback`, for each element whose codec is not fp32.

    Attributes:
        table: by parameter name.
        unit [1] fp32: the loss scale in whose units residuals are; 1 where none is followed.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self.table: dict[str, Residual] = {}
        self.unit = torch.ones(1, device=device)

    def cover(self, model: Model) -> None:
        """Makes those that are missing, as zeros, for parameters that are trained."""
        for param, name, codec, block_size in zip(*model.columns(), strict=True):
            if param.requires_grad and codec != "fp32" and name not in self.table:
                self.table[name] = self._make(param, name, codec, block_size)

    def columns(self, names: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Sender and reducer of each name, as `Engine.set_parameters` takes them."""
        found = [self.table.get(name) for name in names]
        return [None if residual is None else (residual.sender, residual.reducer) for residual in found]

    def scale(self, factor: float) -> None:
        """Multiplies all of them."""
        for residual in self.table.values():
            residual.sender.mul_(factor)
            residual.reducer.mul_(factor)

    @property
    def num_bytes(self) -> int:
        return sum(residual.sender.nbytes + residual.reducer.nbytes for residual in self.table.values())

    def _make(self, param: torch.Tensor, name: str, codec: str, block_size: int) -> Residual:
        real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
        shape = tuple(real.shape)
        stride = real.stride() if is_dense(real) else torch.empty(shape, device="meta").stride()
        kind = CODEC_KINDS[codec]
        segment = Segment(real.numel(), 0, kind, hash64(name), block_size if kind in BLOCK_SIZES else 0)
        place = self.place
        first, held = share_of(segment, place.chunk, place.world_size, place.ranks_per_host)
        # With one rank a host, or without hosts, the only shard is everything.
        sender_first, sent = shard_of(segment, place.local_rank, place.ranks_per_host)
        return Residual(self._zeros(sent), sender_first, self._zeros(held), first, shape, tuple(stride))

    def _zeros(self, numel: int) -> torch.Tensor:
        """fp32 [numel] where payloads lie: pack reads and writes residuals as often as gradients."""
        return backends.empty_payload(4 * numel, self.device).view(torch.float32).zero_()

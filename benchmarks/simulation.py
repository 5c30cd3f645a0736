"""W ranks in one process: gradients go through `gsync.ops` as they do through the engine under `scatter_gather`.

    pack      each rank's gradients, scaled by 1/W, with the rank's residuals: one payload of W chunks
    reduce    chunk r of all payloads, with the residuals of rank r, its owner
    unpack    the W reduced chunks, one after the other

Names, exempt parameters and ownership are the engine's, so that the mean has the bits that W processes get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gsync import SyncConfig, model, ops


def codecs_of(module: nn.Module, codec: str) -> dict[str, str]:
    """Return the codec of each parameter that is trained, by name: `codec`, or bf16 where a block codec exempts it by default."""
    rows = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return dict(zip((name for name, _ in rows), model.codecs_of(rows, module, SyncConfig(codec=codec)), strict=True))


class SimulatedRanks:
    """The synchronisation of one model's gradients between `world_size` ranks, with the state that each rank would keep.

    Args:
        codecs: name of each parameter -> its codec (`codecs_of`).
        numels: elements of each parameter, in the same order.
        world_size: number of ranks.
        error_feedback: keep residuals on both encodings.
        rounding, seed, backend: as in `gsync.ops.pack`.
    """

    def __init__(
        self,
        codecs: dict[str, str],
        numels: Sequence[int],
        world_size: int,
        error_feedback: bool = False,
        rounding: str = "nearest",
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        self.names, self.codecs, self.numels = list(codecs), list(codecs.values()), list(numels)
        self.world_size, self.step = world_size, 0
        self._how: dict[str, Any] = {"rounding": rounding, "seed": seed, "backend": backend}
        num_bytes = ops.payload_bytes(self.numels, self.codecs, num_chunks=world_size, names=self.names)
        self._payloads = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(world_size)]
        self._mean = torch.empty(num_bytes, dtype=torch.uint8)
        self._chunk_bytes = num_bytes // world_size
        self.sent: list[list[Tensor] | None] = [None] * world_size
        self.reduced: list[list[Tensor] | None] = [None] * world_size
        if error_feedback:
            for rank in range(world_size):
                held = ops.chunk_numels(self.numels, self.codecs, world_size, rank, self.names)
                self.sent[rank] = [torch.zeros(numel) for numel in self.numels]
                self.reduced[rank] = [torch.zeros(numel) for numel in held]

    def synchronize(self, gradients: Sequence[Sequence[Tensor]], means: Sequence[Tensor]) -> None:
        """Write the mean of `gradients` (of each rank, of each parameter) to `means`, as every rank would receive it.

        `means` may be the gradients of one rank.
        """
        where: dict[str, Any] = {"codec": self.codecs, "num_chunks": self.world_size, "names": self.names}
        how: dict[str, Any] = {**self._how, "step": self.step}
        for rank, own in enumerate(gradients):
            kept, out = self.sent[rank], self._payloads[rank]
            ops.pack(own, scale=1.0 / self.world_size, rank=rank, residuals=kept, out=out, **where, **how)
        for rank in range(self.world_size):
            chunk = slice(rank * self._chunk_bytes, (rank + 1) * self._chunk_bytes)
            received = [payload[chunk] for payload in self._payloads]
            ops.reduce(received, self.numels, chunk_idx=rank, residuals=self.reduced[rank], out=self._mean[chunk], **where, **how)
        ops.unpack(self._mean, means, backend=self._how["backend"], **where)
        self.step += 1

"""The Triton kernels behind the interface that all backends share: lists of tensors in, tables of addresses to the launchers.

Imports torch and triton only; what the caller hands over as layout is described at `BucketLayout` in gsync/backends.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import elementwise

# Stands for the address of a tensor without elements, which may be null; a null address says that the parameter was not used.
_NO_ELEMENTS = 16


class TritonBackend:
    """pack, reduce and unpack in one Triton launch each; arguments as in gsync/reference.py.

    On CUDA tensors they are enqueued on the current stream of the tensors' device, without waiting for it. CPU tensors go through
    Triton's interpreter.
    """

    def __init__(self) -> None:
        self._tickets: dict[tuple[torch.device, int], Tensor] = {}

    def pack(
        self, layout: Any, gradients: Sequence[Tensor | None], payload: Tensor, scale: float, counters: Tensor | None = None
    ) -> None:
        """Write every byte of the payload of `gradients`; see gsync.reference.pack."""
        shares, tiles, _ = layout.tables_on(payload.device)
        pointers = _address_table(gradients, payload.device)
        elementwise.pack(shares, tiles, pointers, payload, layout.python.chunk_bytes, scale, counters)

    def reduce(self, layout: Any, chunk: int, payloads: Sequence[Tensor], out: Tensor, scale: float) -> None:
        """Write every byte of one chunk; see gsync.reference.reduce."""
        shares, tiles, _ = layout.tables_on(out.device)
        first, last = layout.python.chunk_first_tile[chunk : chunk + 2]
        elementwise.reduce(shares, tiles[first:last], _address_table(payloads, out.device), out, scale)

    def unpack(
        self,
        layout: Any,
        payload: Tensor,
        gradients: Sequence[Tensor | None],
        partials: Tensor,
        found_nonfinite: Tensor,
        sum_of_squares: Tensor | None,
    ) -> None:
        """Write the gradients of a payload, and what was found in them; see gsync.reference.unpack."""
        if not gradients:
            return
        shares, tiles, segments = layout.tables_on(payload.device)
        pointers = _address_table(gradients, payload.device)
        measure = () if sum_of_squares is None else (self._ticket(payload.device), segments, sum_of_squares)
        elementwise.unpack(
            shares, tiles, pointers, payload, layout.python.chunk_bytes, partials, found_nonfinite, *measure
        )  # fmt: skip

    def _ticket(self, device: torch.device) -> Tensor:
        """The word in which the programs of one launch count themselves; one per stream, zero between launches."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (device, stream)
        if key not in self._tickets:
            self._tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._tickets[key]


def _address_table(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Addresses [len(tensors)] int64 on `device`, 0 for None; copied without waiting for the device."""
    addresses = [0 if tensor is None else tensor.data_ptr() or _NO_ELEMENTS for tensor in tensors]
    on_cuda = device.type == "cuda"
    table = torch.tensor(addresses, dtype=torch.int64, pin_memory=on_cuda)
    return table.to(device, non_blocking=True) if on_cuda else table

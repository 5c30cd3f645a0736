"""The Triton kernels behind the interface that all backends share: lists of tensors in, tables of addresses to the launchers.

Imports torch and triton only; what the caller hands over as layout is described at `BucketLayout` in gsync/backends.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import block, elementwise

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
        self,
        layout: Any,
        gradients: Sequence[Tensor | None],
        payload: Tensor,
        scale: float,
        counters: Tensor | None = None,
        options: Any = None,
    ) -> None:
        """Write every byte of the payload of `gradients`; see gsync.reference.pack."""
        shares, tiles, _ = layout.tables_on(payload.device)
        pointers = _address_table(gradients, payload.device)
        table = layout.python
        if not _is_general(table, options):
            return elementwise.pack(shares, tiles, pointers, payload, table.chunk_bytes, scale, counters)
        residuals, key, error_sums = _encoding(options, payload.device)
        block.pack(
            shares, tiles, pointers, payload, table.chunk_bytes, scale, counters, residuals, key, error_sums, _block_sizes(table)
        )

    def reduce(
        self,
        layout: Any,
        chunk: int,
        payloads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        options: Any = None,
        uncompressed: bool = False,
    ) -> None:
        """Write every byte of one chunk, or of a shard; see gsync.reference.reduce."""
        shares, tiles, _ = layout.tables_on(out.device)
        table = layout.python
        count = table.chunks_per_shard if uncompressed else 1
        first, last = table.chunk_first_tile[chunk], table.chunk_first_tile[chunk + count]
        addresses = _address_table(payloads, out.device)
        if not uncompressed and not _is_general(table, options):
            return elementwise.reduce(shares, tiles[first:last], addresses, out, scale)
        firsts = [element for element, _ in table.held(chunk, is_shard=uncompressed)]
        residuals, key, error_sums = _encoding(options, out.device, firsts)
        flag_bytes = table.shares[0].block_size if table.segments else 1
        sent = None
        if uncompressed:
            sent_shares, _, _ = layout.uncompressed.tables_on(out.device)
            sent = (sent_shares, table.chunk_bytes, layout.uncompressed.python.chunk_bytes, chunk)
        block.reduce(
            shares, tiles[first:last], addresses, out, scale, flag_bytes, residuals, key, error_sums, _block_sizes(table), sent
        )  # fmt: skip

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
        table = layout.python
        measure: tuple[Any, Any, Any] = (None, None, None)
        if sum_of_squares is not None:
            measure = (self._ticket(payload.device), segments, sum_of_squares)
        arguments = (shares, tiles, pointers, payload, table.chunk_bytes, partials, found_nonfinite, *measure, None)
        if table.has_scales:
            block.unpack(*arguments, _block_sizes(table))
        else:
            elementwise.unpack(*arguments)

    def _ticket(self, device: torch.device) -> Tensor:
        """The word in which the programs of one launch count themselves; one per stream, zero between launches."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (device, stream)
        if key not in self._tickets:
            self._tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._tickets[key]


def _is_general(table: Any, options: Any) -> bool:
    """Whether more than the codecs without a scale is asked for."""
    wanted = () if options is None else (options.residuals, options.random_key, options.error_sums)
    return table.has_scales or any(value is not None for value in wanted)


def _encoding(options: Any, device: torch.device, first_elements: Sequence[int] | None = None) -> tuple[Any, Any, Any]:
    """Table of the residuals' addresses, key of the random words, sums of errors; each may be None.

    Args:
        first_elements: which element each residual begins with; None: all with 0.
    """
    if options is None:
        return None, None, None
    residuals = options.residuals
    if residuals is not None:
        firsts = first_elements or [0] * len(residuals)
        begins = [0 if r is None or not r.numel() else r.data_ptr() - 4 * e for r, e in zip(residuals, firsts, strict=True)]
        residuals = _table(begins, device)
    return residuals, options.random_key, options.error_sums


def _block_sizes(table: Any) -> tuple[int, int]:
    """Elements of a block under the codecs of 8 bits, and under int4; a launch has one of each.

    Raises:
        ValueError: two different ones.
    """
    sizes = []
    for is_int4, default in ((False, 256), (True, 64)):
        found = {s.block for s in table.segments if s.codec > 2 and (s.codec == 6) is is_int4}
        if len(found) > 1:
            raise ValueError(
                f"backend='triton': block sizes {sorted(found)} in one bucket, expected one for all codecs of a width"
            )
        sizes.append(found.pop() if found else default)
    return sizes[0], sizes[1]


def _address_table(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Addresses [len(tensors)] int64 on `device`, 0 for None; copied without waiting for the device."""
    return _table([0 if tensor is None else tensor.data_ptr() or _NO_ELEMENTS for tensor in tensors], device)


def _table(addresses: Sequence[int], device: torch.device) -> Tensor:
    on_cuda = device.type == "cuda"
    table = torch.tensor(addresses, dtype=torch.int64, pin_memory=on_cuda)
    return table.to(device, non_blocking=True) if on_cuda else table

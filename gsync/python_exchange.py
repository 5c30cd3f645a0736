"""The order of collectives in the Python engine; the twin of csrc/exchange.h, where each is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .backends import Backend, BucketLayout
from .bucket_job import Slice
from .encoding import EncodeOptions
from .hosts import Place
from .lanes import Lanes
from .reference import CODE_DTYPES
from .spans import profiler_range

Encoding = Callable[[str], EncodeOptions]  # of stage "pack" or "reduce"


class AllReduce:
    """See csrc/exchange.h; so are the others.

    Attributes:
        name: as in `SyncConfig`.
        num_chunks, num_shards: of a payload.
        chunk, shard: what this rank reduces, and what it encodes first.
        one_codec: whether all segments of a payload must have one.
    """

    name = "all_reduce"
    num_chunks = num_shards = 1
    chunk = shard = 0
    one_codec = True

    def __init__(self, lanes: Mapping[str, Lanes], world_size: int) -> None:
        self._lanes, self._world_size = lanes["all"], world_size

    def packed(self, layout: BucketLayout) -> BucketLayout:
        """The layout in which a slice is packed."""
        return layout

    def payload_bytes(self, layout: BucketLayout) -> int:
        """Bytes of the payload's memory."""
        return int(layout.sizes.payload_bytes)

    def wire_bytes(self, layout: BucketLayout) -> int:
        """Bytes that this rank sends for a slice."""
        return 2 * int(layout.sizes.payload_bytes) * (self._world_size - 1) // self._world_size

    def start(self, current: Slice, layout: BucketLayout) -> Any:
        """Issues the first collective."""
        assert current.part is not None and current.payload is not None
        return self._lanes.all_reduce(current.payload.view(CODE_DTYPES[current.part.segments[0].codec]))

    def finish(self, current: Slice, layout: BucketLayout, encoding: Encoding) -> None:
        """Does the rest, once the first has ended; the result is in `current.payload`."""


class ScatterGather:
    name = "scatter_gather"
    num_shards = 1
    shard = 0
    one_codec = False

    def __init__(
        self, lanes: Mapping[str, Lanes], rank: int, world_size: int, kernels: Backend, buffer: Callable[[str, int], torch.Tensor]
    ) -> None:
        self._lanes, self.chunk, self.num_chunks = lanes["all"], rank, world_size
        self._kernels, self._buffer = kernels, buffer

    def packed(self, layout: BucketLayout) -> BucketLayout:
        return layout

    def payload_bytes(self, layout: BucketLayout) -> int:
        return int(layout.sizes.payload_bytes)

    def wire_bytes(self, layout: BucketLayout) -> int:
        return 2 * int(layout.sizes.chunk_bytes) * (self.num_chunks - 1)

    def start(self, current: Slice, layout: BucketLayout) -> Any:
        assert current.payload is not None
        current.received = self._buffer("received", layout.sizes.payload_bytes)
        return self._lanes.all_to_all(current.received, current.payload)

    def finish(self, current: Slice, layout: BucketLayout, encoding: Encoding) -> None:
        assert current.received is not None and current.payload is not None
        chunks = list(current.received.view(self.num_chunks, -1).unbind())
        reduced = self._buffer("reduced", layout.sizes.chunk_bytes)
        with profiler_range("gsync::reduce"):
            self._kernels.reduce(layout, self.chunk, chunks, reduced, 1.0, encoding("reduce"))
        self._lanes.all_gather(current.payload, reduced).wait()


class Hierarchical:
    name = "hierarchical"
    one_codec = False

    def __init__(
        self, lanes: Mapping[str, Lanes], place: Place, kernels: Backend, buffer: Callable[[str, int], torch.Tensor]
    ) -> None:
        self._inner, self._outer, self._place = lanes["inner"], lanes["outer"], place
        self._kernels, self._buffer = kernels, buffer
        self.num_chunks, self.num_shards = place.world_size, place.ranks_per_host
        self.chunk, self.shard = place.chunk, place.local_rank

    def packed(self, layout: BucketLayout) -> BucketLayout:
        return layout.uncompressed

    def payload_bytes(self, layout: BucketLayout) -> int:
        return max(int(layout.sizes.payload_bytes), int(layout.uncompressed.sizes.payload_bytes))

    def wire_bytes(self, layout: BucketLayout) -> int:
        hosts, ranks = self._place.num_hosts, self._place.ranks_per_host
        chunk_bytes = int(layout.sizes.chunk_bytes)
        inside = (chunk_bytes + int(layout.uncompressed.sizes.chunk_bytes)) * hosts * (ranks - 1)
        return inside + 2 * chunk_bytes * (hosts - 1)

    def start(self, current: Slice, layout: BucketLayout) -> Any:
        assert current.payload is not None
        num_bytes = layout.uncompressed.sizes.payload_bytes
        current.received = self._buffer("received", self.payload_bytes(layout))
        return self._inner.all_to_all(current.received[:num_bytes], current.payload[:num_bytes])

    def finish(self, current: Slice, layout: BucketLayout, encoding: Encoding) -> None:
        assert current.received is not None and current.payload is not None
        hosts, chunk_bytes = self._place.num_hosts, layout.sizes.chunk_bytes
        sent = current.received[: layout.uncompressed.sizes.payload_bytes].view(self.num_shards, -1)
        shard = self._buffer("shard", hosts * chunk_bytes)
        first_chunk = self.shard * hosts
        with profiler_range("gsync::reduce"):
            self._kernels.reduce(layout, first_chunk, list(sent.unbind()), shard, 1.0, encoding("pack"), uncompressed=True)
        if hosts > 1:
            received = current.received[: hosts * chunk_bytes]
            self._outer.all_to_all(received, shard).wait()
            reduced = self._buffer("reduced", chunk_bytes)
            chunks = list(received.view(hosts, -1).unbind())
            with profiler_range("gsync::reduce"):
                self._kernels.reduce(layout, self.chunk, chunks, reduced, 1.0, encoding("reduce"))
            self._outer.all_gather(shard, reduced).wait()
        current.payload = current.payload[: layout.sizes.payload_bytes]
        self._inner.all_gather(current.payload, shard).wait()


Exchange = AllReduce | ScatterGather | Hierarchical


def make_exchange(
    name: str,
    lanes: Mapping[str, Lanes],
    place: Place,
    rank: int,
    world_size: int,
    kernels: Backend,
    buffer: Callable[[str, int], torch.Tensor],
) -> Exchange:
    """Args: buffer: (kind, bytes) -> memory of the slice that was started last."""
    if name == "all_reduce":
        return AllReduce(lanes, world_size)
    if name == "scatter_gather":
        return ScatterGather(lanes, rank, world_size, kernels, buffer)
    return Hierarchical(lanes, place, kernels, buffer)

"""Engines on the emulated device, all ranks in one process, each on its own device: for tests in `emulated` processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import emulated
import torch
import torch.distributed as dist

from gsync import _native
from gsync.hosts import Place
from gsync.residuals import Residuals

Rows = Sequence[torch.Tensor]
# Odd lengths, and more than the eight addresses that go with a launch of the emulated kernels.
NUMELS = (0, 1, 255, 256, 257, 4099, 3, 9_001, 17, 1, 64, 5)


class Rank:
    """One rank: a device, an engine, and parameters whose gradients are handed over in buckets."""

    def __init__(self, rank: int, numels: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.emulation = emulated.load()
        self.rank = rank
        self.device = device or torch.device(emulated.DEVICE, rank)
        self.parameters = [torch.zeros(numel, dtype=dtype, device=self.device) for numel in numels]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.engine: Any = None

    def make_engine(self, world_size: int, codec: str, exchange: str, store: Any, **options: Any) -> None:
        native = _native.C
        assert native is not None
        settings = {"scale": 1.0 / world_size, "slice_bytes": 25 << 20, "timeout_s": 20.0, **options}
        self.transport = None
        ranks_per_host = settings.pop("ranks_per_host", 1)
        host, local_rank = divmod(self.rank, ranks_per_host)
        num_hosts = world_size // ranks_per_host
        over_groups = settings.pop("over_groups", False) or self.device.type == "cpu"
        error_feedback = settings.pop("error_feedback", False)
        if world_size > 1 and over_groups:
            limit, timeout_s = timedelta(seconds=20), settings["timeout_s"]

            def connect(name: str, rank: int, size: int) -> Any:
                lanes = [dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/{lane}", store), rank, size, limit) for lane in "01"]
                if self.device.type != "cpu":
                    lanes = [self.emulation.stream_backend(lane) for lane in lanes]
                return native.C10dTransport(*lanes, rank, size, timeout_s, str(self.device))

            self.transport = connect("all", self.rank, world_size)
            if ranks_per_host > 1:
                levels = (connect(f"h{host}", local_rank, ranks_per_host), connect(f"l{local_rank}", host, num_hosts))
        elif world_size > 1:
            self.transport = native.NcclTransport(
                store, self.rank, world_size, str(self.device), settings["timeout_s"], library=str(emulated.FILE)
            )
            if ranks_per_host > 1:
                split = self.transport.split
                levels = (split(host, local_rank, ranks_per_host), split(local_rank, host, num_hosts))
        if ranks_per_host > 1:
            place = (local_rank, ranks_per_host, host, num_hosts)
            self.transport = native.HierarchicalTransport(self.transport, *levels, *place)
        self.engine = native.Engine(
            self.transport,
            device=str(self.device),
            world_size=world_size,
            rank=self.rank,
            exchange=exchange,
            label="emulated",
            **settings,
        )
        names = [f"p{idx:02}" for idx in range(len(self.parameters))]
        self.residuals = Residuals(Place(local_rank, ranks_per_host, host, num_hosts, (), ()), self.device)
        if error_feedback:
            for name, parameter in zip(names, self.parameters, strict=True):
                self.residuals.table[name] = self.residuals._make(parameter, name, codec, 0)
        columns = self.residuals.columns(names)
        self.engine.set_parameters(self.parameters, names, [codec] * len(names), [0] * len(names), columns)

    def submit(
        self, rows: Rows, bounds: Sequence[tuple[int, int]], before: Callable[[], Any] | None = None
    ) -> list[tuple[torch.Tensor, Any]]:
        """Hands the gradients over, one bucket for each [begin, end) of parameters; returns buffers and futures.

        Args:
            before: called when the first bucket is ready, before the engine gets it.
        """
        submitted = []
        for index, (begin, end) in enumerate(bounds):
            buffer = torch.empty(sum(row.numel() for row in rows[begin:end]), dtype=rows[0].dtype, device=self.device)
            # What backward does: on the current stream, and the host does not wait.
            buffer.copy_(torch.cat(list(rows[begin:end])), non_blocking=True)
            bucket = self.emulation.grad_bucket(index, (begin, end) == bounds[-1], buffer, self.parameters[begin:end])
            if before is not None and index == 0:
                before()
            submitted.append((buffer, self.engine.submit(bucket)))
        return submitted

    def collect(self, submitted: Sequence[tuple[torch.Tensor, Any]]) -> torch.Tensor:
        """Returns the gradients on the CPU, as DDP would take them: after the futures, on the current stream."""
        with torch.no_grad():
            return torch.cat([future.wait().clone().cpu() for _, future in submitted])


def make_ranks(
    world_size: int,
    codec: str = "fp32",
    exchange: str = "all_reduce",
    numels: Sequence[int] = NUMELS,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    built_on: Sequence[int] = (),
    **options: Any,
) -> list[Rank]:
    """Returns the ranks with their engines made, each in a thread, since a communicator waits for all of its ranks.

    Args:
        device: of every rank; by default an emulated one for each.
        built_on: for each rank the stream that is current while its engine is made; by default the device's default stream.
        options: of the engine; and ranks_per_host, over_groups (process groups on a device instead of the stand-in for NCCL),
            error_feedback.
    """
    ranks = [Rank(rank, numels, dtype, device) for rank in range(world_size)]
    store = dist.HashStore()

    def make(rank: Rank) -> None:
        if built_on:
            rank.emulation.set_stream(rank.rank, built_on[rank.rank])
        rank.make_engine(world_size, codec, exchange, store, **options)

    for error in on_every_rank(ranks, make):
        if error is not None:
            raise error
    return ranks


def on_every_rank(ranks: Sequence[Rank], fn: Callable[[Rank], Any]) -> list[Any]:
    """Runs `fn` in a thread for each rank; returns what came out, exceptions included."""
    results: list[Any] = [None] * len(ranks)

    def run(idx: int) -> None:
        try:
            results[idx] = fn(ranks[idx])
        except Exception as error:
            results[idx] = error

    threads = [threading.Thread(target=run, args=(idx,)) for idx in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def train(ranks: Sequence[Rank], steps: Sequence[Sequence[Rows]], bounds: Sequence[tuple[int, int]]) -> list[list[torch.Tensor]]:
    """Hands `steps[step][rank]` over and returns the gradients, by step and rank."""
    results = []
    for step in steps:
        submitted = [rank.submit(rows, bounds) for rank, rows in zip(ranks, step, strict=True)]
        results.append([rank.collect(buckets) for rank, buckets in zip(ranks, submitted, strict=True)])
    return results


def close(ranks: Sequence[Rank]) -> None:
    """Closes the engines and checks that the device had no error of its own."""
    on_every_rank(ranks, lambda rank: rank.engine.close())
    error = emulated.load().take_error()
    assert not error, error


def add_backend_for_device(rank: int, world_size: int) -> None:
    """Lets the default process group serve tensors on the emulated device, over a Gloo group that nobody else uses."""
    store = dist.PrefixStore(emulated.DEVICE, dist.distributed_c10d._get_default_store())
    host = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=20))
    backend = emulated.load().stream_backend(host)
    group = dist.group.WORLD
    assert group is not None
    group._register_backend(torch.device(emulated.DEVICE), dist.ProcessGroup.BackendType.CUSTOM, backend)

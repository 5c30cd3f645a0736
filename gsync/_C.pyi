"""What the compiled part offers to Python."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

class Layout:
    """The layout of one slice of a bucket, with its tables on the devices that used it."""

    def uncompressed(self) -> Layout:
        """The same slice with its elements as fp32."""
    payload_bytes: int
    chunk_bytes: int
    num_chunks: int
    num_segments: int
    num_tiles: int
    num_partials: int

class Collective:
    """One collective under way."""

    def wait(self) -> None:
        """Waits for its end; on a device the current stream does."""

class Transport:
    """Who moves bytes between the ranks."""

    @property
    def name(self) -> str: ...
    def all_reduce(self, payload: Tensor) -> Collective:
        """Sums in place: 1-d, fp32, fp16 or bf16."""
    def all_to_all(self, out: Tensor, payload: Tensor) -> Collective:
        """Chunk r of `payload` goes to rank r; both uint8 [ranks * chunk_bytes]."""
    def all_gather(self, out: Tensor, payload: Tensor) -> Collective:
        """`payload` of every rank, uint8 [chunk_bytes], into `out` [ranks * chunk_bytes]."""
    def abort(self) -> None:
        """Ends the communicators, so that the other ranks fail at once."""

class C10dTransport(Transport):
    """Transport over process groups: `main` carries all_reduce and all_to_all, `gather` all_gather.

    With `owned` the caller gives up its references: Gloo tells the other ranks of a failure only by destroying the group.
    """

    def __init__(
        self,
        main: dist.ProcessGroup,
        gather: dist.ProcessGroup,
        rank: int,
        size: int,
        timeout_s: float,
        device: str = "cpu",
        owned: bool = True,
        known_as: Sequence[int] = (),
    ) -> None:
        """`known_as`: of each rank of these groups, the number that errors give it; empty: its own."""

class HierarchicalTransport(Transport):
    """Transports over all ranks, those of a host, and those of equal local rank on all hosts, as one."""

    def __init__(
        self,
        all: Transport,
        inner: Transport,
        outer: Transport,
        local_rank: int,
        ranks_per_host: int,
        host: int,
        num_hosts: int,
    ) -> None: ...

class Engine:
    """Owns stream, order, buffers, transport and watchdog. It fails once; then every call that gives results raises."""

    def __init__(
        self,
        transport: Transport | None,
        device: str,
        world_size: int,
        rank: int,
        exchange: str,
        scale: float,
        slice_bytes: int,
        timeout_s: float,
        stream_priority: int | None = None,
        label: str = "",
        rounding: str = "nearest",
        start_step: int = 0,
        measure_every: int = 0,
    ) -> None: ...
    def set_parameters(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        codecs: Sequence[str],
        block_sizes: Sequence[int] = (),
        residuals: Sequence[tuple[Tensor, Tensor] | None] = (),
        exchanges: Sequence[str] = (),
    ) -> None:
        """Names the parameters whose gradients will come, held weakly; residuals are held and written. For the next bucket."""
    def call_at(self, step: int, callback: Callable[[], None]) -> None:
        """Calls it once, before the first bucket of step `step` or of the first one after it; what it raises fails the engine."""
    def time_steps(self) -> None:
        """Times steps from now on."""
    def take_step_times(self) -> tuple[list[float], list[float]]:
        """Ends that; returns each step's ms, and by bucket the ms from the first hand-over to its own, added up."""
    def last_buckets(self) -> list[list[int]]:
        """Returns of each bucket of the last finished step the positions of its parameters in the order of names."""
    def transport(self, level: str = "all") -> Transport | None:
        """Returns the transport over "all" ranks, the "inner" or the "outer" ones."""
    def follow_loss_scale(self, scale: Tensor, unit: Tensor) -> None:
        """Multiplies residuals by scale / unit at the start of each step, and sets `unit` to `scale`."""
    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Synchronises a bucket in place; the future holds its buffer, or the error."""
    def stats(self) -> dict[str, Any]:
        """Returns totals since the last reset."""
    def reset_stats(self) -> None: ...
    def start_trace(self, capacity: int) -> None:
        """Keeps spans from now on, up to `capacity`."""
    def take_trace(self) -> tuple[list[tuple[str, int, int, int, float, float]], int]:
        """Ends that; returns phase, step, bucket, slice, begin and end (s, as time.perf_counter), and how many had no room."""
    def sum_of_squares(self) -> Tensor:
        """Returns fp64 [number of parameters], in the order of names, of the last finished step."""
    def found_nonfinite(self) -> Tensor:
        """Returns a 0-d bool of the last finished step."""
    def raise_pending(self) -> None:
        """Raises the error that ended this engine, if one did."""
    def abort(self, reason: str) -> None:
        """Fails the engine, and with it the other ranks."""
    def close(self) -> None: ...
    @property
    def failed(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def step(self) -> int: ...
    def set_step(self, step: int) -> None: ...
    def set_seed(self, seed: int) -> None: ...

def cost_of_clock(num_buckets: int) -> float:
    """Returns what it costs to take the times of so many buckets, in s."""

class GradReducer:
    """Hooks on gradient accumulators that hand buckets to an engine."""

    enabled: bool
    """False: gradients stay this rank's own."""

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        prepare: Callable[[], None],
        learned: Callable[[list[int], list[int]], None],
        sending: Callable[[int], None] | None = None,
        synchronised: Callable[[], None] | None = None,
    ) -> None:
        """Hooks every parameter.

        `prepare()` is called when a step begins and there is no engine, or a parameter without a bucket is to be trained;
        `learned(order, repeated)` after the first step of new buckets; `sending(number)` before a bucket is handed over, and
        `synchronised()` when all gradients of a step are in place, which may raise.
        """
    def set_engine(self, engine: Engine | None) -> None: ...
    def set_buckets(self, buckets: Sequence[tuple[list[int], bool, bool]], learning: bool) -> None:
        """Takes the buckets in the order in which they are handed over: parameters, is_sparse, is_late."""
    def note_backward(self) -> None:
        """To be called in an outer backward pass: the step ends with that one, not with one nested in it."""
    def check(self) -> None:
        """Raises what went wrong."""
    def unsynchronised(self) -> int:
        """Index of a parameter with gradients that were accumulated and not synchronised since, or -1."""
    def unhooked(self) -> int:
        """Index of a parameter that has lost its hook, or -1."""
    def wait(self) -> None:
        """Synchronises what was accumulated since, or takes part with nothing if no backward pass did since the last call."""
    def close(self) -> None: ...

def register_ddp_hook(reducer: object, provider: Callable[[], Engine | dist.ProcessGroup]) -> None:
    """Registers a hook on a DDP reducer that needs no Python lock.

    `provider()` is called at the first bucket, and again at the first bucket after the engine was closed. It returns the engine
    to use, or a process group over which to take a plain mean; for the latter it is asked at every bucket. The reducer keeps
    `provider` alive: it should hold its state weakly.
    """

"""What synchronising a slice costs: bytes, and seconds of each step, by formula. Arithmetic alone: no torch, no clock.

A slice goes through steps, one after the other. Some compute (pack, reduce, unpack: the host's cores, or the device), some move
bytes (one collective each). `gsync/schedule.py` puts the steps of all slices into one order in time; `gsync plan` prints
what comes of it.

    stock           all_reduce of the gradients
    all_reduce      pack ▶ all_reduce ▶ unpack
    scatter_gather  pack ▶ all_to_all ▶ reduce ▶ all_gather ▶ unpack
    hierarchical    pack in fp32 ▶ all_to_all inside the host ▶ reduce and encode ▶ all_to_all between the ranks of equal place
                    of all hosts ▶ reduce ▶ all_gather between them ▶ all_gather inside the host ▶ unpack

All ranks do the same at the same time, so that one of them stands for all, and the G ranks of a host share its link. With
bandwidth B in bytes/s, latency a of one message, W ranks on H = W/G hosts:

    ring all_reduce of P bytes      2 (W-1) rounds of a + max(P/W / B_inter, P/W / B_intra)    one rank of a host sends out of it
    tree all_reduce (device only)   2 log2(H) a_inter + 2 (G-1) a_intra + 2 P / B              the faster is taken, as NCCL does
    all_to_all, chunks of C bytes   a + (W-2) m + max(G (W-G) C / B_inter, (G-1) C / B_intra)  m: for each further message
    all_gather over Gloo            as all_to_all: every rank sends its chunk to each of the others
    all_gather on a device          W-1 rounds of a + max(C / B_inter, C / B_intra): a ring
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FP32_BYTES = 4
EXCHANGES = ("all_reduce", "scatter_gather", "hierarchical")
SUMMED_BY_LIBRARY = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Topology:
    """Who is where: `world_size` ranks, `ranks_per_host` on each host.

    Raises:
        ValueError: a number below 1, or hosts that are not full.
    """

    world_size: int
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_host < 1:
            raise ValueError(f"world_size={self.world_size}, ranks_per_host={self.ranks_per_host}: expected at least 1 of each")
        if self.world_size % self.ranks_per_host:
            raise ValueError(
                f"world_size={self.world_size} is no multiple of ranks_per_host={self.ranks_per_host}: hosts have to be full"
            )

    @property
    def hosts(self) -> int:
        """H."""
        return self.world_size // self.ranks_per_host


@dataclass(frozen=True)
class Link:
    """What bytes travel over.

    Attributes:
        bytes_per_s: each way. Between hosts: of a host, shared by its ranks; inside a host: of each rank.
        latency_s: until the first byte of a message is there.
        message_s: what each further message costs its sender, where several are sent at once.
    """

    bytes_per_s: float
    latency_s: float
    message_s: float


@dataclass(frozen=True)
class Network:
    """The links, and what moving bytes costs the host's cores.

    Attributes:
        inter, intra: between hosts, and inside a host.
        on_device: the device moves bytes (NCCL), by rings and trees, and the cores do nothing.
        send_cpu_s: seconds of a core for each byte that a rank sends and receives as messages; 0 on a device.
        sum_cpu_s: the same under all_reduce, by the type that is summed.
    """

    inter: Link
    intra: Link
    on_device: bool = False
    send_cpu_s: float = 0.0
    sum_cpu_s: tuple[tuple[str, float], ...] = ()

    def cpu_of(self, codec: str) -> float:
        """Seconds of a core for each byte under all_reduce of `codec`."""
        return dict(self.sum_cpu_s).get(codec, self.send_cpu_s)


@dataclass(frozen=True)
class Kernel:
    """How long the operations of one codec take, in seconds for a byte of fp32 gradients.

    Attributes:
        pack, unpack: of what goes in, and comes out.
        reduce_read: for each payload that is read, of the gradients in it.
        reduce_write: of the gradients in the result.
        fixed_s: of an operation on next to nothing.
    """

    pack: float
    unpack: float
    reduce_read: float = 0.0
    reduce_write: float = 0.0
    fixed_s: float = 0.0

    def pack_s(self, numel: float) -> float:
        """Seconds to encode `numel` gradients."""
        return self.fixed_s + self.pack * FP32_BYTES * numel

    def unpack_s(self, numel: float) -> float:
        """Seconds to decode `numel` gradients."""
        return self.fixed_s + self.unpack * FP32_BYTES * numel

    def reduce_s(self, numel: float, payloads: int) -> float:
        """Seconds to sum `payloads` payloads of `numel` gradients and encode the sum."""
        return self.fixed_s + FP32_BYTES * numel * (payloads * self.reduce_read + self.reduce_write)


@dataclass(frozen=True)
class SliceSize:
    """How large a slice is.

    Attributes:
        numel: gradients in it.
        flat_bytes: payload in one chunk, as all_reduce sends it; of stock DDP the gradients themselves.
        chunk_bytes: one of W chunks of a payload.
        fp32_chunk_bytes: the same under fp32: hierarchical sends it inside the host.
    """

    numel: int
    flat_bytes: int
    chunk_bytes: int = 0
    fp32_chunk_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a slice: it computes, or it is one collective.

    Attributes:
        what: pack, reduce, unpack, or the collective.
        seconds: with nothing else going on, without the latency.
        latency_s: of a collective, before its bytes flow.
        cpu: cores that it keeps busy meanwhile.
        inter, intra: share of the host's link, and of the rank's inside the host, that it takes meanwhile, 0 to 1.
        wire_bytes: what one rank sends.
        host_bytes: what leaves the host.
        is_collective: it moves bytes.
    """

    what: str
    seconds: float
    latency_s: float = 0.0
    cpu: float = 0.0
    inter: float = 0.0
    intra: float = 0.0
    wire_bytes: float = 0.0
    host_bytes: float = 0.0
    is_collective: bool = False


def all_reduce(payload_bytes: float, codec: str, topology: Topology, network: Network) -> Step:
    """The all_reduce of a payload that the library sums as `codec`."""
    size, hosts, per_host = topology.world_size, topology.hosts, topology.ranks_per_host
    if size == 1:
        return Step("all_reduce", 0.0, is_collective=True)
    rounds, sent = 2 * (size - 1), 2.0 * (size - 1) / size * payload_bytes
    crossed = sent if hosts > 1 else 0.0  # one neighbour in the ring is on another host
    slowest = network.inter if hosts > 1 else network.intra
    within = sent if per_host > 1 else 0.0
    latency_s = rounds * max(slowest.latency_s, network.intra.latency_s if per_host > 1 else 0.0)
    ring = _collective("all_reduce", latency_s, sent, crossed, within, network.cpu_of(codec), network, crossed)
    if not network.on_device:
        return ring
    depth = math.ceil(math.log2(hosts))
    latency_s = 2 * (depth * network.inter.latency_s + (per_host - 1) * network.intra.latency_s)
    sent = 2.0 * payload_bytes
    crossed = sent if hosts > 1 else 0.0
    tree = _collective("all_reduce", latency_s, sent, crossed, sent if per_host > 1 else 0.0, 0.0, network, crossed)
    return min(ring, tree, key=lambda step: step.latency_s + step.seconds)


def all_to_all(chunk_bytes: float, ranks_inside: int, hosts: int, topology: Topology, network: Network,
               what: str = "all_to_all") -> Step:  # fmt: skip
    """Every rank sends `chunk_bytes` to each other rank of its group, which has `ranks_inside` ranks on each of `hosts` hosts.

    All ranks of a host do so at the same time, each in its own group.
    """
    peers, outside = ranks_inside * hosts - 1, ranks_inside * (hosts - 1)
    if peers == 0:
        return Step(what, 0.0, is_collective=True)
    link = network.inter if hosts > 1 else network.intra
    crossed = topology.ranks_per_host * outside * chunk_bytes
    within = (ranks_inside - 1) * chunk_bytes
    latency_s = link.latency_s + (peers - 1) * link.message_s
    return _collective(what, latency_s, peers * chunk_bytes, crossed, within, network.send_cpu_s, network, crossed)


def all_gather(chunk_bytes: float, ranks_inside: int, hosts: int, topology: Topology, network: Network) -> Step:
    """Every rank of a group as for `all_to_all` gets the `chunk_bytes` of each other one."""
    if not network.on_device:
        return all_to_all(chunk_bytes, ranks_inside, hosts, topology, network, "all_gather")
    peers = ranks_inside * hosts - 1
    if peers == 0:
        return Step("all_gather", 0.0, is_collective=True)
    groups = topology.ranks_per_host // ranks_inside  # each has a ring of its own out of the host
    crossed = groups * peers * chunk_bytes if hosts > 1 else 0.0
    within = peers * chunk_bytes if ranks_inside > 1 else 0.0
    latency_s = peers * max(network.inter.latency_s if hosts > 1 else 0.0, network.intra.latency_s if ranks_inside > 1 else 0.0)
    return _collective("all_gather", latency_s, peers * chunk_bytes, crossed, within, 0.0, network, crossed)


def steps_of(exchange: str, codec: str, size: SliceSize, kernels: dict[str, Kernel], topology: Topology,
             network: Network) -> tuple[Step, ...]:  # fmt: skip
    """The steps of one slice under gsync.

    Args:
        kernels: of `codec`, and of fp32 for hierarchical.

    Raises:
        ValueError: an exchange that is not one of EXCHANGES, or all_reduce with a codec that libraries cannot sum.
    """
    own, numel = kernels[codec], size.numel
    world, inside, hosts = topology.world_size, topology.ranks_per_host, topology.hosts
    if exchange == "all_reduce":
        if codec not in SUMMED_BY_LIBRARY:
            raise ValueError(f"all_reduce: libraries cannot sum {codec}; expected {', '.join(SUMMED_BY_LIBRARY)}")
        moved = all_reduce(size.flat_bytes, codec, topology, network)
        return _compute("pack", own.pack_s(numel), network), moved, _compute("unpack", own.unpack_s(numel), network)
    if exchange == "scatter_gather":
        return (
            _compute("pack", own.pack_s(numel), network),
            all_to_all(size.chunk_bytes, inside, hosts, topology, network),
            _compute("reduce", own.reduce_s(numel / world, world), network),
            all_gather(size.chunk_bytes, inside, hosts, topology, network),
            _compute("unpack", own.unpack_s(numel), network),
        )
    if exchange != "hierarchical":
        raise ValueError(f"exchange={exchange!r}: expected one of {', '.join(EXCHANGES)}")
    plain = kernels["fp32"]
    packed, unpacked = _compute("pack", plain.pack_s(numel), network), _compute("unpack", own.unpack_s(numel), network)
    # The inner sum reads fp32 and writes the codec: what fp32 takes to read, and what the codec takes to encode.
    inner = plain.fixed_s + FP32_BYTES * numel / inside * (inside * plain.reduce_read + own.pack)
    first = all_to_all(hosts * size.fp32_chunk_bytes, inside, 1, topology, network), _compute("reduce", inner, network)
    between = (
        all_to_all(size.chunk_bytes, 1, hosts, topology, network),
        _compute("reduce", own.reduce_s(numel / world, hosts), network),
        all_gather(size.chunk_bytes, 1, hosts, topology, network),
    )
    last = all_gather(hosts * size.chunk_bytes, inside, 1, topology, network)
    return packed, *first, *(between if hosts > 1 else ()), last, unpacked


def wire_bytes(exchange: str, size: SliceSize, topology: Topology) -> float:
    """What one rank sends for one slice; of stock DDP as of all_reduce."""
    world, inside, hosts = topology.world_size, topology.ranks_per_host, topology.hosts
    if exchange == "all_reduce":
        return 2 * size.flat_bytes * (world - 1) / world
    if exchange == "scatter_gather":
        return 2 * size.chunk_bytes * (world - 1)
    within = hosts * (size.fp32_chunk_bytes + size.chunk_bytes) * (inside - 1)
    return within + 2 * size.chunk_bytes * (hosts - 1)


def buffer_bytes(exchange: str, size: SliceSize, topology: Topology) -> int:
    """Payload buffers of one slice under way."""
    world, hosts = topology.world_size, topology.hosts
    if world == 1 or exchange == "all_reduce":
        return size.flat_bytes
    if exchange == "scatter_gather":
        return (2 * world + 1) * size.chunk_bytes  # payload, received, reduced
    # Payload and result; what was received inside the host, then between hosts; my chunk; my shard.
    packed, shard = world * size.fp32_chunk_bytes, hosts * size.chunk_bytes
    return max(packed, world * size.chunk_bytes) + max(packed, shard) + size.chunk_bytes + shard


def residual_bytes(exchange: str, encoded_numel: int, topology: Topology) -> int:
    """Memory of error feedback on one rank.

    Args:
        encoded_numel: gradients whose codec is not fp32.
    """
    inside = (
        topology.ranks_per_host if exchange == "hierarchical" else 1
    )  # it encodes sums over its host, of 1/G of the gradients
    return FP32_BYTES * (math.ceil(encoded_numel / inside) + math.ceil(encoded_numel / topology.world_size))


def cut_buckets(sizes: Sequence[int], bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Indices of gradients by bucket, as DDP and `GradReducer` cut them: full at `bucket_bytes`, the first at `first_bytes`.

    Args:
        sizes: bytes of the gradients of one dtype, in the order in which they become ready.
    """
    buckets: list[list[int]] = [[]]
    filled, limit = 0, min(first_bytes, bucket_bytes)
    for idx, num_bytes in enumerate(sizes):
        buckets[-1].append(idx)
        filled += num_bytes
        if filled >= limit:
            buckets.append([])
            filled, limit = 0, bucket_bytes
    return buckets if buckets[-1] else buckets[:-1]


def _compute(what: str, seconds: float, network: Network) -> Step:
    return Step(what, seconds, cpu=0.0 if network.on_device else 1.0)


def _collective(what: str, latency_s: float, sent: float, crossed: float, within: float, cpu_s: float, network: Network,
                host_bytes: float) -> Step:  # fmt: skip
    """The slowest of the host's link, the rank's own inside the host, and the core that moves the bytes sets the pace."""
    times = crossed / network.inter.bytes_per_s, within / network.intra.bytes_per_s, sent * cpu_s
    seconds = max(times)
    inter, intra, cpu = (time / seconds if seconds > 0 else 0.0 for time in times)
    return Step(what, seconds, latency_s, cpu, inter, intra, sent, host_bytes, True)

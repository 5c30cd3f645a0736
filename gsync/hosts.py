"""Which ranks share a host, and where a rank stands among them.

Ranks of one host say the same word of it; each puts its own into the group's store and reads the others':

    GSYNC_LOCAL_WORLD_SIZE=n          the n ranks of the world from a multiple of n on share a host, whatever machine they run on
    GROUP_RANK, as torchrun sets it   the number of the node
    LOCAL_WORLD_SIZE=n                as the first
    else                              the name of the host
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import env


@dataclass(frozen=True)
class Place:
    """Where a rank stands among `num_hosts` hosts of `ranks_per_host` ranks each; ranks are those of the group.

    Attributes:
        inner: the ranks of its host, by local rank.
        outer: the ranks of its local rank, by host.
    """

    local_rank: int
    ranks_per_host: int
    host: int
    num_hosts: int
    inner: tuple[int, ...]
    outer: tuple[int, ...]

    @property
    def chunk(self) -> int:
        """What it reduces: shards are by local rank, the chunks of one by host."""
        return self.local_rank * self.num_hosts + self.host

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host


def flat_place(rank: int, world_size: int) -> Place:
    """Every rank by itself: one shard, whose chunk r belongs to rank r."""
    return Place(0, 1, rank, world_size, (rank,), tuple(range(world_size)))


def word_of_host(global_rank: int, environment: Mapping[str, str] = os.environ) -> str:
    """What this rank calls its host.

    Args:
        global_rank: in the world, not in the group.
        environment: its variables.

    Raises:
        ValueError: a variable is not a whole number above 0.
    """
    for name in (env.LOCAL_WORLD_SIZE, "LOCAL_WORLD_SIZE"):
        if name == "LOCAL_WORLD_SIZE" and "GROUP_RANK" in environment:
            return f"node {environment['GROUP_RANK']}"
        if name in environment:
            text = environment[name]
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{name}={text!r}: expected a whole number above 0, of the ranks on each host")
            return f"host {global_rank // int(text)}"
    return socket.gethostname()


def place_among(words: Sequence[str], rank: int) -> Place | str:
    """The place of `rank`, or why there is none.

    Args:
        words: what each rank of the group calls its host.
        rank: in the group.
    """
    hosts: dict[str, list[int]] = {}
    for other, word in enumerate(words):
        hosts.setdefault(word, []).append(other)
    sizes = {word: len(ranks) for word, ranks in hosts.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{count} on {word}" for word, count in sizes.items())
        return f"hosts have different numbers of ranks: {listed}"
    by_host = list(hosts.values())  # in the order of their first ranks
    host = next(i for i, ranks in enumerate(by_host) if rank in ranks)
    local_rank = by_host[host].index(rank)
    outer = tuple(ranks[local_rank] for ranks in by_host)
    return Place(local_rank, len(by_host[host]), host, len(by_host), tuple(by_host[host]), outer)

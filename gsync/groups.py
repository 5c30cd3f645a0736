"""Process groups: the one to average over, what it says of itself, and private Gloo groups made from its store.

An engine on a CPU moves its bytes over two private Gloo groups (lanes), so that nothing the program does on its own groups can
get between gsync's collectives, and the order within each lane does not depend on timing. Their keys in the group's store are
``gsync/<group>/<engine>/<session>/<generation>``: engines are counted in the order in which they are made, the session tells this
run's keys from those of a run before a restart (gsync/session.py), `reset()` raises the generation, since a Gloo group is dead
after a time-out. Groups are not kept for later engines: ranks need not close theirs in one order.
"""

from __future__ import annotations

import json
import os
import re
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import GsyncError, SyncError, SyncTimeoutError
from .hosts import Place, place_among
from .session import open_session

_DEFAULT_TIMEOUT_S = 1800.0  # torch's own for Gloo, for backends that do not tell theirs

_engines_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def find_group(process_group: Any = None) -> Any:
    """Returns `process_group`, or the default group.

    Raises:
        GsyncError: torch.distributed has not been initialised, or has been destroyed.
        ValueError: this process does not belong to the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise GsyncError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group: this process does not belong to it, or it is no process group (got {group!r})")
    return group


def timeout_of(group: Any, device: torch.device) -> float:
    """Returns the group's time-out for collectives on `device`, in seconds."""
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return limit.total_seconds() if limit else _DEFAULT_TIMEOUT_S


def is_gloo(group: Any, device: torch.device) -> bool:
    """Returns whether the group's collectives on `device` run on Gloo."""
    return group._get_backend(device).name() == "gloo"


class Meeting:
    """Where the ranks of one engine meet: keys of its own in the group's store. Every rank of the group must make its own."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = group.rank(), group.size(), timeout_s
        self._pid = os.getpid()
        engine = _engines_made.get(group, 0)
        _engines_made[group] = engine + 1
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = dist.PrefixStore(f"gsync/{group.group_name}/{engine}", store)
        self._session: str | None = None

    def store(self, generation: int | str) -> Any:
        """Keys of one generation of the engine, or of a part of it. The first call waits for the other ranks.

        Raises:
            GsyncError: this process was forked from the rank: the connection to the store is that one's.
        """
        if self.is_forked:
            raise GsyncError(forked_from(self.rank))
        if self._session is None:
            try:
                self._session = open_session(
                    self._store,
                    self.rank,
                    self.size,
                    self.timeout_s,
                    lambda key: self._wait(self._store, key, "rank 0"),
                    lambda rank: self._late(f"rank {rank}"),
                )
            except RuntimeError as error:
                raise self._broken(error) from error
        return dist.PrefixStore(f"{self._session}/{generation}", self._store)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that made this."""
        return os.getpid() != self._pid

    def agree(self, description: Mapping[str, Any], generation: int | str = 0) -> None:
        """Returns when every rank has come with the same description.

        Costs a few keys of the store for each rank and no collective.

        Args:
            description: plain values. Entries that are lists are compared item by item, so that the message is short.
            generation: which try of the engine.

        Raises:
            ValueError: on every rank, if one rank's differs from rank 0's; names the first difference.
            SyncTimeoutError: a rank did not come.
        """
        if self.size == 1:
            return
        store = self.store(generation)
        mine = json.dumps(description, sort_keys=True)
        if self.rank == 0:
            store.set("description", zlib.compress(mine.encode()))
            answers = {}
            for rank in range(1, self.size):
                answers[rank] = self._wait(store, f"answer/{rank}", f"rank {rank}").decode()
            verdict = "; ".join(f"rank {rank}: {answer}" for rank, answer in answers.items() if answer)
            store.set("verdict", verdict or "same")
        else:
            theirs = json.loads(zlib.decompress(self._wait(store, "description", "rank 0, or a rank it waits for,")))
            store.set(f"answer/{self.rank}", _first_difference(json.loads(mine), theirs))
            verdict = self._wait(store, "verdict", "rank 0, or a rank it waits for,").decode()
            verdict = "" if verdict == "same" else verdict
        if verdict:
            raise ValueError(f"gsync was given different things on different ranks: {verdict}")

    def of_first_rank(self, key: str, value: Any, generation: int | str) -> Any:
        """Returns rank 0's value, plain numbers and lists, on every rank.

        Raises:
            SyncTimeoutError, SyncError: rank 0 did not come.
        """
        store = self.store(generation)
        if self.rank == 0:
            store.set(key, json.dumps(value))
            return value
        return json.loads(self._wait(store, key, "rank 0"))

    def gather(self, key: str, value: Any, generation: int | str) -> list[Any] | None:
        """Returns every rank's value, plain numbers and lists by name, on rank 0; None on the others.

        Raises:
            SyncTimeoutError, SyncError: a rank did not come.
        """
        store = self.store(generation)
        if self.rank != 0:
            store.set(f"{key}/{self.rank}", json.dumps(value))
            return None
        others = range(1, self.size)
        return [value, *(json.loads(self._wait(store, f"{key}/{rank}", f"rank {rank}")) for rank in others)]

    def place(self, word: str, generation: int) -> Place | str:
        """Where this rank stands among the hosts, or why they cannot be used as such. Every rank has to call it.

        Args:
            word: what this rank calls its host.
            generation: which try of the engine.

        Raises:
            SyncTimeoutError, SyncError: a rank did not come.
        """
        store = self.store(generation)
        store.set(f"host/{self.rank}", word)
        words = [self._wait(store, f"host/{rank}", f"rank {rank}").decode() for rank in range(self.size)]
        return place_among(words, self.rank)

    def private_gloo(
        self, generation: int | str, num_lanes: int = 2, of: str = "", ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Returns new Gloo groups of this engine. Collective over their ranks.

        Args:
            of: tells these groups from others of the same generation.
            ranks: theirs; None: all.

        Raises:
            SyncTimeoutError, SyncError: a rank did not come in time, or has died.
        """
        rank, size = (self.rank, self.size) if ranks is None else (ranks.index(self.rank), len(ranks))
        lanes = []
        for lane in range(num_lanes):
            store = dist.PrefixStore(f"{of}lane{lane}", self.store(generation))
            try:
                limit = timedelta(seconds=self.timeout_s)
                lanes.append(dist.ProcessGroupGloo(store, rank, size, timeout=limit))
            except RuntimeError as error:
                raise as_sync_error(f"gsync: rank {self.rank} could not connect to the other ranks", error) from error
        return lanes

    def _wait(self, store: Any, key: str, who: str) -> bytes:
        started = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=self.timeout_s))
            return store.get(key)
        except RuntimeError as error:
            if time.monotonic() - started < 0.9 * self.timeout_s:
                raise self._broken(error) from error
            raise self._late(who) from error

    def _late(self, who: str) -> SyncTimeoutError:
        return SyncTimeoutError(
            f"gsync: rank {self.rank} waited {self.timeout_s:g} s for {who} to start synchronising; "
            "it is late, has died, or runs another model"
        )

    def _broken(self, error: RuntimeError) -> SyncError:
        if isinstance(error, SyncError):
            return error
        return SyncError(f"gsync: rank {self.rank}: the store of the process group failed: {error}")


def forked_from(rank: int) -> str:
    """Returns what to say in a process that was forked from a rank."""
    return (
        f"this process was forked from rank {rank}, whose threads and connections it does not have; "
        "only that process can synchronise this model"
    )


def cause_of(error: BaseException) -> str:
    """Returns what a collective failed with. Gloo's words begin with a place in its source and end with general advice."""
    text = str(error).strip().split("\n")[0]
    text = re.split(r"\. (?=[A-Z])", re.sub(r"^\[[^\]]*:\d+\] ", "", text))[0]
    return text if type(error) is RuntimeError else f"{type(error).__name__}: {text}"


def names_a_timeout(cause: str) -> bool:
    """Returns whether the words of an error tell of a time-out."""
    return "timed out" in cause.lower() or "timeout" in cause.lower()


def as_sync_error(what: str, error: BaseException) -> SyncError:
    """Returns the error of a collective as gsync's: `SyncTimeoutError` where it tells of a time-out."""
    if isinstance(error, SyncError):
        return error
    text = cause_of(error)
    kind = SyncTimeoutError if names_a_timeout(text) else SyncError
    advice = "The gradients concerned are filled with NaN; call reset() before the next backward, on every rank."
    return kind(f"{what}: {text}. {advice}")


def _first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    for key in sorted({*mine, *theirs}):
        here, there = mine.get(key), theirs.get(key)
        if here == there:
            continue
        if isinstance(here, list) and isinstance(there, list):
            for i, (a, b) in enumerate(zip(here, there)):  # noqa: B905 (the lengths are compared below)
                if a != b:
                    return f"{key}[{i}] is {a}, on rank 0 it is {b}"
            return f"{len(here)} {key}, on rank 0 {len(there)}"
        return f"{key} is {here!r}, on rank 0 it is {there!r}"
    return ""

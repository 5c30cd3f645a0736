"""A timeline of some steps, of all ranks: what `trace` of `SyncState` and `GradReducer` writes.

    rank 0, compute     ├─forward─┤├─backward───────────────────────┤├─wait─┤
                                   ├─gradients of bucket 0─┤├─of 1──┤
            pack                                          ╰▶├┤      ├┤            flow arrows: from the gradients of a bucket
            exchange                                          ├──────┤├────┤      being ready to their mean being in place
            unpack                                                   ├┤    ├┤
    rank 1, ...

The engine keeps spans (csrc/clock.h, gsync/spans.py), hooks on the module keep when forward and backward began. When the block
ends the ranks compare their clocks and hand their spans to rank 0, through the group's store: there is no collective that could
get between those of training.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from .errors import GsyncWarning
from .groups import Meeting
from .spans import Span
from .trace_file import RankTrace, check_place, write_trace

_PINGS = 12  # the one that came back fastest counts
_LIMIT_S = 120.0  # for ranks that leave the block later


class ComputeMarks:
    """When forward passes of a module begin and end and backward passes begin, on the clock of `time.perf_counter`.

    On CUDA it is the current stream that is timed, not the host that runs ahead of it.
    """

    def __init__(self, module: torch.nn.Module | None, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._reference, self._reference_s = self._now(), 0.0
        if device.type == "cuda":
            self._reference.synchronize()
        self._reference_s = time.perf_counter()
        self._handles: list[Any] = []
        if module is not None:
            self._handles = [
                module.register_forward_pre_hook(lambda *_: self._mark("forward")),
                module.register_forward_hook(self._forward_ended),
            ]

    def take(self) -> list[tuple[str, float]]:
        """Ends the marking; returns what was marked ("forward", "forward ended", "backward") and when, in s."""
        for handle in self._handles:
            handle.remove()
        if self._device.type != "cuda":
            return self._marks
        torch.cuda.synchronize(self._device)
        return [(what, self._reference_s + 1e-3 * self._reference.elapsed_time(when)) for what, when in self._marks]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _mark(self, what: str) -> None:
        self._marks.append((what, self._now()))

    def _forward_ended(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._mark("forward ended")
        for output in _pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._mark("backward"))


class Recording:
    """One rank's part in a timeline, from the begin of the block to its end. Making one is collective over the group's store.

    Args:
        path: of the file, looked at on rank 0 only.
        meeting: of the ranks; None for one rank.
        module: whose forward and backward passes are shown, where it is known.
        max_spans: how many are kept on each rank.
        about: what the file says of the run.

    Raises:
        ValueError: on every rank, if rank 0 cannot write there.
    """

    def __init__(
        self,
        path: Path,
        meeting: Meeting | None,
        number: int,
        module: torch.nn.Module | None,
        device: torch.device,
        max_spans: int,
        about: dict[str, Any],
    ) -> None:
        if max_spans < 1:
            raise ValueError(f"trace: max_spans={max_spans}: expected at least 1")
        self._path, self._max_spans, self._about = path, max_spans, about
        self._rank: int = meeting.rank if meeting is not None else 0
        self._size: int = meeting.size if meeting is not None else 1
        self._store = meeting.store(f"trace/{number}") if meeting is not None else None
        problem = check_place(path) if self._rank == 0 else ""
        if self._store is not None and self._rank == 0:
            self._store.set("begin", problem)
        elif self._store is not None:
            problem = self._read("begin").decode()
        if problem:
            raise ValueError(f"trace: {problem}")
        self._spans: list[Span] = []
        self._dropped = 0
        self._marks = ComputeMarks(module, device)

    def start(self, engine: Any) -> None:
        """Lets an engine keep its spans."""
        engine.start_trace(self._max_spans)

    def take(self, engine: Any) -> None:
        """Takes what an engine has kept."""
        spans, dropped = engine.take_trace()
        self._spans += spans
        self._dropped += dropped

    def give_up(self) -> None:
        """The block was left by an exception on this rank. Waits for nobody; there will be no file."""
        self._marks.take()
        if self._store is not None:
            try:
                self._store.set("verdict" if self._rank == 0 else f"end/{self._rank}", f"rank {self._rank} left it by an error")
            except RuntimeError:  # the exception under way says more
                return

    def finish(self) -> None:
        """Compares clocks and writes the file, on rank 0. What goes wrong is a warning: training has nothing to do with it."""
        mine = RankTrace(self._rank, self._spans, self._marks.take(), self._dropped)
        try:
            problem = self._write([mine]) if self._store is None else self._gather(mine)
        except (RuntimeError, OSError) as error:
            problem = " ".join(str(error).split())
        if problem:
            warnings.warn(f"gsync: the timeline {str(self._path)!r} was not written: {problem}", GsyncWarning, stacklevel=4)

    def _write(self, ranks: list[RankTrace]) -> str:
        write_trace(self._path, ranks, self._about)
        return ""

    def _gather(self, mine: RankTrace) -> str:
        store: Any = self._store
        if self._rank > 0:
            store.set(f"end/{self._rank}", "")
            problem = self._read("verdict").decode()
            if not problem:
                mine.offset_s, mine.clock_error_s = self._compare_with_first()
                store.set(f"spans/{self._rank}", zlib.compress(json.dumps(mine.to_list()).encode(), 1))
            return problem
        others = range(1, self._size)
        problem = next((word for rank in others if (word := self._read(f"end/{rank}").decode())), "")
        store.set("verdict", problem)
        if problem:
            return problem
        ranks = [mine]
        for rank in others:
            self._serve(rank)
            ranks.append(RankTrace.from_list(json.loads(zlib.decompress(self._read(f"spans/{rank}")))))
            store.delete_key(f"spans/{rank}")
        return self._write(ranks)

    # Clocks: rank r sends a ping, rank 0 answers with its time. The answer was given between the two times that r reads, so what
    # lies in the middle is wrong by half the time between them at most.

    def _serve(self, rank: int) -> None:
        store: Any = self._store
        for number in range(_PINGS):
            self._wait(f"ping/{rank}/{number}")
            store.set(f"pong/{rank}/{number}", repr(time.perf_counter()))

    def _compare_with_first(self) -> tuple[float, float]:
        """What to add to this rank's clock to get rank 0's, and how far that may be off, in s."""
        store: Any = self._store
        best = (0.0, float("inf"))
        for number in range(_PINGS):
            sent = time.perf_counter()
            store.set(f"ping/{self._rank}/{number}", "")
            self._wait(f"pong/{self._rank}/{number}")
            came = time.perf_counter()
            theirs = float(store.get(f"pong/{self._rank}/{number}"))
            if (came - sent) / 2 < best[1]:
                best = (theirs - (sent + came) / 2, (came - sent) / 2)
        return best

    def _wait(self, key: str) -> None:
        store: Any = self._store
        try:
            store.wait([key], timedelta(seconds=_LIMIT_S))
        except RuntimeError as error:
            raise RuntimeError(f"rank {self._rank} waited for {key!r} of another rank, which did not come: {error}") from error

    def _read(self, key: str) -> bytes:
        self._wait(key)
        store: Any = self._store
        return bytes(store.get(key))


def make_recording(
    path: Any,
    meeting: Callable[[], Meeting | None],
    number: int,
    module: Any,
    device: torch.device,
    max_spans: int,
    about: dict[str, Any],
) -> Recording:
    """See `Recording`; checks what can be checked on this rank alone first."""
    try:
        place = Path(path)
    except TypeError:
        raise TypeError(f"trace: expected the path of a file, got {type(path).__name__}") from None
    return Recording(place, meeting(), number, module, device, max_spans, about)

"""The file of a timeline, in the JSON format of Chrome's and Perfetto's viewers (https://ui.perfetto.dev).

One process for each rank; in it a track for what the rank computes and one for each stage of the engine, a second one where
slices overlap in a stage. A flow arrow leads from a bucket's gradients, when they are ready, through each of its slices to
`unpack`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .spans import Span

COMPUTE = 0
STAGES = ("pack", "exchange", "unpack")
_LANES = 8  # tracks that a stage may need
BACKWARD, GRADIENTS, _WAIT = "backward", "gradients of bucket", "wait for the mean"


@dataclass
class RankTrace:
    """What one rank saw.

    Attributes:
        spans: of its engine.
        marks: of its module, see `ComputeMarks`.
        dropped: spans that found no room.
        offset_s: to be added to its clock to get rank 0's.
        clock_error_s: what that is off by at most.
    """

    rank: int
    spans: list[Span]
    marks: list[tuple[str, float]]
    dropped: int = 0
    offset_s: float = 0.0
    clock_error_s: float = 0.0

    def to_list(self) -> list[Any]:
        """In plain lists and numbers."""
        return [self.rank, self.spans, self.marks, self.dropped, self.offset_s, self.clock_error_s]

    @staticmethod
    def from_list(values: list[Any]) -> RankTrace:
        """What `to_list` gave, also when it has been JSON in between."""
        rank, spans, marks, *rest = values
        return RankTrace(rank, [tuple(span) for span in spans], [tuple(mark) for mark in marks], *rest)


@dataclass(frozen=True)
class _Event:
    name: str
    track: int
    begin: float
    end: float
    args: dict[str, Any]


def check_place(path: Path) -> str:
    """Returns why a file cannot be written there, or "". Leaves what is there as it is."""
    folder = path.parent
    if not folder.is_dir():
        return f"{str(path)!r}: there is no folder {str(folder)!r}"
    if path.is_dir():
        return f"{str(path)!r} is a folder; expected the name of a file"
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        return f"{str(path)!r}: no permission to write there"
    return ""


def write_trace(path: Path, ranks: Iterable[RankTrace], about: dict[str, Any]) -> None:
    """Writes the timeline; the file is whole or not there.

    Raises:
        OSError: it cannot be written.
    """
    content = trace_of(ranks, about)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(content))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def trace_of(ranks: Iterable[RankTrace], about: dict[str, Any]) -> dict[str, Any]:
    """Returns the timeline as JSON will hold it; times in µs from the first event."""
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    of_ranks = [(one, [*compute_events(one), *_stage_events(one)]) for one in ranks]
    starts = [event.begin + one.offset_s for one, events in of_ranks for event in events]
    origin = min(starts, default=0.0)
    output: list[dict[str, Any]] = []
    flows = 0
    for one, events in of_ranks:
        to_us = _Clock(one.offset_s - origin)
        output += _names(one.rank, {event.track for event in events})
        output += [_complete(one.rank, event, to_us) for event in events]
        for points in _flows(events):
            flows += 1
            output += _arrow(one.rank, flows, points, to_us)
    about = {
        **about,
        "clock_error_us": {str(one.rank): round(1e6 * one.clock_error_s, 1) for one in ranks},
        "clock_offset_us": {str(one.rank): round(1e6 * one.offset_s, 1) for one in ranks},
        "spans_without_room": sum(one.dropped for one in ranks),
    }
    return {"traceEvents": output, "displayTimeUnit": "ms", "otherData": about}


def compute_events(one: RankTrace) -> list[_Event]:
    """What the rank's program did: forward and backward passes, and the wait at the end of each step."""
    events: list[_Event] = []
    began: float | None = None
    for what, when in one.marks:
        if what == "forward":
            began = when
        elif what == "forward ended" and began is not None:
            events.append(_Event("forward", COMPUTE, began, when, {}))
            began = None
    handed_over: dict[int, list[Span]] = {}
    for span in one.spans:
        if span[0] == "bucket":
            handed_over.setdefault(span[1], []).append(span)
    ends = {span[1]: span[5] for span in one.spans if span[0] == "exposed"}
    before = 0.0
    for step in sorted(handed_over):
        if step not in ends:  # the trace began or ended in the middle of it
            continue
        buckets = sorted(handed_over[step], key=lambda span: span[4])
        first, last = buckets[0][4], buckets[-1][4]
        begin = max((when for what, when in one.marks if what == "backward" and before <= when <= first), default=first)
        events.append(_Event(BACKWARD, COMPUTE, begin, last, {"step": step}))
        at = begin
        for _, _, bucket, _, ready, _ in buckets:
            events.append(_Event(f"{GRADIENTS} {bucket}", COMPUTE, at, ready, {"step": step, "bucket": bucket}))
            at = ready
        events.append(_Event(_WAIT, COMPUTE, last, ends[step], {"step": step}))
        before = ends[step]
    return events


def _stage_events(one: RankTrace) -> list[_Event]:
    events = []
    for number, stage in enumerate(STAGES):
        until = [0.0] * _LANES  # of each track
        for _, step, bucket, idx, begin, end in sorted(
            (span for span in one.spans if span[0] == stage), key=lambda span: span[4]
        ):
            lane = next((lane for lane in range(_LANES) if until[lane] <= begin), _LANES - 1)
            until[lane] = end
            track = 1 + number * _LANES + lane
            events.append(_Event(f"{stage} bucket {bucket}", track, begin, end, {"step": step, "bucket": bucket, "slice": idx}))
    return events


def _flows(events: list[_Event]) -> list[list[_Event]]:
    """For each slice what it went through: the gradients of its bucket, then the stages. Only those that are complete."""
    ready = {(event.args["step"], event.args["bucket"]): event for event in events if event.name.startswith(GRADIENTS)}
    slices: dict[tuple[int, int, int], list[_Event]] = {}
    for event in events:
        if "slice" in event.args:
            slices.setdefault((event.args["step"], event.args["bucket"], event.args["slice"]), []).append(event)
    flows = []
    for (step, bucket, _), stages in sorted(slices.items()):
        source = ready.get((step, bucket))
        if source is not None and len(stages) == len(STAGES):
            flows.append([source, *sorted(stages, key=lambda event: event.begin)])
    return flows


class _Clock:
    """From a rank's seconds to microseconds of the timeline."""

    def __init__(self, shift_s: float) -> None:
        self._shift_s = shift_s

    def __call__(self, when: float) -> float:
        return round(1e6 * (when + self._shift_s), 3)


def _names(rank: int, tracks: set[int]) -> list[dict[str, Any]]:
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for track in sorted(tracks):
        stage, lane = divmod(track - 1, _LANES)
        name = "compute" if track == COMPUTE else STAGES[stage] + (f" ({lane + 1})" if lane else "")
        names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})
        names.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}})
    return names


def _complete(rank: int, event: _Event, to_us: _Clock) -> dict[str, Any]:
    begin, end = to_us(event.begin), to_us(event.end)
    category = "compute" if event.track == COMPUTE else "gsync"
    where = {"pid": rank, "tid": event.track, "ts": begin, "dur": round(max(0.0, end - begin), 3)}
    return {"ph": "X", "cat": category, "name": event.name, **where, "args": event.args}


def _arrow(rank: int, number: int, points: list[_Event], to_us: _Clock) -> list[dict[str, Any]]:
    """A viewer binds each point to the event around it: so just before the end of the first, and in the middle of the others."""
    times = [points[0].end - min(1e-6, (points[0].end - points[0].begin) / 2)]
    times += [(event.begin + event.end) / 2 for event in points[1:]]
    phases = ["s", *["t"] * (len(points) - 2), "f"]
    head = {"cat": "gsync", "name": "bucket", "id": number, "pid": rank}
    return [
        {**head, "ph": phase, "tid": event.track, "ts": to_us(when), **({"bp": "e"} if phase == "f" else {})}
        for phase, event, when in zip(phases, points, times, strict=True)
    ]

"""`codec="auto"`: measures what synchronises a model fastest, uses that, and goes back when it no longer is.

    engine made   calibrate (gsync/probe.py): operations and links, the slowest rank's
    step 3        a few steps in fp32 are timed; a cost model (gsync/choices.py) picks what is worth a try
    then          trials in turn, fp32 among them: in each of four rounds each is used for half a second. The fastest stays
                  buckets whose exchange backward hides anyway go back to fp32, if a trial agrees
    every 100     steps are timed; slower than they were by a quarter, or 1000 steps on: the choice against fp32, once more

A step is timed from the hand-over of its first bucket to the end of its last: all that synchronising can change lies between. All
ranks come to each of these points before the first bucket of the same step; rank 0 decides, from its own times, and tells the
others through the group's store. What is chosen depends on times, and so do the last bits of gradients.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import choices, probe
from .choices import Choice, Predictor, Shape
from .config import CODECS, SyncConfig
from .cost import Topology
from .engine import Engine
from .groups import Meeting
from .hosts import Place
from .model import Model

_FIRST = 3  # steps before anything is timed: DDP cuts its buckets anew after the first
_SETTLE = 1  # steps of a trial in one round before it is timed
_TRIAL_MS, _LEAST_STEPS, _MOST_STEPS = 400.0, 3, 50  # timed then: so long, at least and at most so many steps
_ROUNDS = 4
_MOST_TRIED = 4  # besides fp32
_DROPPED = 1.15  # of the best one's time after a round: no further round
_GAIN = 0.98  # of fp32's time: less of a gain is not worth another codec
_NARROWER = 0.99  # of a wider codec's time, which a narrower one has to reach
_WATCHED, _LOOKS = 100, 10  # steps between two looks, looks until the next trial
_SLOWER = 1.25  # than in the trial: look again now

_Steps = Generator[int, None, None]  # yields how many steps to leave alone


@dataclass(frozen=True)
class _Way:
    """A choice for each parameter, by name; those that are not there travel in fp32."""

    label: str
    by_name: Mapping[str, Choice]


@dataclass(frozen=True)
class _Settled:
    """What a trial came to: what to use and what came next, why, and the ms of a step then; 0: not timed."""

    way: _Way
    runner_up: _Way
    reason: str = "not measured yet"
    ms: float = 0.0

    def to_numbers(self) -> list[Any]:
        """For other ranks."""
        ways = [
            [way.label, {name: [one.codec, one.exchange] for name, one in way.by_name.items()}]
            for way in (self.way, self.runner_up)
        ]
        return [*ways, self.reason, self.ms]

    @classmethod
    def of(cls, numbers: Sequence[Any]) -> _Settled:
        """The inverse of `to_numbers`."""
        way, runner_up = (_Way(label, {name: Choice(*pair) for name, pair in rows.items()}) for label, rows in numbers[:2])
        return cls(way, runner_up, *numbers[2:])


class Tuner:
    """Chooses for one model, over the life of its engines.

    Args:
        meeting: where the ranks meet.
        exchange: what `config.exchange` comes to; all_reduce for "auto".
        place: this rank's among hosts; see `measure_network`.
        backend: that computes.
    """

    def __init__(self, config: SyncConfig, meeting: Meeting, exchange: str, place: Place, backend: str) -> None:
        self._config, self._meeting, self._place, self._backend = config, meeting, place, backend
        self._topology = Topology(place.world_size, place.ranks_per_host)
        self._candidates = choices.candidates(config, exchange, self._topology)
        self._plain = self._candidates[0]
        self._engine: Engine | None = None
        self._model: Model | None = None
        self._work: _Steps | None = None
        self._generation = self._shared = 0
        self._measured: tuple[Any, Any] | None = None  # network and kernels, on rank 0
        self._way = _Way(str(self._plain), {})  # in use
        self._settled = _Settled(self._way, self._way)
        self._steps = _LEAST_STEPS  # of a trial in one round
        self.is_settled = False  # a choice has been made
        self.bucket_mb: int | None = None
        self.reason = self._settled.reason

    def start(self, engine: Engine, model: Model, generation: int) -> None:
        """Begins with a new engine, whose parameters are set. Collective: calibrates, the first time."""
        self._engine, self._model, self._generation, self._shared = engine, model, generation, 0
        if self._share(lambda: self.bucket_mb is None):
            self._calibrate(engine, model)
        # An engine may have failed on one rank before a decision and on another behind it: rank 0's counts.
        self.is_settled = self._share(lambda: self.is_settled)
        self._settled = _Settled.of(self._share(lambda: self._settled.to_numbers()))
        self._use(self._settled.way)
        self.reason = self._settled.reason
        self._work = self._watch() if self.is_settled else self._tune()
        self._go_on()

    def stop(self) -> None:
        """The engine is about to end."""
        if self._work is not None:
            self._work.close()
        self._engine = self._work = None

    def apply(self, model: Model) -> None:
        """Tells the engine what is chosen for the parameters of `model`; new ones travel in fp32."""
        self._model = model
        assert self._engine is not None
        chosen = {name: self._way.by_name.get(name, self._plain) for name in model.names}
        rows = {codec: dict(zip(model.names, column, strict=True)) for codec, column in model.alternatives.items()}
        params, names, codecs, sizes = model.columns_with({name: rows[one.codec][name] for name, one in chosen.items()})
        self._engine.set_parameters(params, names, codecs, sizes, (), [chosen[name].exchange for name in names])

    def __str__(self) -> str:
        counts: dict[Choice, int] = {}
        for name in self._model.names if self._model is not None else ():
            choice = self._way.by_name.get(name, self._plain)
            counts[choice] = counts.get(choice, 0) + 1
        what = ", ".join(f"{choice} for {count}" if len(counts) > 1 else str(choice) for choice, count in counts.items())
        return f"{what}{' parameters' if len(counts) > 1 else ''} ({self.reason})"

    # Points at which all ranks come together.

    def _go_on(self) -> None:
        assert self._work is not None and self._engine is not None
        this = weakref.ref(self)  # the engine must not keep what keeps it

        def due() -> None:
            tuner = this()
            if tuner is not None and tuner._work is not None:
                tuner._go_on()

        self._engine.call_at(self._engine.step + next(self._work), due)

    def _share(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on rank 0, on every rank: plain numbers, text and lists."""
        self._shared += 1
        value = make() if self._meeting.rank == 0 else None
        return self._meeting.of_first_rank(f"auto/{self._shared}", value, self._generation)

    # 1. Calibrate

    def _calibrate(self, engine: Engine, model: Model) -> None:
        codecs = self._config.auto_codecs
        network = probe.measure_network(engine.transport, self._place, codecs, model.device)
        kernels = probe.measure_kernels(codecs, self._topology.world_size, model.device, self._backend)
        ranks = self._meeting.gather("auto/measured", probe.to_numbers(network, kernels), self._generation)
        if ranks is not None:
            self._measured = probe.slowest(ranks, model.device.type != "cpu")
        self.bucket_mb = self._share(lambda: self._predictor([model.names], [0.0]).bucket_mb(self._narrowest()))

    def _narrowest(self) -> Choice:
        """Of what may be chosen, what sends least: buckets that are large enough for it are for all."""
        return max(self._candidates, key=lambda one: (CODECS.index(one.codec), one.exchange != self._plain.exchange))

    def _predictor(self, buckets: Sequence[Sequence[str]], ready_s: Sequence[float]) -> Predictor:
        """Rank 0. `buckets`: names of parameters."""
        assert self._measured is not None and self._model is not None
        network, kernels = self._measured
        params, names, _, _ = self._model.columns()
        numel = {name: param.numel() * (2 if param.is_complex() else 1) for name, param in zip(names, params, strict=True)}
        codecs = {codec: dict(zip(names, column, strict=True)) for codec, column in self._model.alternatives.items()}
        shapes = [
            Shape(
                tuple(bucket),
                tuple(numel[name] for name in bucket),
                {codec: tuple(row[name] for name in bucket) for codec, row in codecs.items()},
                when,
            )
            for bucket, when in zip(buckets, ready_s, strict=True)
        ]
        cores = 0.0 if network.on_device else len(os.sched_getaffinity(0)) / self._place.ranks_per_host
        return Predictor(shapes, network, kernels, self._topology, self._config, torch.get_num_threads(), cores)

    # 2. Try

    def _tune(self) -> _Steps:
        yield _FIRST
        ms, ready_ms = yield from self._time()
        self._steps = self._share(lambda: min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(_TRIAL_MS / max(ms, 1e-3)))))
        buckets = self._buckets()
        if not buckets or not ms:  # sparse gradients alone, say: nothing to choose
            self._settle(_Settled(self._way, self._way, reason="there is nothing to measure"))
            return (yield from self._watch())
        ready_s = [1e-3 * one for one in ready_ms] if len(ready_ms) == len(buckets) else self._even(buckets, 1e-3 * ms)
        listed = self._share(lambda: self._worth_a_try(buckets, ready_s))
        found = yield from self._try([self._everywhere(one) for one in (self._plain, *(Choice(*pair) for pair in listed))])
        best = found.way
        if best.label != str(self._plain):
            mixed = self._share(lambda: self._mixed(buckets, ready_s, Choice(*best.label.split())))
            if mixed:
                by_name = {name: Choice(*pair) for bucket, pair in zip(buckets, mixed, strict=True) for name in bucket}
                again = yield from self._try([_Way("by bucket", by_name), best])
                found = replace(again, runner_up=found.runner_up, reason=f"{found.reason}; then {again.reason}")
        self._settle(found)
        self._announce()
        yield from self._watch()

    def _worth_a_try(self, buckets: Sequence[Sequence[str]], ready_s: Sequence[float]) -> list[list[str]]:
        others = [one for one in self._candidates if one != self._plain]
        listed = self._predictor(buckets, ready_s).shortlist(others, _MOST_TRIED)
        return [[one.codec, one.exchange] for one in others if one in listed]  # wider codecs first

    def _mixed(self, buckets: Sequence[Sequence[str]], ready_s: Sequence[float], best: Choice) -> list[list[str]]:
        wider = [one for one in self._candidates if CODECS.index(one.codec) < CODECS.index(best.codec)]
        mixed = self._predictor(buckets, ready_s).relax(best, wider)
        return [[one.codec, one.exchange] for one in mixed] if len(set(mixed)) > 1 else []

    def _try(self, ways: Sequence[_Way]) -> Generator[int, None, _Settled]:
        """Uses each in turn and returns the fastest. The first is what the others must beat clearly."""
        times: list[list[float]] = [[] for _ in ways]
        racing = list(range(len(ways)))
        self.reason = "on trial"
        for number in range(_ROUNDS):
            for idx in racing[number % len(racing) :] + racing[: number % len(racing)]:
                self._use(ways[idx])
                yield _SETTLE
                ms, _ = yield from self._time()
                times[idx].append(ms)
            racing = self._share(lambda: still_racing(times))
        labels = [way.label for way in ways]
        best, second, reason, ms = self._share(lambda: verdict(labels, times))
        return _Settled(ways[best], ways[second], reason, ms)

    def _settle(self, found: _Settled) -> None:
        self._settled, self.reason, self.is_settled = found, found.reason, True
        self._use(found.way)

    # 3. Watch

    def _watch(self) -> _Steps:
        while True:
            reason = ""
            for _ in range(_LOOKS):
                self._started().time_steps()
                yield _WATCHED
                times, _ = self._started().take_step_times()
                reason = self._share(functools.partial(self._why_again, statistics.median(times or [0.0])))
                if reason:
                    break
            before = self._settled
            challenger = before.runner_up if before.way.label == str(self._plain) else before.way
            if challenger.label == str(self._plain):
                continue
            found = yield from self._try([self._everywhere(self._plain), challenger])
            self._settle(found)
            if found.way.label != before.way.label:
                self._announce(reason or f"after {_LOOKS * _WATCHED} steps")

    def _why_again(self, now_ms: float) -> str:
        usual_ms = self._settled.ms
        return f"steps took {now_ms:.1f} ms instead of {usual_ms:.1f}" if 0 < _SLOWER * usual_ms < now_ms else ""

    # Parts of these.

    def _time(self) -> Generator[int, None, tuple[float, list[float]]]:
        """Times a few steps: their median in ms, and when each bucket was handed over."""
        self._started().time_steps()
        yield self._steps
        times, ready_ms = self._started().take_step_times()
        return statistics.median(times or [0.0]), [one / max(1, len(times)) for one in ready_ms]

    def _everywhere(self, choice: Choice) -> _Way:
        return _Way(str(choice), dict.fromkeys(self._all_names(), choice))

    def _use(self, way: _Way) -> None:
        assert self._model is not None
        self._way = way
        self.apply(self._model)

    def _buckets(self) -> list[list[str]]:
        names = self._all_names()
        return [[names[position] for position in bucket] for bucket in self._started().last_buckets()]

    def _even(self, buckets: Sequence[Sequence[str]], ms: float) -> list[float]:
        """Where nobody knows when buckets come: as if half of the step were backward, evenly."""
        return [0.5 * ms * idx / len(buckets) for idx in range(len(buckets))]

    def _all_names(self) -> list[str]:
        assert self._model is not None
        return self._model.names

    def _started(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _announce(self, why: str = "") -> None:
        """On rank 0, on stderr: what is used now and why."""
        if self._meeting.rank == 0 and self._model is not None:
            print(
                f"gsync ({self._model.label}): codec='auto' uses {self}{'; ' + why if why else ''}", file=sys.stderr, flush=True
            )


def still_racing(times: Sequence[Sequence[float]]) -> list[int]:
    """Those that another round may make the best: the first, and whoever is not far behind.

    Args:
        times: as for `verdict`.
    """
    ratios = _ratios(times)
    limit = _DROPPED * min(ratios)
    rounds = len(times[0])
    return [idx for idx, ratio in enumerate(ratios) if idx == 0 or (ratio <= limit and len(times[idx]) == rounds)]


def verdict(labels: Sequence[str], times: Sequence[Sequence[float]]) -> tuple[int, int, str, float]:
    """Which is fastest, which comes next, why, and the ms of the fastest.

    Compares within each round, so that what changes from round to round falls out. The first must be beaten clearly, and those
    that come earlier, with wider codecs, a little.

    Args:
        times: of each label the ms of a step in each round that it was in.
    """
    ratios = _ratios(times)
    best = 0
    for idx, ratio in enumerate(ratios):
        if ratio < (_GAIN if best == 0 else _NARROWER * ratios[best]):
            best = idx
    second = min((idx for idx in range(len(labels)) if idx != best), key=ratios.__getitem__, default=best)
    shown = ", ".join(f"{label} {ratio:.2f}" for label, ratio in zip(labels[1:], ratios[1:], strict=True))
    ms = [statistics.median(row) for row in times]
    return best, second, f"{ms[best]:.1f} ms; to {ms[0]:.1f} of {labels[0]}: {shown}", ms[best]


def _ratios(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each to the first, round by round."""
    return [statistics.median(own / max(1e-9, of_first) for own, of_first in zip(row, times[0], strict=False)) for row in times]

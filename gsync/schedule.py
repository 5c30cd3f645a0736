"""One training step in time, by simulation of events: what backward computes, and what synchronises its gradients meanwhile.

One rank stands for all (gsync/cost.py). Three things happen at once:

    program  forward, then backward; when the last gradient of a bucket is there, DDP copies the bucket and hands it over. After
             backward, bucket by bucket: wait for its mean, copy it back. Then the optimizer.
    engine   pack, reduce and unpack, one at a time: gsync's thread, or the device's stream. What has arrived goes first, the
             oldest slice before others and never past the one before it (csrc/executor.cpp); then the next slice is packed, if
             fewer than `under_way` are. On a device one slice is under way: its stream keeps the order.
    network  collectives, each on the lane of its stage, in the order of the slices. Latency passes before bytes flow.

What runs at the same time shares. Collectives share links evenly; on CPUs threads share the rank's cores evenly, among them the
one that moves bytes. On a device nothing is taken from backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .cost import Step

_DONE = 1e-12  # s: less than this is left of what has ended


@dataclass(frozen=True)
class Bucket:
    """One bucket of a step.

    Attributes:
        ready_share: of backward that is done when its last gradient is there, 0 to 1, rising from bucket to bucket.
        slices: the steps of each slice; none where there is nothing to synchronise.
        copy_in_s, copy_out_s: of the program's time, before it is handed over and after its mean is there.
        held_bytes: memory from the hand-over to the end, beside the engine's own buffers.
    """

    ready_share: float
    slices: tuple[tuple[Step, ...], ...]
    copy_in_s: float = 0.0
    copy_out_s: float = 0.0
    held_bytes: int = 0


@dataclass(frozen=True)
class Training:
    """A step without communication.

    Attributes:
        forward_s, backward_s, optimizer_s: its parts.
        threads: cores that they use.
        cores: cores that the rank has; 0: a device computes, and cores do not matter.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    threads: float = 1.0
    cores: float = 0.0

    @property
    def step_s(self) -> float:
        """Their sum."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class Outcome:
    """What a step takes.

    Attributes:
        step_s: from the begin of forward to the end of the optimizer.
        exposed_s: what it takes longer than without communication.
        held_bytes: most of `Bucket.held_bytes` at once.
        done_s: when the mean of each bucket was there.
    """

    step_s: float
    exposed_s: float
    held_bytes: int
    done_s: tuple[float, ...]


def simulate(training: Training, buckets: Sequence[Bucket], under_way: int = 2, overlaps_latency: bool = True) -> Outcome:
    """Run one step.

    Args:
        under_way: slices at most under way.
        overlaps_latency: the latency of a collective passes while the one before it on its lane still sends.

    Raises:
        ValueError: fewer than one slice under way, or buckets that are not in order.
    """
    if under_way < 1:
        raise ValueError(f"under_way={under_way}: expected at least 1")
    shares = [0.0, *(bucket.ready_share for bucket in buckets), 1.0]
    if any(after < before for before, after in itertools.pairwise(shares)):
        raise ValueError(f"ready shares {shares[1:-1]} do not rise from 0 to 1")
    return _Simulation(training, buckets, under_way, overlaps_latency).run()


class _Task:
    """Something that takes time: `left` seconds of it, were it alone."""

    __slots__ = ("cpu", "ended", "inter", "intra", "left")

    def __init__(self, seconds: float, cpu: float, inter: float, intra: float, ended: Callable[[], None]) -> None:
        self.left, self.cpu, self.inter, self.intra, self.ended = seconds, cpu, inter, intra, ended


class _Flow:
    """A slice under way."""

    __slots__ = ("arrived", "bucket", "next", "stage", "steps")

    def __init__(self, bucket: int, steps: tuple[Step, ...]) -> None:
        self.bucket, self.steps = bucket, steps
        self.next = 0  # of its steps
        self.stage = 0  # collectives that have ended and been seen
        self.arrived = False  # the one under way has ended


class _Lane:
    """Collectives of one stage, in order."""

    __slots__ = ("busy", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.waiting: list[list[object]] = []  # [flow, step, latency has passed]


class _Simulation:
    def __init__(self, training: Training, buckets: Sequence[Bucket], under_way: int, overlaps_latency: bool) -> None:
        self.training, self.buckets = training, buckets
        self.most, self.overlaps_latency = under_way, overlaps_latency
        self.now = 0.0
        self.tasks: list[_Task] = []
        self.waits_for = -1  # the bucket that the program waits for
        self.slices_left = [len(bucket.slices) for bucket in buckets]
        self.done_s = [0.0] * len(buckets)
        self.held = self.most_held = 0
        self.queue: list[tuple[int, tuple[Step, ...]]] = []  # handed over, not started
        self.started = 0  # of the queue
        self.flows: list[_Flow] = []  # under way, oldest first
        self.engine_busy = False
        self.lanes: dict[int, _Lane] = {}
        self.program = self._program()
        self.end_s: float | None = None

    def run(self) -> Outcome:
        self._continue()
        while self.tasks:
            self._advance()
        if self.end_s is None:
            raise RuntimeError("the simulated step waits for a bucket that never ends")
        return Outcome(self.end_s, self.end_s - self.training.step_s, self.most_held, tuple(self.done_s))

    # Time

    def _advance(self) -> None:
        speeds = self._speeds()
        passed = min(task.left / speed for task, speed in zip(self.tasks, speeds, strict=True))
        self.now += passed
        ended: list[_Task] = []
        going: list[_Task] = []
        for task, speed in zip(self.tasks, speeds, strict=True):
            task.left -= passed * speed
            (ended if task.left <= _DONE else going).append(task)
        self.tasks = going
        for task in ended:
            task.ended()

    def _speeds(self) -> list[float]:
        """Of each task, 1 if it has all it can use. Links first: what waits for one needs less of the cores."""
        tasks = self.tasks
        if len(tasks) == 1 and tasks[0].cpu <= (self.training.cores or tasks[0].cpu):
            return [1.0]
        inter = _fair([task.inter for task in tasks], 1.0)
        intra = _fair([task.intra for task in tasks], 1.0)
        speeds = [min(pair) for pair in zip(inter, intra, strict=True)]
        if not self.training.cores:
            return speeds
        cores = _fair([task.cpu * speed for task, speed in zip(tasks, speeds, strict=True)], self.training.cores)
        return [one * other for one, other in zip(speeds, cores, strict=True)]

    def _begin(self, seconds: float, ended: Callable[[], None], cpu: float = 0.0, inter: float = 0.0, intra: float = 0.0) -> None:
        self.tasks.append(_Task(seconds, cpu, inter, intra, ended))

    # Program

    def _program(self) -> Iterator[tuple[float, float]]:
        """Yields (seconds, cores); with negative seconds it waits for the bucket in `waits_for`."""
        training = self.training
        yield training.forward_s, training.threads
        before = 0.0
        for idx, bucket in enumerate(self.buckets):
            yield training.backward_s * (bucket.ready_share - before), training.threads
            before = bucket.ready_share
            yield bucket.copy_in_s, 1.0
            self._hand_over(idx)
        yield training.backward_s * (1.0 - before), training.threads
        for idx, bucket in enumerate(self.buckets):
            if self.slices_left[idx]:
                self.waits_for = idx
                yield -1.0, 0.0
            yield bucket.copy_out_s, 1.0
        yield training.optimizer_s, training.threads
        self.end_s = self.now

    def _continue(self) -> None:
        self.waits_for = -1
        for seconds, cores in self.program:
            if seconds < 0:
                return
            if seconds > 0:
                return self._begin(seconds, self._continue, cpu=cores)

    def _hand_over(self, idx: int) -> None:
        bucket = self.buckets[idx]
        self.held += bucket.held_bytes
        self.most_held = max(self.most_held, self.held)
        self.queue += [(idx, steps) for steps in bucket.slices]
        if not bucket.slices:
            self._bucket_done(idx)
        self._engine()

    def _bucket_done(self, idx: int) -> None:
        self.done_s[idx] = self.now
        self.held -= self.buckets[idx].held_bytes
        if self.waits_for == idx:
            self._continue()

    # Engine

    def _engine(self) -> None:
        """Takes the next thing to do, if it is idle: as WorkerExecutor::run does."""
        while not self.engine_busy:
            flow = self._next_arrived()
            if flow is not None:
                flow.arrived = False
                flow.stage += 1
            elif len(self.flows) < self.most and self.started < len(self.queue):
                flow = _Flow(*self.queue[self.started])
                self.started += 1
                self.flows.append(flow)
            else:
                return
            self._go_on(flow)

    def _next_arrived(self) -> _Flow | None:
        for idx, flow in enumerate(self.flows):
            if idx > 0 and flow.stage >= self.flows[idx - 1].stage:
                return None
            if flow.arrived:
                return flow
        return None

    def _go_on(self, flow: _Flow) -> None:
        """Computes up to the slice's next collective, or to its end."""
        if flow.next < len(flow.steps) and not flow.steps[flow.next].is_collective:
            step = flow.steps[flow.next]
            flow.next += 1
            self.engine_busy = True
            return self._begin(step.seconds, lambda: self._computed(flow), cpu=step.cpu)
        if flow.next < len(flow.steps):
            return self._issue(flow)
        self.flows.remove(flow)
        self.slices_left[flow.bucket] -= 1
        if self.slices_left[flow.bucket] == 0:
            self._bucket_done(flow.bucket)

    def _computed(self, flow: _Flow) -> None:
        self.engine_busy = False
        self._go_on(flow)
        self._engine()

    # Network

    def _issue(self, flow: _Flow) -> None:
        step = flow.steps[flow.next]
        flow.next += 1
        lane = self.lanes.setdefault(flow.stage, _Lane())
        entry: list[object] = [flow, step, False]
        lane.waiting.append(entry)
        if self.overlaps_latency or (len(lane.waiting) == 1 and not lane.busy):
            self._begin_latency(lane, entry)

    def _begin_latency(self, lane: _Lane, entry: list[object]) -> None:
        def passed() -> None:
            entry[2] = True
            self._send(lane)

        step = entry[1]
        assert isinstance(step, Step)
        self._begin(step.latency_s, passed)

    def _send(self, lane: _Lane) -> None:
        """Lets the bytes of the lane's next collective flow, once its latency has passed."""
        if lane.busy or not lane.waiting or not lane.waiting[0][2]:
            return
        flow, step, _ = lane.waiting.pop(0)
        assert isinstance(step, Step) and isinstance(flow, _Flow)
        lane.busy = True

        def arrived() -> None:
            lane.busy = False
            flow.arrived = True
            if not self.overlaps_latency and lane.waiting:
                self._begin_latency(lane, lane.waiting[0])
            self._send(lane)
            self._engine()

        self._begin(step.seconds, arrived, step.cpu, step.inter, step.intra)


def _fair(demands: Sequence[float], capacity: float) -> list[float]:
    """Of each demand the share that it gets, if `capacity` is divided evenly and nobody gets more than it asks for.

    More than one thread asks for each of them: a demand of 2 counts as two of 1.
    """
    if sum(demands) <= capacity:
        return [1.0] * len(demands)
    given = [0.0] * len(demands)
    open_ = [idx for idx, demand in enumerate(demands) if demand > 0]
    left = capacity
    while open_:
        level = left / sum(max(1.0, demands[idx]) for idx in open_)
        content = [idx for idx in open_ if demands[idx] <= level * max(1.0, demands[idx])]
        if not content:
            for idx in open_:
                given[idx] = level * max(1.0, demands[idx])
            break
        for idx in content:
            given[idx] = demands[idx]
            left -= demands[idx]
        open_ = [idx for idx in open_ if idx not in content]
    return [share / demand if demand > 0 else 1.0 for share, demand in zip(given, demands, strict=True)]

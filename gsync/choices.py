"""What `codec="auto"` may choose for a bucket, and how long a step is predicted to take with it: arithmetic, no clock.

The costs are those of gsync/cost.py, the schedule that of gsync/schedule.py: what `gsync plan` predicts with, here with what the
running engine has measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import cost, ops
from .config import BLOCK_CODECS, CODECS, SyncConfig
from .schedule import Bucket, Training, simulate

_MOST_BUCKETS = 64  # that are looked at one by one
_TOLERANCE = 1.005  # what keeping a bucket in a wider codec may cost
_LATENCY_SHARE = 0.05  # of a bucket's time, at most
_BUCKETS_MB = (1, 2, 4, 8, 16, 25)
_MIB = 1 << 20


@dataclass(frozen=True, order=True)
class Choice:
    """How the gradients of a bucket travel."""

    codec: str
    exchange: str

    def __str__(self) -> str:
        return f"{self.codec} {self.exchange}"


def candidates(config: SyncConfig, exchange: str, topology: cost.Topology) -> list[Choice]:
    """All that the configuration allows, wider codecs first. The first, in fp32, is what the others must beat.

    Args:
        exchange: what `config.exchange` comes to; all_reduce for "auto".
    """
    exchanges = cost.EXCHANGES if config.exchange == "auto" else (exchange,)
    found = [Choice("fp32", exchange)]
    for codec in sorted(config.auto_codecs, key=CODECS.index):
        for exchange in exchanges:
            needs_sums = exchange == "all_reduce" and codec in BLOCK_CODECS
            alone = exchange == "hierarchical" and topology.ranks_per_host == 1
            exempt_codec = config.exempt_codec if codec in BLOCK_CODECS else codec
            uncounted = exchange == "hierarchical" and "fp16" in (codec, exempt_codec)
            if not (needs_sums or alone or uncounted) and Choice(codec, exchange) not in found:
                found.append(Choice(codec, exchange))
    return found


@dataclass(frozen=True)
class Shape:
    """A bucket: names, elements and codecs of its parameters, and when it is handed over.

    Attributes:
        codecs: of each parameter, by the codec chosen: exempt ones have another than the one chosen.
        ready_s: since the first bucket of the step.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    codecs: Mapping[str, tuple[str, ...]]
    ready_s: float


class Predictor:
    """Predictions for one model between these ranks.

    Args:
        shapes: its buckets, in order.
        kernels: by codec.
        threads, cores: that backward uses, and that this rank has; 0 cores: a device computes.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        network: cost.Network,
        kernels: Mapping[str, cost.Kernel],
        topology: cost.Topology,
        config: SyncConfig,
        threads: float,
        cores: float,
    ) -> None:
        self._shapes, self._network, self._kernels, self._topology = shapes, network, dict(kernels), topology
        self._config = config
        self._backward_s = max(1e-9, max(shape.ready_s for shape in shapes))
        self._training = Training(0.0, self._backward_s, 0.0, min(threads, cores or threads), cores)
        self._steps = functools.cache(self._make_steps)

    def step_s(self, choices: Sequence[Choice]) -> float:
        """From the hand-over of the first bucket to the end of the last, with a choice for each."""
        buckets, share = [], 0.0
        for idx, (shape, choice) in enumerate(zip(self._shapes, choices, strict=True)):
            share = max(share, min(1.0, shape.ready_s / self._backward_s))  # noise may have them out of order
            buckets.append(Bucket(share, self._steps(idx, choice)))
        on_device = self._network.on_device
        return simulate(self._training, buckets, 1 if on_device else 2, not on_device).step_s

    def shortlist(self, choices: Sequence[Choice], most: int) -> list[Choice]:
        """The `most` that are predicted to be fastest, if each were used for all buckets; fastest first."""
        return sorted(choices, key=self._uniform_s)[:most]

    def relax(self, choice: Choice, wider: Sequence[Choice]) -> list[Choice]:
        """A choice for each bucket: `choice`, or one of `wider` where nobody waits for the difference.

        Args:
            wider: in the order in which they are preferred.
        """
        mixed = [choice] * len(self._shapes)
        limit_s = _TOLERANCE * self.step_s(mixed)
        for idx in range(min(len(mixed), _MOST_BUCKETS)):
            for other in wider:
                tried = [*mixed[:idx], other, *mixed[idx + 1 :]]
                if self.step_s(tried) <= limit_s:
                    mixed = tried
                    break
        return mixed

    def bucket_mb(self, choice: Choice) -> int:
        """The smallest usual bucket in which latency is at most 5 % of the time: more buckets hide more of the exchange."""
        for size in _BUCKETS_MB:
            numel = size * _MIB // cost.FP32_BYTES
            steps = self._steps_of(choice, [numel], [choice.codec], ["bucket"])
            latency_s = sum(step.latency_s for step in steps)
            if latency_s <= _LATENCY_SHARE * (latency_s + sum(step.seconds for step in steps)):
                return size
        return _BUCKETS_MB[-1]

    def _uniform_s(self, choice: Choice) -> float:
        return self.step_s([choice] * len(self._shapes))

    def _make_steps(self, idx: int, choice: Choice) -> tuple[tuple[cost.Step, ...], ...]:
        shape = self._shapes[idx]
        if not any(shape.numels):
            return ()
        steps = self._steps_of(choice, shape.numels, shape.codecs[choice.codec], shape.names)
        slices = max(1, -(-cost.FP32_BYTES * sum(shape.numels) // int(self._config.slice_mb * _MIB)))
        return (steps,) if slices == 1 else tuple(_share_of(steps, slices) for _ in range(slices))

    def _steps_of(self, choice: Choice, numels: Sequence[int], codecs: Sequence[str],
                  names: Sequence[str]) -> tuple[cost.Step, ...]:  # fmt: skip
        world_size = self._topology.world_size
        num_chunks = 1 if choice.exchange == "all_reduce" else world_size
        size = ops.payload_bytes(numels, list(codecs), self._block_size(codecs), num_chunks, names)
        as_fp32 = ops.payload_bytes(numels, "fp32", None, num_chunks, names) if choice.exchange == "hierarchical" else 0
        sizes = cost.SliceSize(sum(numels), size, size // num_chunks, as_fp32 // num_chunks)
        return cost.steps_of(choice.exchange, choice.codec, sizes, self._kernels, self._topology, self._network)

    def _block_size(self, codecs: Sequence[str]) -> int | None:
        return self._config.block_size if set(codecs) & set(BLOCK_CODECS) else None


def _share_of(steps: Sequence[cost.Step], slices: int) -> tuple[cost.Step, ...]:
    """One of so many slices that are alike."""
    return tuple(cost.Step(step.what, step.seconds / slices, step.latency_s, step.cpu, step.inter, step.intra,
                           step.wire_bytes / slices, step.host_bytes / slices, step.is_collective) for step in steps)  # fmt: skip

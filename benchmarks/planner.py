"""Predicts a training step under stock DDP, torch's hooks and gsync.

    benchmarks/shapes.py       buckets of the model, and their bytes
    benchmarks/calibration.py  what was measured on a machine
    gsync/cost.py              seconds of each step of a slice, from both
    gsync/schedule.py          their order in time

What DDP adds is counted too: it copies every gradient into its bucket and back. `GradReducer` does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gsync import cost
from gsync.config import BLOCK_CODECS, CODECS
from gsync.schedule import Bucket, Outcome, Training, simulate

from .calibration import CASTS, LEVELS, MEDIAN, Calibration, LinkFigures
from .shapes import Parameter, Sizer, codecs_of, cut

STOCK = "stock"
RIVALS = (STOCK, "fp16 hook", "bf16 hook")
DDP, GSYNC, REDUCER = "ddp", "gsync", "reducer"
DEFAULT_BUCKET_MB, FIRST_BUCKET_BYTES = 25.0, 2**20
_MIB = 2.0**20
# Codecs whose payloads are as large as another's.
_AS_LARGE = {"fp16": "bf16", "fp8_e4m3": "int8", "fp8_e5m2": "int8"}


@dataclass(frozen=True)
class Choice:
    """A way to synchronise.

    Attributes:
        family: DDP, GSYNC (through DDP's hook) or REDUCER.
        codec: of gsync; of DDP what travels: fp32, fp16 or bf16.
        exchange: of gsync; all_reduce under DDP.
        bucket_mb: MiB; None for DDP's default, 25 with a first bucket of 1.
    """

    family: str
    codec: str
    exchange: str = "all_reduce"
    bucket_mb: float | None = None

    @property
    def name(self) -> str:
        """As in the tables of gsync bench."""
        if self.family == DDP:
            return STOCK if self.codec == "fp32" else f"{self.codec} hook"
        return f"{self.codec} {self.exchange}"


@dataclass(frozen=True)
class Settings:
    """What stays the same from choice to choice.

    Attributes:
        training: the step without communication.
        ready: share of the gradients' bytes, from the end of the model -> share of backward that is done when they are there.
        slice_mb, block_size, error_feedback, exempt, exempt_codec: as in `SyncConfig`.
        copies: DDP copies gradients into its buckets; False under gradient_as_bucket_view.
    """

    training: Training
    ready: Callable[[float], float] = lambda share: share
    slice_mb: float = 25.0
    block_size: int | None = None
    error_feedback: bool = False
    exempt: tuple[str, ...] | None = None
    exempt_codec: str = "bf16"
    copies: bool = True


class Planner:
    """Predictions for one model on one kind of machine.

    Args:
        network: level (see calibration) -> links.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        settings: Settings,
        calibration: Calibration,
        network: Callable[[str], cost.Network],
    ) -> None:
        self.parameters, self.settings, self.calibration = parameters, settings, calibration
        self.networks = {level: network(level) for level in LEVELS}
        self.on_device = self.networks[MEDIAN].on_device
        self._kernels = {
            (level, feedback): calibration.kernels_at(level, feedback) for level in LEVELS for feedback in (False, True)
        }
        self._sizers: dict[str, Sizer] = {}
        self._cuts: dict[tuple[float | None, bool], list[list[int]]] = {}

    @property
    def gradient_bytes(self) -> int:
        """Of all parameters."""
        return sum(param.num_bytes for param in self.parameters)

    def predict(self, choice: Choice, topology: cost.Topology) -> dict[str, Any]:
        """Return one row of the table: step and exposed time with their range, bytes and memory.

        Raises:
            ValueError: the choice cannot be.
        """
        buckets = self.buckets(choice)
        feedback = self.settings.error_feedback and choice.family != DDP and choice.codec != "fp32"
        sizes = [self._slices(choice, bucket, topology) for bucket in buckets]
        outcomes = {level: self._simulate(choice, buckets, sizes, topology, level, feedback) for level in LEVELS}
        slices = [one for some in sizes for one in some]
        under_way = 1 if self.on_device else 2
        held = outcomes[MEDIAN].held_bytes if choice.family == DDP else 0
        if choice.family != DDP and slices:
            held = under_way * max(cost.buffer_bytes(choice.exchange, one, topology) for one in slices)
        encoded = sum(param.numel for param, codec in zip(self.parameters, self._codecs(choice), strict=True) if codec != "fp32")
        return {
            **dataclasses.asdict(choice),
            "name": choice.name,
            "buckets": len(buckets),
            "slices": len(slices),
            "step_ms": {level: 1e3 * one.step_s for level, one in outcomes.items()},
            "exposed_ms": {level: 1e3 * one.exposed_s for level, one in outcomes.items()},
            "wire_bytes": sum(cost.wire_bytes(choice.exchange, one, topology) for one in slices),
            "host_bytes": self._host_bytes(choice, slices, topology),
            "buffer_bytes": held,
            "residual_bytes": cost.residual_bytes(choice.exchange, encoded, topology) if feedback else 0,
        }

    def why_not(self, codec: str, exchange: str, topology: cost.Topology) -> str:
        """Why the two cannot go together here, or ""."""
        settings = self.settings
        if exchange == "all_reduce" and codec in BLOCK_CODECS:
            return f"libraries cannot sum {codec} with its scales in an all_reduce; scatter_gather and hierarchical can"
        if exchange == "all_reduce" and settings.error_feedback and codec != "fp32":
            return "all_reduce rounds sums where nothing sees what they lose: no error feedback; scatter_gather has it"
        if exchange == "hierarchical" and topology.ranks_per_host == 1:
            return "hierarchical needs several ranks a host; with one it would be scatter_gather"
        if exchange == "hierarchical" and "fp16" in (codec, settings.exempt_codec):
            return "hierarchical does not count what vanishes in fp16, so SyncConfig refuses the two; bf16 goes"
        try:
            codecs_of(self.parameters, codec, settings.exempt, settings.exempt_codec)
        except ValueError as error:
            return str(error)
        return ""

    def buckets(self, choice: Choice) -> list[list[int]]:
        """Indices of parameters by bucket, in the order of the hand-over."""
        starts_small = choice.bucket_mb is None or choice.family == REDUCER
        key = choice.bucket_mb, starts_small
        if key not in self._cuts:
            num_bytes = int((choice.bucket_mb or DEFAULT_BUCKET_MB) * _MIB)
            self._cuts[key] = cut(self.parameters, num_bytes, FIRST_BUCKET_BYTES if starts_small else num_bytes)
        return self._cuts[key]

    def _codecs(self, choice: Choice) -> list[str]:
        settings = self.settings
        return codecs_of(self.parameters, choice.codec, settings.exempt, settings.exempt_codec)

    def _slices(self, choice: Choice, bucket: Sequence[int], topology: cost.Topology) -> list[cost.SliceSize]:
        if topology.world_size == 1:
            return []
        if choice.family == DDP:
            numel = sum(self.parameters[idx].numel for idx in bucket)
            num_bytes = 2 * numel if choice.codec in CASTS else sum(self.parameters[idx].num_bytes for idx in bucket)
            return [cost.SliceSize(numel, num_bytes)]
        if choice.family == GSYNC and choice.codec == "fp32" and choice.exchange == "all_reduce" and not self.on_device:
            return self._in_place(bucket)
        like = _AS_LARGE.get(choice.codec, choice.codec)
        if like not in self._sizers:
            block_size = self.settings.block_size if like in BLOCK_CODECS else None
            self._sizers[like] = Sizer(self.parameters, self._codecs(dataclasses.replace(choice, codec=like)), block_size)
        return self._sizers[like].slices(bucket, int(self.settings.slice_mb * _MIB), topology, choice.exchange)

    def _in_place(self, bucket: Sequence[int]) -> list[cost.SliceSize]:
        """On CPUs DDP's bucket itself travels under fp32: its elements and nothing else (InPlaceFlow in csrc/pipeline.cpp)."""
        numel = sum(self.parameters[idx].numel for idx in bucket)
        num_bytes = cost.FP32_BYTES * numel
        count = max(1, math.ceil(num_bytes / (self.settings.slice_mb * _MIB)))
        parts = [numel * (idx + 1) // count - numel * idx // count for idx in range(count)]
        return [cost.SliceSize(part, cost.FP32_BYTES * part) for part in parts if part]

    def _simulate(self, choice: Choice, buckets: Sequence[Sequence[int]], sizes: Sequence[Sequence[cost.SliceSize]],
                  topology: cost.Topology, level: str, feedback: bool) -> Outcome:  # fmt: skip
        total, passed, made = max(1, self.gradient_bytes), 0, []
        for bucket, slices in zip(buckets, sizes, strict=True):
            num_bytes = sum(self.parameters[idx].num_bytes for idx in bucket)
            passed += num_bytes
            copy_s = 0.0
            if choice.family != REDUCER and self.settings.copies and topology.world_size > 1:
                figures = self.calibration
                copy_s = len(bucket) * figures.copy_fixed.at(level) + num_bytes * figures.copy.at(level)
            made.append(self._bucket(choice, passed / total, copy_s, num_bytes, slices, topology, level, feedback))
        return simulate(self.settings.training, made, 1 if self.on_device else 2, not self.on_device)

    def _bucket(self, choice: Choice, share: float, copy_s: float, num_bytes: int, slices: Sequence[cost.SliceSize],
                topology: cost.Topology, level: str, feedback: bool) -> Bucket:  # fmt: skip
        network, kernels = self.networks[level], self._kernels[level, feedback]
        ready = min(1.0, max(0.0, self.settings.ready(share)))
        if choice.family != DDP:
            steps = tuple(cost.steps_of(choice.exchange, choice.codec, one, kernels, topology, network) for one in slices)
            return Bucket(ready, steps, copy_s, copy_s)
        steps = tuple((cost.all_reduce(one.flat_bytes, choice.codec, topology, network),) for one in slices)
        if choice.codec == "fp32" or not steps:
            return Bucket(ready, steps, copy_s, copy_s)
        casts = self.calibration.casts[choice.codec]
        back = cost.Step("unpack", num_bytes * casts["back"].at(level), cpu=0.0 if self.on_device else 1.0)
        steps = tuple((*some, back) for some in steps)
        return Bucket(ready, steps, copy_s + num_bytes * casts["to"].at(level), copy_s, slices[0].flat_bytes)

    def _host_bytes(self, choice: Choice, slices: Iterable[cost.SliceSize], topology: cost.Topology) -> float:
        network, kernels = self.networks[MEDIAN], self._kernels[MEDIAN, False]
        if choice.family == DDP:
            return sum(cost.all_reduce(one.flat_bytes, choice.codec, topology, network).host_bytes for one in slices)
        return sum(
            step.host_bytes
            for one in slices
            for step in cost.steps_of(choice.exchange, choice.codec, one, kernels, topology, network)
        )


def choices(
    codecs: Sequence[str],
    exchanges: Sequence[str],
    buckets_mb: Sequence[float | None],
    topology: cost.Topology,
    planner: Planner,
    family: str = GSYNC,
) -> list[Choice]:
    """Every combination, after stock DDP and torch's hooks with each bucket size.

    Args:
        codecs, exchanges: empty for all; combinations that cannot be are left out.
        family: GSYNC or REDUCER.

    Raises:
        ValueError: a codec, or an exchange, that was asked for is in no combination.
    """
    found = [Choice(DDP, codec, bucket_mb=size) for size in buckets_mb for codec in ("fp32", *CASTS)]
    refused: list[str] = []
    for exchange in exchanges or cost.EXCHANGES:
        for codec in codecs or CODECS:
            reason = planner.why_not(codec, exchange, topology)
            if reason:
                refused.append(reason)
            else:
                found += [Choice(family, codec, exchange, size) for size in buckets_mb]
    for given, what in ((codecs, "codec"), (exchanges, "exchange")):
        for word in given:
            if not any(getattr(one, what) == word for one in found if one.family != DDP):
                raise ValueError(f"--{what} {word}: {refused[-1]}")
    return found


@dataclass(frozen=True)
class Told:
    """What flags say of a link; None: nothing."""

    bytes_per_s: float | None = None
    latency_us: float | None = None
    message_us: float | None = None


def link_of(told: Told, measured: LinkFigures | None) -> Callable[[str], cost.Link]:
    """Return level -> link: what was told before what was measured; infinitely fast without either, as nothing uses it."""

    def link(level: str) -> cost.Link:
        found = measured.at(level) if measured is not None else cost.Link(math.inf, 0.0, 0.0)
        latency_s = found.latency_s if told.latency_us is None else 1e-6 * told.latency_us
        message_s = found.message_s if measured is not None else latency_s  # one after the other, where nothing better is known
        if told.message_us is not None:
            message_s = 1e-6 * told.message_us
        return cost.Link(found.bytes_per_s if told.bytes_per_s is None else told.bytes_per_s, latency_s, message_s)

    return link


def combine(
    calibration: Calibration, topology: cost.Topology, *, inter: Callable[[str], cost.Link], intra: Callable[[str], cost.Link]
) -> Callable[[str], cost.Network]:
    """Return level -> network, with what moving bytes costs this machine's cores: between hosts, where there are several."""
    between = calibration.inter if topology.hosts > 1 else None
    measured = between or calibration.intra or calibration.inter

    def network(level: str) -> cost.Network:
        if calibration.device == "cuda" or measured is None:
            return cost.Network(inter(level), intra(level), on_device=calibration.device == "cuda")
        sums = tuple((codec, spread.at(level)) for codec, spread in measured.sum_cpu_s.items())
        return cost.Network(inter(level), intra(level), False, measured.send_cpu_s.at(level), sums)

    return network

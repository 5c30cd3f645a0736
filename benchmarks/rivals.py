"""The ways to synchronise that are measured against each other, each as a function that arms one model.

    ddp     stock                 DDP as it comes: fp32, all_reduce
            stock again           a second, identical model: what it differs by is the noise of the machine
            fp16 hook, bf16 hook  torch's fp16_compress_hook and bf16_compress_hook
            PowerSGD              torch's powerSGD_hook, low-rank
    gsync   CODEC EXCHANGE        gsync.register(model, codec=CODEC, exchange=EXCHANGE); "auto auto" chooses both
    reducer CODEC EXCHANGE        gsync.GradReducer(module, codec=CODEC, exchange=EXCHANGE), without DDP

Every rival also says what its result may differ from the exact mean by, which is checked before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

AUTO = "auto"
CODECS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
EXCHANGES = ("all_reduce", "scatter_gather")
SEVERAL_HOSTS = (*EXCHANGES, "hierarchical")  # with several ranks each
GSYNC = "gsync"
REDUCER = "reducer"
STOCK = "stock"
TWIN = "stock again"
DDP_RIVALS = (STOCK, TWIN, "fp16 hook", "bf16 hook", "PowerSGD")
POWERSGD_RANK = 4
POWERSGD_START = 2  # the earliest that torch allows; the checks before timing are past it


@dataclass(frozen=True)
class Bound:
    """How far a mean may lie from the exact one: |error| <= ((1 + u)^k - 1) * m + k * smallest / 2.

    m is the mean over ranks of |g|, or where blocks share a scale of the largest |g| in the element's block. With error feedback
    what one step loses is at most u/(1 - u) of m, and an error is the difference of two such losses: 2 ((1 + u)^k - 1)/(1 - u)^k.

    Attributes:
        unit_roundoff: u, largest error of one rounding: half the distance from 1 to the next number of the type that travels;
            of a block codec over the largest magnitude of the block.
        smallest: twice the largest error that does not shrink with the value: the type's smallest positive number.
        roundings: world_size -> k, how often a value is rounded to that type on its way.
        block_size: elements that share a scale, 0 for none.
        error_feedback: residuals are kept.
    """

    unit_roundoff: float
    smallest: float
    roundings: Callable[[int], int]
    block_size: int = 0
    error_feedback: bool = False

    def relative(self, world_size: int) -> float:
        """Return the factor of m, with the fp32 arithmetic around the codec counted in."""
        num = self.roundings(world_size)
        factor = (1 + self.unit_roundoff) ** num - 1
        if self.error_feedback:
            factor *= 2 / (1 - self.unit_roundoff) ** num
        return (1 + factor) * (1 + 2.0**-24) ** (world_size + 2) - 1

    def absolute(self, world_size: int) -> float:
        """Return the part that does not shrink with the gradient."""
        return self.roundings(world_size) * world_size * self.smallest / 2


_UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
_SMALLEST = {"fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}
_NUM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# Half the largest step between two codes over the largest code, and the default block. int4's scale is rounded up, by up to
# 2^-7. All of them are above bf16's, the default codec of exempt parameters.
_BLOCKS = {"fp8_e4m3": (16 / 448, 256), "fp8_e5m2": (4096 / 57344, 256), "int8": (1 / 254, 256), "int4": ((1 + 2**-7) / 14, 64)}
_BLOCK_FLOAT_ERROR = 2.0**-22  # inv, x * inv, scale and code * scale, each rounded to fp32
_BLOCK_SMALLEST = 2.0**-79  # a block below 2^-80 is sent as zeros


def _bound(kind: str, roundings: Callable[[int], int]) -> Bound:
    return Bound(_UNIT_ROUNDOFF[kind], _SMALLEST[kind], roundings)


def gsync_bound(codec: str, exchange: str, fields: Mapping[str, Any]) -> Bound:
    """Return what the mean under `codec` may be off by; `fields` are further fields of SyncConfig."""
    block_size = 0
    if codec == AUTO:  # before it has tried anything, which is when it is checked
        codec = "fp32"
    if codec in _BLOCKS:
        unit, block_size = _BLOCKS[codec]
        unit += _BLOCK_FLOAT_ERROR
        smallest = max(_BLOCK_SMALLEST, _SMALLEST[fields.get("exempt_codec", "bf16")])
        block_size = fields.get("block_size") or block_size
    else:
        unit, smallest = _UNIT_ROUNDOFF[codec], _SMALLEST[codec]
    if fields.get("rounding") == "stochastic":
        unit, smallest = 2 * unit, 2 * smallest  # up or down, not to the nearer
    twice = exchange not in ("all_reduce", AUTO)
    return Bound(
        unit, smallest, (lambda world: 2) if twice else (lambda world: world), block_size, bool(fields.get("error_feedback"))
    )


@dataclass
class Armed:
    """A DDP model with a rival's hook on it.

    Attributes:
        wire_bytes: () -> bytes that this rank sends per step, over the steps since `reset`.
        wire_source: "formula" or "stats": where `wire_bytes` comes from.
        reset: forgets the steps so far.
        stats: () -> gsync's own numbers since `reset`, {} for the others.
        close: takes the hook's resources back.
        trace: gsync's; None for the others.
        is_settled: () -> whether it does what it will go on doing: not while codec="auto" tries.
    """

    wire_bytes: Callable[[], float]
    wire_source: str = "formula"
    reset: Callable[[], None] = lambda: None
    stats: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = lambda: None
    trace: Callable[[str], Any] | None = None
    is_settled: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Rival:
    """One row of the table.

    Attributes:
        family: "ddp", "gsync" or "reducer".
        name: unique in its family.
        arm: registers the hook on a DDP model, or gives a `Reduced` its reducer; raises where the rival refuses this model,
            device or process group.
        bound: what its mean may be off by; None where no bound is known (PowerSGD), then only equality of ranks is checked.
        own_group: gets a process group of its own.
        whole_model: gets the whole model as one bucket on Gloo.
        note: shown below the table, "" for none.
        may_refuse: a refusal is expected somewhere and is no failure of the run.
    """

    family: str
    name: str
    arm: Callable[[Any], Armed]
    bound: Bound | None
    own_group: bool = False
    whole_model: bool = False
    note: str = ""
    may_refuse: bool = False

    @property
    def label(self) -> str:
        """Family and name: unique."""
        return f"{self.family} {self.name}"


def all_reduce_bytes(payload_bytes: float, world_size: int) -> float:
    """Return what one rank sends in a ring all_reduce: 2 (W-1)/W of the payload."""
    return 2.0 * (world_size - 1) / world_size * payload_bytes


def make_rivals(
    ddp_names: Sequence[str],
    codecs: Sequence[str],
    exchanges: Sequence[str],
    fields: Mapping[str, Any],
    all_exchanges: Sequence[str] = EXCHANGES,
) -> list[Rival]:
    """Return the rivals in the order of the table.

    Args:
        ddp_names: of DDP_RIVALS, GSYNC and REDUCER.
        codecs, exchanges: every combination becomes a gsync rival, and a reducer. Empty for all codecs, and `all_exchanges`; of
            these, combinations that SyncConfig refuses are left out. One codec is enough to show the reducer: bf16, or the first
            that takes `fields`.
        fields: further fields of SyncConfig for all of these.

    Raises:
        ValueError, TypeError: SyncConfig refuses a combination that was asked for, or all with a codec or exchange that was.
    """
    rivals = [_ddp_rival(name) for name in DDP_RIVALS if name in ddp_names]
    if GSYNC in ddp_names:
        rivals += _gsync_rivals(codecs, exchanges, fields, all_exchanges)
    if REDUCER in ddp_names:
        reducers = _gsync_rivals(codecs, exchanges, fields, all_exchanges, REDUCER)
        if not codecs:
            names = [rival.name.split()[0] for rival in reducers]
            only = "bf16" if "bf16" in names else names[0]
            reducers = [rival for rival, name in zip(reducers, names, strict=True) if name == only]
        rivals += reducers
    return rivals


def _gsync_rivals(
    codecs: Sequence[str],
    exchanges: Sequence[str],
    fields: Mapping[str, Any],
    all_exchanges: Sequence[str],
    family: str = GSYNC,
) -> list[Rival]:
    pairs = [
        (codec, exchange) for codec in codecs or CODECS for exchange in exchanges or ((AUTO,) if codec == AUTO else all_exchanges)
    ]
    rivals: dict[tuple[str, str], Rival] = {}
    refusals: dict[tuple[str, str], Exception] = {}
    for pair in pairs:
        try:
            rivals[pair] = _gsync_rival(*pair, fields, family)
        except (ValueError, TypeError) as error:
            refusals[pair] = error
    asked_for = (
        [[pair] for pair in pairs] if codecs and exchanges else [[p for p in pairs if w in p] for w in (*codecs, *exchanges)]
    )
    for group in asked_for or [pairs]:
        if not any(pair in rivals for pair in group):
            raise refusals[group[-1]]  # scatter_gather takes more than all_reduce: what it refuses is the cause
    return list(rivals.values())


def _numel(model: DistributedDataParallel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _world(model: DistributedDataParallel) -> int:
    return dist.get_world_size(model.process_group)


def _ddp_rival(name: str) -> Rival:
    if name in (STOCK, TWIN):
        return Rival("ddp", name, _arm_stock, _bound("fp32", lambda world: world + 1))
    if name == "PowerSGD":
        note = f"rank {POWERSGD_RANK}; on Gloo one bucket, since with several its chained collectives crash or hang the process"
        return Rival("ddp", name, _arm_powersgd, None, own_group=True, whole_model=True, note=note, may_refuse=True)
    kind = name.split()[0]
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[kind]

    def arm(model: DistributedDataParallel) -> Armed:
        model.register_comm_hook(model.process_group, hook)
        wire_bytes = all_reduce_bytes(_NUM_BYTES[kind] * _numel(model), _world(model))
        return Armed(lambda: wire_bytes)

    # cast, division by the world size, and the sums, all in the 16-bit type
    return Rival("ddp", name, arm, _bound(kind, lambda world: world + 1), may_refuse=kind == "bf16")


def _arm_stock(model: DistributedDataParallel) -> Armed:
    wire_bytes = all_reduce_bytes(4 * _numel(model), _world(model))
    return Armed(lambda: wire_bytes)


def _arm_powersgd(model: DistributedDataParallel) -> Armed:
    state = powerSGD_hook.PowerSGDState(
        model.process_group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    numel, world_size = _numel(model), _world(model)

    def wire_bytes() -> float:
        rate = float(state.compression_stats()[0])
        return all_reduce_bytes(4 * numel / rate, world_size)

    return Armed(wire_bytes)


def _gsync_rival(codec: str, exchange: str, fields: Mapping[str, Any], family: str) -> Rival:
    import gsync

    if codec != AUTO:
        fields = {name: value for name, value in fields.items() if name != "auto_codecs"}
    config = gsync.SyncConfig(codec=codec, exchange=exchange, **fields)  # refuses wrong fields here, before anything starts

    def arm(model: Any) -> Armed:
        sync: Any = None
        if family == REDUCER:
            sync = model.reduce(dataclasses.replace(config, bucket_mb=model.bucket_mb))
        else:
            sync = gsync.register(model, config)

        def wire_bytes() -> float:
            stats = sync.stats()
            return stats.wire_bytes / max(1, stats.steps)

        stats = lambda: sync.stats().to_dict()  # noqa: E731
        return Armed(wire_bytes, "stats", sync.reset_stats, stats, sync.close, sync.trace, lambda: bool(sync.is_settled))

    return Rival(family, f"{codec} {exchange}", arm, gsync_bound(codec, exchange, fields))

"""`SyncConfig`: every option of gsync in one frozen dataclass, validated when it is built.

An option that cannot act raises. What depends on the model, the device or the process group (a codec pattern that matches no
parameter, stream priorities on a CPU) is checked when the configuration meets them, still before any collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

CODECS = ("fp32", "fp16", "bf16")
EXCHANGES = ("auto", "all_reduce", "scatter_gather")
ROUNDINGS = ("nearest",)
BACKENDS = ("auto", "native", "triton", "reference")
TRANSPORTS = ("auto", "nccl", "process_group")

# Words of the interface that belong to features which this version does not have, with the reason given in the error.
_PLANNED_CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
_PLANNED_EXCHANGES = ("hierarchical",)
_PLANNED_ROUNDINGS = ("stochastic",)

_MAX_CTAS = 64  # NCCL clamps above the number of its channels


@dataclass(frozen=True)
class SyncConfig:
    """What travels between ranks and how, for one model.

    Attributes:
        codec: Form in which gradients travel: ``"fp32"``, ``"fp16"``, ``"bf16"``, or a mapping of name patterns (``fnmatch``; the
            first that matches a parameter's name counts) to them. Every parameter must be matched and every pattern must match.
            Default ``"bf16"``: half the bytes, and the range of fp32, so that nothing overflows.
        exchange: Order of collectives: ``"all_reduce"`` (the library sums on the wire type), ``"scatter_gather"`` (all_to_all,
            fp32 sum, all_gather: one rounding whatever the number of ranks, and results that do not depend on bucket sizes), or
            ``"auto"``. Default ``"auto"``: ``all_reduce``, which libraries have tuned most (several codecs: one message each).
        average: Divide by the number of ranks of the group. Default True, as DDP does; False gives the sum.
        block_size: Elements that share one scale. Default None: the codec's own. The codecs of this version have no scale, so
            that None is all they accept.
        rounding: ``"nearest"`` (ties to even). Default ``"nearest"``: the smallest error per step.
        seed: Start of the random numbers of stochastic rounding, 0 to 2**63 - 1. Default 0; others need stochastic rounding.
        error_feedback: Add what encoding lost to the next step's gradient. Default False: 16-bit codecs do not need it.
        exempt: Name patterns, or a callable (name, parameter) -> bool, of parameters kept out of a block codec. Default None:
            parameters of fewer than two dimensions, and embeddings. Without a block codec only None is accepted.
        exempt_codec: Codec of exempt parameters. Default ``"bf16"``.
        start_step: First step (count of synchronised backward passes) that uses a block codec; bf16 until then. Default 0.
        bucket_mb: Size of a bucket in MiB, above 0. Default None: 25, as in DDP. Acts only where gsync makes the buckets: DDP
            makes its own, see its ``bucket_cap_mb``.
        slice_mb: Size in MiB of gradients that the engine moves at a time, above 0. Default 25: bounds the buffers, since DDP's
            first bucket holds the whole model, and lets encoding overlap with communication inside large buckets.
        backend: Who computes: ``"native"`` (C++ and CUDA), ``"triton"``, ``"reference"`` (plain PyTorch), or ``"auto"``. Default
            ``"auto"``: the fastest that is there. A name given here works or raises.
        transport: Who moves bytes: ``"nccl"`` (a communicator of gsync's own), ``"process_group"``, or ``"auto"``, the
            default.
        timeout_s: Seconds after which a collective counts as failed, above 0. Default None: the process group's time-out.
        stream_priority: Priority of gsync's CUDA stream, -5 (first) to 0. Default None: the highest the device has, so that
            encoding is not queued behind the backward pass. CUDA only.
        nccl_min_ctas: Fewest CUDA thread blocks NCCL uses, 1 to 64. Default None: NCCL decides. Own communicator only.
        nccl_max_ctas: Most CUDA thread blocks NCCL uses, 1 to 64. Default None: NCCL decides. Lower leaves more of the device to
            the backward pass. Own communicator only.

    Raises:
        TypeError: a value has the wrong type, or a field is unknown.
        ValueError: a value is out of range, or the option cannot act with the others.
    """

    codec: str | Mapping[str, str] = "bf16"
    exchange: str = "auto"
    average: bool = True
    block_size: int | None = None
    rounding: str = "nearest"
    seed: int = 0
    error_feedback: bool = False
    exempt: Sequence[str] | Callable[[str, Any], bool] | None = None
    exempt_codec: str = "bf16"
    start_step: int = 0
    bucket_mb: float | None = None
    slice_mb: float = 25.0
    backend: str = "auto"
    transport: str = "auto"
    timeout_s: float | None = None
    stream_priority: int | None = None
    nccl_min_ctas: int | None = None
    nccl_max_ctas: int | None = None

    def __post_init__(self) -> None:
        self._check_codec()
        _check_word("exchange", self.exchange, EXCHANGES, _PLANNED_EXCHANGES)
        _check_bool("average", self.average)
        _check_word("rounding", self.rounding, ROUNDINGS, _PLANNED_ROUNDINGS)
        _check_bool("error_feedback", self.error_feedback)
        _check_word("exempt_codec", self.exempt_codec, CODECS, ())
        _check_word("backend", self.backend, BACKENDS, ())
        _check_word("transport", self.transport, TRANSPORTS, ())
        _check_int("block_size", self.block_size, 1, 2**20, optional=True)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("start_step", self.start_step, 0, 2**62)
        _check_positive("bucket_mb", self.bucket_mb, optional=True)
        _check_positive("slice_mb", self.slice_mb)
        _check_positive("timeout_s", self.timeout_s, optional=True)
        _check_int("stream_priority", self.stream_priority, -5, 0, optional=True)
        _check_int("nccl_min_ctas", self.nccl_min_ctas, 1, _MAX_CTAS, optional=True)
        _check_int("nccl_max_ctas", self.nccl_max_ctas, 1, _MAX_CTAS, optional=True)
        self._check_can_act()

    @property
    def codecs(self) -> tuple[str, ...]:
        """The distinct codecs that `codec` names, in the order in which it names them."""
        names = self.codec.values() if isinstance(self.codec, Mapping) else (self.codec,)
        return tuple(dict.fromkeys(names))

    def _check_codec(self) -> None:
        if not isinstance(self.codec, Mapping):
            _check_word("codec", self.codec, CODECS, _PLANNED_CODECS)
            return
        if not self.codec:
            raise ValueError('codec: the mapping is empty; expected at least one pattern, for example {"*": "bf16"}')
        for pattern, codec in self.codec.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"codec: expected name patterns (str) as keys, got {pattern!r}")
            _check_word(f"codec[{pattern!r}]", codec, CODECS, _PLANNED_CODECS)
        object.__setattr__(self, "codec", dict(self.codec))  # a copy: the caller's mapping may change later

    def _check_can_act(self) -> None:
        codecs = ", ".join(self.codecs)
        if self.block_size is not None:
            raise ValueError(f"block_size={self.block_size}: codec {codecs} has no blocks; leave block_size out")
        if self.error_feedback:
            raise ValueError(f"error_feedback=True is not available in this version (codecs {', '.join(CODECS)}); leave it out")
        if self.seed != 0:
            raise ValueError(f"seed={self.seed} cannot act with rounding={self.rounding!r}; leave seed out")
        if self.exempt is not None:
            raise ValueError(f"exempt={self.exempt!r} acts with a block codec, and codec {codecs} is none; leave it out")
        if self.exempt_codec != "bf16":
            raise ValueError(f"exempt_codec={self.exempt_codec!r}: codec {codecs} exempts no parameter; leave it out")
        if self.start_step != 0:
            raise ValueError(f"start_step={self.start_step} acts with a block codec, and codec {codecs} is none; leave it out")
        if self.transport == "process_group":
            for name in ("nccl_min_ctas", "nccl_max_ctas"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(f"{name}={value} limits an own communicator; it cannot act with transport='process_group'")
        low, high = self.nccl_min_ctas, self.nccl_max_ctas
        if low is not None and high is not None and low > high:
            raise ValueError(f"nccl_min_ctas={low} is above nccl_max_ctas={high}")


def make_config(config: SyncConfig | None, options: Mapping[str, Any]) -> SyncConfig:
    """The configuration given as an object or as keywords; an unknown keyword raises `TypeError` and lists the fields."""
    known = [field.name for field in fields(SyncConfig)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"unknown option {', '.join(map(repr, unknown))}; the fields of SyncConfig are {', '.join(known)}")
    if config is None:
        return SyncConfig(**options)
    if not isinstance(config, SyncConfig):
        raise TypeError(f"config: expected a SyncConfig, got {type(config).__name__}")
    if options:
        raise TypeError(f"give either a SyncConfig or keywords, not both (got config and {', '.join(map(repr, options))})")
    return config


def _check_word(name: str, value: Any, accepted: tuple[str, ...], planned: tuple[str, ...]) -> None:
    choices = ", ".join(map(repr, accepted))
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {value!r} ({type(value).__name__})")
    if value in planned:
        raise ValueError(f"{name}={value!r} is not available in this version; accepted today: {choices}")
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is unknown; expected one of {choices}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r} ({type(value).__name__})")


def _check_int(name: str, value: Any, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range; expected {low} to {high}")


def _check_positive(name: str, value: Any, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r} ({type(value).__name__})")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value} is out of range; expected a finite number above 0")

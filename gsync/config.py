"""`SyncConfig`: every option of gsync in one frozen dataclass, validated when it is built.

An option that cannot act raises. What depends on the model, the device or the process group (a codec pattern that matches no
parameter, stream priorities on a CPU) is checked when the configuration meets them, still before any collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

PLAIN_CODECS = ("fp32", "fp16", "bf16")
BLOCK_CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")  # one scale for each block of elements
CODECS = PLAIN_CODECS + BLOCK_CODECS
AUTO = "auto"
EXCHANGES = ("auto", "all_reduce", "scatter_gather", "hierarchical")
ROUNDINGS = ("nearest", "stochastic")
BACKENDS = ("auto", "native", "triton", "reference")
TRANSPORTS = ("auto", "nccl", "process_group")

_MIN_BLOCK, _MAX_BLOCK = 32, 4096
_MAX_CTAS = 64  # NCCL clamps above the number of its channels


@dataclass(frozen=True)
class SyncConfig:
    """What travels between ranks and how, for one model.

    Attributes:
        codec: Form in which gradients travel: ``"fp32"``, ``"fp16"``, ``"bf16"``; the block codecs ``"fp8_e4m3"``,
            ``"fp8_e5m2"``, ``"int8"``, ``"int4"``; or a mapping of name patterns (``fnmatch``; the first that matches a
            parameter's name counts) to them. Every parameter must be matched and every pattern must match. Or ``"auto"``: what
            is measured to be fastest, bucket by bucket, of ``auto_codecs`` (gsync/tuner.py; not with error feedback). Default
            ``"bf16"``: half the bytes, and the range of fp32, so that nothing overflows.
        exchange: Order of collectives: ``"all_reduce"`` (the library sums on the wire type; not with block codecs, nor with
            error feedback), ``"scatter_gather"`` (all_to_all, fp32 sum, all_gather: one rounding whatever the number of ranks,
            and results that do not depend on bucket sizes), ``"hierarchical"`` (hosts with several ranks: sums in fp32 inside a
            host, scatter_gather of the codec between hosts, so that a byte leaves a host once; not with fp16), or ``"auto"``.
            Default ``"auto"``: where a block codec or error feedback needs more than ``all_reduce``, ``hierarchical`` for several
            hosts with several ranks each, else ``scatter_gather``; otherwise ``all_reduce``, which libraries have tuned most
            (several codecs: one message each). With ``codec="auto"`` it is measured and chosen together with the codec.
        average: Divide by the number of ranks of the group. Default True, as DDP does; False gives the sum.
        block_size: Elements that share one scale under a block codec, a power of two from 32 to 4096. Default None: 256, for int4
            64: scales are 1.6 % of the bytes, 6 % with int4. Smaller follows the gradients more closely and costs more scales.
        rounding: ``"nearest"`` (ties to even), or ``"stochastic"``: up or down so that the mean is exact. Default
            ``"nearest"``: the smallest error per step.
        seed: Start of the random numbers of stochastic rounding, 0 to 2**63 - 1, the same on every rank. Default 0; others need
            stochastic rounding. The program's own random numbers are not touched.
        error_feedback: Add what encoding lost to the next step's gradient, on both encodings (each rank's gradients, and the
            sum). Not with all_reduce; costs 4 (1 + 1/W) bytes of memory an element, under hierarchical with G ranks a host
            4 (1/G + 1/W). Default False: 8 bits and more train without.
        exempt: Name patterns, or a callable (name, parameter) -> bool, of parameters kept out of a block codec; ``()``: none.
            Default None: parameters of fewer than two dimensions, and embeddings: few bytes, or few rows used in a step.
        exempt_codec: Codec of exempt parameters: ``"fp32"``, ``"fp16"`` or ``"bf16"``. Default ``"bf16"``.
        start_step: First step (count of synchronised backward passes) that uses a block codec, and error feedback; bf16 until
            then. Default 0. Early gradients change fast and are what narrow codecs lose most of.
        measure_every: Every how many steps to add up what encoding loses, for ``relative_error`` and its kin in ``stats()``; 1
            measures each step. Default 0, none: a step that measures packs for half as long again, on CPUs 3 to 8 ms for 25 MiB.
        bucket_mb: Size of a bucket in MiB, above 0. Default None: 25, as in DDP, or a quarter of a small model; under
            ``codec="auto"`` what latency and bandwidth, as measured, ask for. Acts only where gsync makes the buckets: DDP makes
            its own, see its ``bucket_cap_mb``.
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
        auto_codecs: Codecs that ``codec="auto"`` may use; ``"fp32"``, which it falls back to, must be one. Default
            ``("fp32", "bf16")``: neither has less range than the gradients.

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
    measure_every: int = 0
    bucket_mb: float | None = None
    slice_mb: float = 25.0
    backend: str = "auto"
    transport: str = "auto"
    timeout_s: float | None = None
    stream_priority: int | None = None
    nccl_min_ctas: int | None = None
    nccl_max_ctas: int | None = None
    auto_codecs: Sequence[str] = ("fp32", "bf16")

    def __post_init__(self) -> None:
        self._check_codec()
        self._check_auto_codecs()
        _check_word("exchange", self.exchange, EXCHANGES)
        _check_bool("average", self.average)
        _check_word("rounding", self.rounding, ROUNDINGS)
        _check_bool("error_feedback", self.error_feedback)
        self._check_exempt()
        _check_word("exempt_codec", self.exempt_codec, PLAIN_CODECS)
        _check_word("backend", self.backend, BACKENDS)
        _check_word("transport", self.transport, TRANSPORTS)
        _check_int("block_size", self.block_size, _MIN_BLOCK, _MAX_BLOCK, optional=True)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("start_step", self.start_step, 0, 2**62)
        _check_int("measure_every", self.measure_every, 0, 2**31 - 1)
        _check_positive("bucket_mb", self.bucket_mb, optional=True)
        _check_positive("slice_mb", self.slice_mb)
        _check_positive("timeout_s", self.timeout_s, optional=True)
        _check_int("stream_priority", self.stream_priority, -5, 0, optional=True)
        _check_int("nccl_min_ctas", self.nccl_min_ctas, 1, _MAX_CTAS, optional=True)
        _check_int("nccl_max_ctas", self.nccl_max_ctas, 1, _MAX_CTAS, optional=True)
        self._check_can_act()

    @property
    def codecs(self) -> tuple[str, ...]:
        """The distinct codecs that `codec` names, in the order in which it names them; those it may choose among."""
        if self.is_auto:
            return tuple(self.auto_codecs)
        names = self.codec.values() if isinstance(self.codec, Mapping) else (self.codec,)
        return tuple(dict.fromkeys(names))

    @property
    def is_auto(self) -> bool:
        """Whether codecs are chosen by measurement."""
        return self.codec == AUTO

    @property
    def block_codecs(self) -> tuple[str, ...]:
        """Those of `codecs` that have one scale per block."""
        return tuple(codec for codec in self.codecs if codec in BLOCK_CODECS)

    @property
    def may_be_hierarchical(self) -> bool:
        """Whether the exchange depends on which ranks share a host."""
        if self.exchange != "auto" or self.is_auto:
            return self.exchange in ("auto", "hierarchical")
        return bool(self.block_codecs or self.error_feedback) and "fp16" not in (*self.codecs, self.exempt_codec)

    def exchange_used(self, num_hosts: int, ranks_per_host: int) -> str:
        """`exchange`, or what ``"auto"`` stands for among so many hosts with so many ranks each, before anything is measured."""
        if self.exchange != "auto":
            return self.exchange
        if self.is_auto:
            return "all_reduce"
        if not (self.block_codecs or self.error_feedback):
            return "all_reduce"
        is_worth_it = num_hosts > 1 and ranks_per_host > 1
        return "hierarchical" if is_worth_it and self.may_be_hierarchical else "scatter_gather"

    def _check_codec(self) -> None:
        if not isinstance(self.codec, Mapping):
            _check_word("codec", self.codec, (*CODECS, AUTO))
            return
        if not self.codec:
            raise ValueError('codec: the mapping is empty; expected at least one pattern, for example {"*": "bf16"}')
        for pattern, codec in self.codec.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"codec: expected name patterns (str) as keys, got {pattern!r}")
            _check_word(f"codec[{pattern!r}]", codec, CODECS)
        object.__setattr__(self, "codec", dict(self.codec))  # a copy: the caller's mapping may change later

    def _check_auto_codecs(self) -> None:
        if isinstance(self.auto_codecs, str) or not isinstance(self.auto_codecs, Sequence):
            raise TypeError(f"auto_codecs: expected codecs in a list, got {self.auto_codecs!r}")
        for codec in self.auto_codecs:
            _check_word("auto_codecs", codec, CODECS)
        if "fp32" not in self.auto_codecs or len(set(self.auto_codecs)) < 2:
            raise ValueError(f"auto_codecs={list(self.auto_codecs)}: expected 'fp32', to fall back to, and at least one more")
        object.__setattr__(self, "auto_codecs", tuple(dict.fromkeys(self.auto_codecs)))
        if not self.is_auto and self.auto_codecs != ("fp32", "bf16"):
            raise ValueError(f"auto_codecs={list(self.auto_codecs)} acts with codec='auto'; leave it out")

    def _check_exempt(self) -> None:
        if self.exempt is None or callable(self.exempt):
            return
        if isinstance(self.exempt, str) or not isinstance(self.exempt, Sequence):
            raise TypeError(
                f"exempt: expected name patterns in a list, or a callable (name, parameter) -> bool, got {self.exempt!r}"
            )
        for pattern in self.exempt:
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"exempt: expected name patterns (str), got {pattern!r}")
        object.__setattr__(self, "exempt", tuple(self.exempt))  # a copy: the caller's list may change later

    def _check_can_act(self) -> None:
        codecs = ", ".join(self.codecs)
        rounds = set(self.codecs) != {"fp32"}
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size}: expected a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}")
        if self.is_auto and self.error_feedback:
            raise ValueError(
                "error_feedback=True: residuals belong to one codec and exchange, which codec='auto' changes; name the codec"
            )
        if self.exchange == "all_reduce" and self.block_codecs:
            raise ValueError(
                f"exchange='all_reduce': libraries cannot sum {', '.join(self.block_codecs)} with their scales; "
                "use 'scatter_gather' or 'auto'"
            )
        if self.exchange == "all_reduce" and self.error_feedback:
            raise ValueError(
                "error_feedback=True: under exchange='all_reduce' the library rounds the sums, where nothing sees what they "
                "lose; use 'scatter_gather' or 'auto'"
            )
        if self.exchange == "hierarchical" and "fp16" in (*self.codecs, self.exempt_codec):
            raise ValueError(
                "exchange='hierarchical': fp16 encodes a host's sum there, and nothing counts the values that vanish; "
                "use bf16, or 'scatter_gather'"
            )
        if not rounds:
            for name in ("error_feedback", "measure_every"):
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)} cannot act: codec fp32 loses nothing; leave it out")
            if self.rounding != "nearest":
                raise ValueError(f"rounding={self.rounding!r} cannot act: codec fp32 does not round; leave it out")
        if self.seed != 0 and self.rounding == "nearest":
            raise ValueError(f"seed={self.seed} cannot act with rounding='nearest'; leave seed out")
        if not self.block_codecs:
            if self.block_size is not None:
                raise ValueError(f"block_size={self.block_size}: codec {codecs} has no blocks; leave block_size out")
            if self.exempt is not None:
                raise ValueError(f"exempt={self.exempt!r} acts with a block codec, and codec {codecs} is none; leave it out")
            if self.exempt_codec != "bf16":
                raise ValueError(f"exempt_codec={self.exempt_codec!r}: codec {codecs} exempts no parameter; leave it out")
            if self.start_step != 0:
                raise ValueError(
                    f"start_step={self.start_step} acts with a block codec, and codec {codecs} is none; leave it out"
                )
        if self.exempt == () and self.exempt_codec != "bf16":
            raise ValueError(f"exempt_codec={self.exempt_codec!r} cannot act with exempt=(), which exempts nothing; leave it out")
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


def _check_word(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    choices = ", ".join(map(repr, accepted))
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {value!r} ({type(value).__name__})")
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

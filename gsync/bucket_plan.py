"""What a bucket of DDP is made of and how the Python engine cuts it, worked out once for each set of parameters.

    part   segments that travel in the same messages: all of one exchange, or under all_reduce those of one codec
    slice  at most slice_bytes of a part

What encoding a parameter lost belongs to the parameter: a plan only points to it, so that DDP may rebuild its buckets. The rule
is the native engine's (csrc/bucket_plan.cpp), so that both send the same bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .backends import BucketLayout
from .encoding import ERROR_SUMS
from .layout import BLOCK_SIZES, CODEC_KINDS, DTYPE_CODES, TILE_ELEMENTS, Segment, hash64


@dataclass
class Part:
    """Segments of a bucket that travel together."""

    exchange: Any = None  # of python_exchange.py; None for one rank
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first element, numel) in the bucket's buffer
    segments: list[Segment] = field(default_factory=list)
    parameter_idx: list[int] = field(default_factory=list)  # of each segment, in the bucket
    norm_idx: list[int] = field(default_factory=list)
    codec: str = ""  # where all segments have one
    layouts: list[BucketLayout] = field(default_factory=list)  # one for each slice
    partials: torch.Tensor | None = None
    index: torch.Tensor | None = None  # norm_idx on the device
    residuals: list[tuple[torch.Tensor, torch.Tensor] | None] = field(default_factory=list)  # sender's and reducer's
    # EncodeOptions.error_sums of each slice; empty: not measured.
    pack_errors: list[torch.Tensor] = field(default_factory=list)
    reduce_errors: list[torch.Tensor] = field(default_factory=list)

    @property
    def has_residuals(self) -> bool:
        return any(pair is not None for pair in self.residuals)


@dataclass
class BucketPlan:
    parts: list[Part]
    gradient_bytes: int
    last_step: int = 0


@dataclass(frozen=True)
class PlanOptions:
    """How buckets are cut and encoded.

    Attributes:
        slice_bytes: of gradients, at least 1.
        start_step: block codecs, and residuals, are used from this step on; bf16 until then.
        measure_error: whether there are steps that sum what encoding loses.
    """

    slice_bytes: int
    start_step: int = 0
    measure_error: bool = False


@dataclass(frozen=True)
class _Entry:
    parameter: weakref.ref[torch.Tensor]
    name: str
    codec: str
    exchange: Any
    block_size: int
    norm_idx: int
    residual: tuple[torch.Tensor, torch.Tensor] | None


class Parameters:
    """The model's parameters by identity, and the plans made from them."""

    def __init__(self, device: torch.device, exchange_named: Callable[[str], Any], exchange: str, options: PlanOptions) -> None:
        """`exchange_named`: those of python_exchange.py, None for one rank; `exchange`: of parameters that are told no other."""
        self._device, self._exchange_named, self._exchange, self._options = device, exchange_named, exchange, options
        self._table: dict[int, _Entry] = {}
        self._plans: dict[tuple[Any, ...], BucketPlan] = {}
        self._retired_errors = torch.zeros(2, len(ERROR_SUMS), dtype=torch.float64, device=device)

    def set(
        self,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        codecs: Sequence[str],
        block_sizes: Sequence[int],
        residuals: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        exchanges: Sequence[str],
    ) -> None:
        """One name and codec for each parameter. Holds parameters weakly, residuals strongly; forgets all plans."""
        order = {name: i for i, name in enumerate(sorted(names))}
        if not len(params) == len(order) == len(codecs):
            raise ValueError(f"set_parameters: {len(params)} parameters, {len(order)} different names, {len(codecs)} codecs")
        cuts = [self._exchange_named(exchange) for exchange in exchanges or [self._exchange] * len(names)]
        for name, codec, cut in zip(names, codecs, cuts, strict=True):
            if cut is not None and cut.one_codec and CODEC_KINDS[codec] in BLOCK_SIZES:
                raise ValueError(f"set_parameters: codec {codec} of {name!r} needs scatter_gather: libraries cannot sum it")
        some = (block_sizes or [0] * len(names), residuals or [None] * len(names))
        self._table = {
            id(param): _Entry(weakref.ref(param), name, codec, cut, block_size, order[name], residual)
            for param, name, codec, cut, block_size, residual in zip(params, names, codecs, cuts, *some, strict=True)
        }
        self._retire(self._plans.values())
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._table)

    def alive(self) -> list[torch.Tensor]:
        """The parameters that still exist."""
        return [param for entry in self._table.values() if (param := entry.parameter()) is not None]

    def norm_idx(self, param: torch.Tensor) -> int:
        """The place of a parameter in the order of names."""
        return self._entry(param).norm_idx

    def plan(self, dtype: torch.dtype, numel: int | None, params: Sequence[torch.Tensor], step: int) -> BucketPlan:
        """The plan for a dense bucket, from the cache when the same parameters came before.

        Args:
            dtype: of the gradients, a real one.
            numel: of the buffer they lie in; None where they lie anywhere.

        Raises:
            ValueError: a parameter that `set` did not get, an unsupported dtype, or a buffer of another length.
        """
        has_started = step >= self._options.start_step
        key = (dtype, has_started, *map(id, params))
        plan = self._plans.get(key)
        if plan is None or any(self._table[i].parameter() is None for i in map(id, params)):
            plan = self._plans[key] = self._make(dtype, numel, params, has_started)
        plan.last_step = step
        return plan

    def forget_unused(self, step: int) -> None:
        """Forgets plans that the last two steps did not use: those of DDP's buckets before it rebuilt them."""
        unused = [key for key, plan in self._plans.items() if plan.last_step + 1 < step]
        self._retire([self._plans.pop(key) for key in unused])

    def error_sums(self) -> list[float]:
        """ERROR_SUMS of pack, then of reduce, since the last reset; empty where they are not measured."""
        if not self._options.measure_error:
            return []
        total = self._retired_errors.clone()
        for plan in self._plans.values():
            _add_errors(total, plan)
        return [float(value) for value in total.view(-1).tolist()]

    def reset_error_sums(self) -> None:
        """Sets them to zero."""
        self._retired_errors.zero_()
        for plan in self._plans.values():
            for part in plan.parts:
                for table in (*part.pack_errors, *part.reduce_errors):
                    table.zero_()

    def follow_loss_scale(self, scale: torch.Tensor, unit: torch.Tensor) -> None:
        """Multiplies all residuals by scale / unit and sets `unit` to `scale`, unless that is 0, Inf or NaN; no wait on CUDA."""
        residuals = [tensor for entry in self._table.values() if entry.residual is not None for tensor in entry.residual]
        if not residuals or (self._device.type == "cpu" and float(scale) == float(unit)):
            return
        now = torch.where((scale > 0) & scale.isfinite(), scale, unit)
        torch._foreach_mul_(residuals, (now / unit).view(()))
        unit.copy_(now)

    def _retire(self, plans: Iterable[BucketPlan]) -> None:
        for plan in plans:
            _add_errors(self._retired_errors, plan)

    def _entry(self, param: torch.Tensor) -> _Entry:
        entry = self._table.get(id(param))
        if entry is None or entry.parameter() is not param:
            raise ValueError(f"a bucket holds a parameter of shape {tuple(param.shape)} that the model did not have at the start")
        return entry

    def _make(
        self, dtype: torch.dtype, buffer_numel: int | None, params: Sequence[torch.Tensor], has_started: bool
    ) -> BucketPlan:
        if dtype not in DTYPE_CODES:
            raise ValueError(f"gradients are {dtype}; expected {', '.join(map(str, DTYPE_CODES))}, or complex of them")
        parts: dict[tuple[str, int], Part] = {}  # by exchange, and by codec where a payload has one
        end = 0
        for i, param in enumerate(params):
            entry = self._entry(param)
            codec = entry.codec if has_started or CODEC_KINDS[entry.codec] not in BLOCK_SIZES else "bf16"
            kind = CODEC_KINDS[codec]
            numel = param.numel() * (2 if param.is_complex() else 1)  # DDP hands over the real view of a complex bucket
            cut = entry.exchange
            key = (cut.name, kind if cut.one_codec else 0) if cut is not None else ("", 0)
            part = parts.setdefault(key, Part(cut))
            part.spans.append((end, numel))
            block_size = entry.block_size if kind in BLOCK_SIZES else 0
            part.segments.append(Segment(numel, DTYPE_CODES[dtype], kind, hash64(entry.name), block_size))
            part.parameter_idx.append(i)
            part.norm_idx.append(entry.norm_idx)
            part.residuals.append(entry.residual if has_started else None)
            part.codec = codec if part.codec in ("", codec) else "mixed"
            end += numel
        if buffer_numel not in (None, end):
            raise ValueError(f"a bucket has {buffer_numel} elements, its parameters {end}")
        for part in parts.values():
            numel = sum(numel for _, numel in part.spans)
            wanted = -(-numel * dtype.itemsize // self._options.slice_bytes)
            num_slices = min(max(wanted, 1), max(1, -(-numel // TILE_ELEMENTS)))
            cut = part.exchange
            num_chunks, num_shards = (cut.num_chunks, cut.num_shards) if cut is not None else (1, 1)
            part.layouts = [BucketLayout(part.segments, num_chunks, i, num_slices, num_shards) for i in range(num_slices)]
            if self._options.measure_error:
                self._add_error_tables(part)
            part.partials = torch.zeros(part.layouts[0].sizes.num_partials, dtype=torch.float64, device=self._device)
            part.index = torch.tensor(part.norm_idx, device=self._device)
        ordered = [parts[key] for key in sorted(parts)]  # the same on every rank
        filled = [part for part in ordered if any(numel for _, numel in part.spans)]
        return BucketPlan(filled, end * dtype.itemsize)

    def _add_error_tables(self, part: Part) -> None:
        cut = part.exchange
        if cut is None:
            return
        per_shard = cut.num_chunks // cut.num_shards
        for layout in part.layouts:
            first_tile = layout.sizes.chunk_first_tile
            begin, end = cut.shard * per_shard, (cut.shard + 1) * per_shard
            part.pack_errors.append(self._error_table(first_tile[end] - first_tile[begin]))
            if cut.num_chunks > 1:
                part.reduce_errors.append(self._error_table(first_tile[cut.chunk + 1] - first_tile[cut.chunk]))

    def _error_table(self, num_tiles: int) -> torch.Tensor:
        return torch.zeros(num_tiles, len(ERROR_SUMS), dtype=torch.float64, device=self._device)


def _add_errors(total: torch.Tensor, plan: BucketPlan) -> None:
    for part in plan.parts:
        for row, tables in enumerate((part.pack_errors, part.reduce_errors)):
            for table in tables:
                total[row] += table.sum(0)

"""What a bucket of DDP is made of and how the Python engine cuts it, worked out once for each set of parameters.

    part   segments that travel in the same messages: all of them, or under all_reduce those of one codec
    slice  at most slice_bytes of a part

The rule is the native engine's (csrc/bucket_plan.cpp), so that both send the same bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .backends import BucketLayout
from .layout import CODEC_KINDS, DTYPE_CODES, TILE_ELEMENTS, Segment, hash64


@dataclass
class Part:
    """Segments of a bucket that travel together."""

    spans: list[tuple[int, int]] = field(default_factory=list)  # (first element, numel) in the bucket's buffer
    segments: list[Segment] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    norm_idx: list[int] = field(default_factory=list)
    codec: str = ""  # where all segments have one
    layouts: list[BucketLayout] = field(default_factory=list)  # one for each slice
    partials: torch.Tensor | None = None
    index: torch.Tensor | None = None  # norm_idx on the device


@dataclass
class BucketPlan:
    parts: list[Part]
    gradient_bytes: int
    last_step: int = 0


class Parameters:
    """The model's parameters by identity, and the plans made from them."""

    def __init__(self, device: torch.device, num_chunks: int, one_codec: bool, slice_bytes: int) -> None:
        self._device, self._num_chunks, self._one_codec, self._slice_bytes = device, num_chunks, one_codec, slice_bytes
        self._table: dict[int, tuple[Any, str, str, int]] = {}
        self._plans: dict[tuple[Any, ...], BucketPlan] = {}

    def set(self, params: Sequence[torch.Tensor], names: Sequence[str], codecs: Sequence[str]) -> None:
        """One name and codec for each parameter. Holds the parameters weakly; forgets all plans."""
        order = {name: i for i, name in enumerate(sorted(names))}
        if not len(params) == len(order) == len(codecs):
            raise ValueError(f"set_parameters: {len(params)} parameters, {len(order)} different names, {len(codecs)} codecs")
        rows = zip(params, names, codecs, strict=True)
        self._table = {id(param): (weakref.ref(param), name, codec, order[name]) for param, name, codec in rows}
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._table)

    def alive(self) -> list[torch.Tensor]:
        """The parameters that still exist."""
        return [param for reference, *_ in self._table.values() if (param := reference()) is not None]

    def norm_idx(self, param: torch.Tensor) -> int:
        """The place of a parameter in the order of names."""
        return self._entry(param)[3]

    def plan(self, buffer: torch.Tensor, params: Sequence[torch.Tensor], step: int) -> BucketPlan:
        """The plan for a dense bucket, from the cache when the same parameters came before.

        Raises:
            ValueError: a parameter that `set` did not get, an unsupported dtype, or a buffer of another length.
        """
        key = (buffer.dtype, *map(id, params))
        plan = self._plans.get(key)
        if plan is None or any(self._table[i][0]() is None for i in map(id, params)):
            plan = self._plans[key] = self._make(buffer, params)
        plan.last_step = step
        return plan

    def forget_unused(self, step: int) -> None:
        """Forgets plans that the last two steps did not use: those of DDP's buckets before it rebuilt them."""
        self._plans = {key: plan for key, plan in self._plans.items() if plan.last_step + 1 >= step}

    def _entry(self, param: torch.Tensor) -> tuple[Any, str, str, int]:
        entry = self._table.get(id(param))
        if entry is None or entry[0]() is not param:
            raise ValueError(f"a bucket holds a parameter of shape {tuple(param.shape)} that the model did not have at the start")
        return entry

    def _make(self, buffer: torch.Tensor, params: Sequence[torch.Tensor]) -> BucketPlan:
        if buffer.dtype not in DTYPE_CODES:
            raise ValueError(f"gradients are {buffer.dtype}; expected {', '.join(map(str, DTYPE_CODES))}, or complex of them")
        parts: dict[str, Part] = {}
        end = 0
        for param in params:
            _, name, codec, norm_idx = self._entry(param)
            numel = param.numel() * (2 if param.is_complex() else 1)  # DDP hands over the real view of a complex bucket
            part = parts.setdefault(codec if self._one_codec else "", Part())
            part.spans.append((end, numel))
            part.segments.append(Segment(numel, DTYPE_CODES[buffer.dtype], CODEC_KINDS[codec], hash64(name)))
            part.names.append(name)
            part.norm_idx.append(norm_idx)
            part.codec = codec if part.codec in ("", codec) else "mixed"
            end += numel
        if end != buffer.numel():
            raise ValueError(f"a bucket has {buffer.numel()} elements, its parameters {end}")
        for part in parts.values():
            numel = sum(numel for _, numel in part.spans)
            wanted = -(-numel * buffer.element_size() // self._slice_bytes)
            num_slices = min(max(wanted, 1), max(1, -(-numel // TILE_ELEMENTS)))
            part.layouts = [BucketLayout(part.segments, self._num_chunks, i, num_slices) for i in range(num_slices)]
            part.partials = torch.zeros(part.layouts[0].sizes.num_partials, dtype=torch.float64, device=self._device)
            part.index = torch.tensor(part.norm_idx, device=self._device)
        ordered = sorted(parts.items(), key=lambda item: CODEC_KINDS.get(item[0], 0))
        filled = [part for _, part in ordered if any(numel for _, numel in part.spans)]
        return BucketPlan(filled, end * buffer.element_size())

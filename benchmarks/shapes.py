"""What `gsync plan` knows of a model: its parameters, in which buckets they travel, and how many bytes each slice has, exactly.

The rules are those of gsync/layout.py (docs/wire_format.md), for all chunks of a slice at once: a layout of 4,096 chunks is a
table of millions of shares.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gsync import cost, layout
from gsync.config import BLOCK_CODECS

from .workloads import MODELS, Sizes, full_sizes, make_workload

_TILE_SHIFT = layout.TILE_ELEMENTS.bit_length() - 1
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Parameter:
    """One parameter that is trained.

    Attributes:
        name: in the module.
        numel: elements; a complex one counts as two.
        element_bytes: of its gradient.
        is_exempt: fewer than two dimensions, or an embedding: kept out of block codecs by default.
    """

    name: str
    numel: int
    element_bytes: int = 4
    is_exempt: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its gradient."""
        return self.numel * self.element_bytes


def read_model(model: str, sizes: Sizes) -> tuple[str, list[Parameter]]:
    """Return what the model is called and its parameters in the order of registration.

    Args:
        model: a workload of `gsync bench`, a JSON file, or module:callable.
        sizes: of a workload; all None for the others.

    Raises:
        ValueError: there is no such model, it cannot be read or made, or it has nothing to train.
    """
    if model in MODELS:
        full_sizes(model, sizes)
        # Without memory where the model can be built so; torch raises NotImplementedError for what it cannot do on "meta".
        with torch.device("meta"), contextlib.suppress(RuntimeError, NotImplementedError):
            return model, of_module(make_workload(model, sizes, 0).build())
        return model, of_module(make_workload(model, sizes, 0).build())
    for name, value in vars(sizes).items():
        if value is not None:
            raise ValueError(f"--{name} {value} cannot act: {model} is no model of gsync bench, and brings its own sizes")
    if Path(model).suffix == ".json" or Path(model).is_file():
        return Path(model).name, _from_file(Path(model))
    if ":" in model:
        return model, of_module(_call(model))
    raise ValueError(
        f"--model {model}: expected {', '.join(MODELS)}, a JSON file of shapes, or module:callable that returns a torch module"
    )


def of_module(module: nn.Module) -> list[Parameter]:
    """Return the parameters of a module that are trained.

    Raises:
        ValueError: there are none.
    """
    tables = {id(child.weight) for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag))}
    found = [
        Parameter(
            name,
            param.numel() * (2 if param.is_complex() else 1),
            param.element_size() // (2 if param.is_complex() else 1),
            param.dim() < 2 or id(param) in tables,
        )
        for name, param in module.named_parameters()
        if param.requires_grad
    ]
    if not found:
        raise ValueError(f"--model: {type(module).__name__} has no parameter that requires a gradient: nothing to synchronise")
    return found


def _from_file(path: Path) -> list[Parameter]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--model {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--model {path}: is no JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f'--model {path}: expected names with shapes, {{"layer.weight": [256, 64], ...}}')
    return [_parameter(f"--model {path}: {name!r}", name, entry) for name, entry in content.items()]


def _parameter(where: str, name: str, entry: Any) -> Parameter:
    """From a shape, or from shape, dtype and embedding."""
    values = entry if isinstance(entry, dict) else {"shape": entry}
    unknown = [key for key in values if key not in ("shape", "dtype", "embedding")]
    shape, dtype, embedding = values.get("shape"), values.get("dtype", "float32"), values.get("embedding", False)
    if unknown:
        raise ValueError(f"{where}: {unknown[0]!r} is unknown; expected shape, dtype, embedding")
    if not isinstance(shape, list) or any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"{where}: shape {shape!r}: expected a list of sizes, such as [256, 64]")
    if dtype not in _BYTES:
        raise ValueError(f"{where}: dtype {dtype!r}: expected one of {', '.join(_BYTES)}")
    if not isinstance(embedding, bool):
        raise ValueError(f"{where}: embedding {embedding!r}: expected true or false")
    return Parameter(name, math.prod(shape), _BYTES[dtype], len(shape) < 2 or embedding)


def _call(target: str) -> nn.Module:
    """What the callable returns: without memory where it can be made so, as parameters of tens of GB need not be there."""
    name, _, attribute = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(name)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(f"--model {target}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ValueError(f"--model {target}: is no callable but {type(function).__name__}")
    module = None
    with torch.device("meta"), contextlib.suppress(Exception):  # some look at values while they are made
        module = function()
    try:
        module = function() if module is None else module
    except Exception as error:
        raise ValueError(f"--model {target}: the call raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"--model {target}: returned {type(module).__name__}; expected a torch module")
    return module


def codecs_of(
    parameters: Sequence[Parameter], codec: str, exempt: Sequence[str] | None = None, exempt_codec: str = "bf16"
) -> list[str]:
    """The codec of each parameter, as gsync.model.codecs_of says.

    Raises:
        ValueError: all parameters are exempt from a block codec.
    """
    if codec not in BLOCK_CODECS:
        return [codec] * len(parameters)
    kept_out = [
        param.is_exempt if exempt is None else any(fnmatch.fnmatchcase(param.name, pattern) for pattern in exempt)
        for param in parameters
    ]
    if all(kept_out):
        raise ValueError(f"every parameter is exempt from {codec}; --codec {exempt_codec} says the same")
    return [exempt_codec if one else codec for one in kept_out]


def cut(parameters: Sequence[Parameter], bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Return the indices of parameters by bucket, in the order of the hand-over: the last parameter comes first."""
    order = list(reversed(range(len(parameters))))
    buckets: list[list[int]] = []
    for element_bytes in dict.fromkeys(parameters[idx].element_bytes for idx in order):
        alike = [idx for idx in order if parameters[idx].element_bytes == element_bytes]
        parts = cost.cut_buckets([parameters[idx].num_bytes for idx in alike], bucket_bytes, first_bytes)
        buckets += [[alike[position] for position in part] for part in parts]
    return sorted(buckets, key=lambda bucket: -min(bucket))


class Sizer:
    """Sizes of slices for one model and set of codecs; what was asked for once is kept.

    Args:
        block_size: of the block codecs; None for their own.
    """

    def __init__(self, parameters: Sequence[Parameter], codecs: Sequence[str], block_size: int | None = None) -> None:
        self.parameters, self.codecs = parameters, codecs
        self.block_size = block_size or 0
        self._hashes = [layout.hash64(param.name) for param in parameters]
        self._chunks = functools.cache(self._chunk_bytes)
        self._parts = functools.cache(self._part_numels)
        self._part_bytes = functools.cache(self._bytes_of_parts)

    def slices(self, bucket: Sequence[int], slice_bytes: int, topology: cost.Topology, exchange: str) -> list[cost.SliceSize]:
        """The slices of a bucket that holds the parameters with these indices."""
        key = tuple(bucket)
        numel = sum(self.parameters[idx].numel for idx in key)
        if numel == 0:
            return []
        num_bytes = sum(self.parameters[idx].num_bytes for idx in key)
        count = min(max(1, -(-num_bytes // slice_bytes)), max(1, -(-numel // layout.TILE_ELEMENTS)))
        parts = [numel * (idx + 1) // count - numel * idx // count for idx in range(count)]
        if exchange == "all_reduce":
            return [cost.SliceSize(part, size) for part, size in zip(parts, self._chunks(key, 1, 1, count, False), strict=True)]
        world_size, levels = topology.world_size, exchange == "hierarchical"
        shards = topology.ranks_per_host if levels else 1
        chunks = self._chunks(key, world_size, shards, count, False)
        plain = self._chunks(key, world_size, shards, count, True) if levels else (0,) * count
        return [
            cost.SliceSize(part, size * world_size, size, fp32) for part, size, fp32 in zip(parts, chunks, plain, strict=True)
        ]

    def _chunk_bytes(
        self, bucket: tuple[int, ...], num_chunks: int, num_shards: int, num_slices: int, as_fp32: bool
    ) -> tuple[int, ...]:
        """Of each slice. `as_fp32`: with the same blocks, tiles and flags, but elements as fp32."""
        kinds = [layout.CODEC_KINDS[self.codecs[idx]] for idx in bucket]
        flags = _align(len(bucket) * self._flag_bytes(kinds), layout.PAYLOAD_ALIGNMENT)

        def in_chunks(idx: int, parts: torch.Tensor) -> torch.Tensor:
            """What is known of part r of a parameter, for the part that each chunk holds."""
            of_shard, shards = self._hashes[idx] // num_shards % (num_chunks // num_shards), self._hashes[idx] % num_shards
            return parts.view(num_shards, -1).roll((shards, of_shard), (0, 1)).view(-1)

        def size_of(slice_codes: torch.Tensor, slice_scales: torch.Tensor) -> int:
            return int((flags + _align(slice_scales, layout.PAYLOAD_ALIGNMENT) + slice_codes).max())

        if num_slices == 1:
            codes, scales = torch.zeros(num_chunks, dtype=torch.int64), torch.zeros(num_chunks, dtype=torch.int64)
            for idx, kind in zip(bucket, kinds, strict=True):
                part_codes, part_scales = self._part_bytes(self.parameters[idx].numel, kind, num_chunks, as_fp32)
                codes += in_chunks(idx, part_codes)
                if part_scales is not None:
                    scales += in_chunks(idx, part_scales)
            return (size_of(codes, scales),)

        held = [
            in_chunks(idx, self._parts(self.parameters[idx].numel, self._block(kind), num_chunks))
            for idx, kind in zip(bucket, kinds, strict=True)
        ]
        tiles = [_shares(numel, _TILE_SHIFT) for numel in held]
        total = sum(tiles, torch.zeros(num_chunks, dtype=torch.int64))
        found = []
        for number in range(num_slices):
            codes, scales, first = torch.zeros_like(total), torch.zeros_like(total), torch.zeros_like(total)
            begin, end = total * number // num_slices, total * (number + 1) // num_slices
            for kind, numel, count in zip(kinds, held, tiles, strict=True):
                low, high = ((place - first).clamp(min=0).minimum(count) << _TILE_SHIFT for place in (begin, end))
                row_codes, row_scales = self._row_bytes(kind, numel.minimum(high) - numel.minimum(low), as_fp32)
                codes += row_codes
                if row_scales is not None:
                    scales += row_scales
                first += count
            found.append(size_of(codes, scales))
        return tuple(found)

    def _block(self, kind: int) -> int:
        return (self.block_size or layout.BLOCK_SIZES[kind]) if kind in layout.BLOCK_SIZES else layout.ELEMENTWISE_BLOCK

    def _part_numels(self, numel: int, block: int, num_chunks: int) -> torch.Tensor:
        """Elements of part r of a parameter, for every r."""
        ends = (-(-numel // block) * torch.arange(num_chunks + 1) // num_chunks * block).clamp(max=numel)
        return ends[1:] - ends[:-1]

    def _bytes_of_parts(self, numel: int, kind: int, num_chunks: int, as_fp32: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bytes of codes and scales of part r of a parameter, for every r: the same for all parameters of a size."""
        return self._row_bytes(kind, self._parts(numel, self._block(kind), num_chunks), as_fp32)

    def _row_bytes(self, kind: int, numel: torch.Tensor, as_fp32: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bytes of codes and of scales of shares with so many elements."""
        codes = numel * cost.FP32_BYTES if as_fp32 else _codes_bytes(kind, numel)
        scales = None
        if kind in layout.SCALE_BYTES and not as_fp32:
            scales = _align(_shares(numel, self._block(kind).bit_length() - 1) * layout.SCALE_BYTES[kind], 4)
        return _align(codes, layout.PAYLOAD_ALIGNMENT), scales

    @staticmethod
    def _flag_bytes(kinds: Sequence[int]) -> int:
        return layout.CODE_BYTES.get(kinds[0], 1) if len(set(kinds)) == 1 else 1


def _shares(numel: torch.Tensor, shift: int) -> torch.Tensor:
    """How many of 2^shift elements each `numel` has, the last one counted too if it is short."""
    return (numel + ((1 << shift) - 1)) >> shift


def _codes_bytes(kind: int, numel: torch.Tensor) -> torch.Tensor:
    if kind == layout.CODEC_KINDS["int4"]:
        return (numel + 1) >> 1
    return numel * layout.CODE_BYTES.get(kind, 1)


def _align(num_bytes: Any, alignment: int) -> Any:
    """Up to a multiple of `alignment`, a power of two."""
    return (num_bytes + (alignment - 1)) & -alignment

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

    def slices(self, bucket: Sequence[int], slice_bytes: int, world_size: int, exchange: str) -> list[cost.SliceSize]:
        """The slices of a bucket that holds the parameters with these indices."""
        key = tuple(bucket)
        numel = sum(self.parameters[idx].numel for idx in key)
        if numel == 0:
            return []
        num_bytes = sum(self.parameters[idx].num_bytes for idx in key)
        count = min(max(1, -(-num_bytes // slice_bytes)), max(1, -(-numel // layout.TILE_ELEMENTS)))
        parts = [numel * (idx + 1) // count - numel * idx // count for idx in range(count)]
        if exchange == "all_reduce":
            return [cost.SliceSize(part, size) for part, size in zip(parts, self._chunks(key, 1, count, False), strict=True)]
        chunks = self._chunks(key, world_size, count, False)
        plain = self._chunks(key, world_size, count, True) if exchange == "hierarchical" else (0,) * count
        return [
            cost.SliceSize(part, size * world_size, size, fp32) for part, size, fp32 in zip(parts, chunks, plain, strict=True)
        ]

    def _chunk_bytes(self, bucket: tuple[int, ...], num_chunks: int, num_slices: int, as_fp32: bool) -> tuple[int, ...]:
        kinds = [layout.CODEC_KINDS["fp32" if as_fp32 else self.codecs[idx]] for idx in bucket]
        own = {kind: self.block_size or size for kind, size in layout.BLOCK_SIZES.items()}
        # Sizes of blocks and tiles are powers of two: shifts, since 64-bit divisions would take most of the time.
        shifts = [own.get(kind, layout.ELEMENTWISE_BLOCK).bit_length() - 1 for kind in kinds]
        numels = torch.tensor([self.parameters[idx].numel for idx in bucket])[:, None]
        shift = torch.tensor(shifts)[:, None]
        num_blocks = _shares(numels, shift)
        # Part r of each parameter that chunk c holds.
        ends = (num_blocks * torch.arange(num_chunks + 1)[None, :] // num_chunks << shift).minimum(numels)
        parts = ends[:, 1:] - ends[:, :-1]
        rotation = torch.tensor([self._hashes[idx] % num_chunks for idx in bucket])[:, None]
        part = torch.arange(num_chunks)[None, :] - rotation
        held = parts.gather(1, torch.where(part < 0, part + num_chunks, part))
        tiles = _shares(held, _TILE_SHIFT)
        last = tiles.cumsum(0)
        first, total = last - tiles, last[-1]
        flags = _align(len(bucket) * self._flag_bytes(kinds), layout.PAYLOAD_ALIGNMENT)
        found = []
        for idx in range(num_slices):
            numel = held
            if num_slices > 1:
                low = (total * idx // num_slices - first).clamp(min=0).minimum(tiles) << _TILE_SHIFT
                high = (total * (idx + 1) // num_slices - first).clamp(min=0).minimum(tiles) << _TILE_SHIFT
                numel = held.minimum(high) - held.minimum(low)
            codes, scales = torch.zeros_like(total), torch.zeros_like(total)
            for kind in set(kinds):
                rows = torch.tensor([row for row, other in enumerate(kinds) if other == kind])
                of_kind = numel if len(rows) == len(kinds) else numel.index_select(0, rows)
                codes += _align(_codes_bytes(kind, of_kind), layout.PAYLOAD_ALIGNMENT).sum(0)
                if kind in layout.SCALE_BYTES:
                    scales += _align(_shares(of_kind, own[kind].bit_length() - 1) * layout.SCALE_BYTES[kind], 4).sum(0)
            found.append(int((flags + _align(scales, layout.PAYLOAD_ALIGNMENT) + codes).max()))
        return tuple(found)

    @staticmethod
    def _flag_bytes(kinds: Sequence[int]) -> int:
        return layout.CODE_BYTES.get(kinds[0], 1) if len(set(kinds)) == 1 else 1


def _shares(numel: torch.Tensor, shift: Any) -> torch.Tensor:
    """How many of 2^shift elements each `numel` has, the last one counted too if it is short."""
    return (numel + ((1 << shift) - 1)) >> shift


def _codes_bytes(kind: int, numel: torch.Tensor) -> torch.Tensor:
    if kind == layout.CODEC_KINDS["int4"]:
        return (numel + 1) >> 1
    return numel * layout.CODE_BYTES.get(kind, 1)


def _align(num_bytes: Any, alignment: int) -> Any:
    """Up to a multiple of `alignment`, a power of two."""
    return (num_bytes + (alignment - 1)) & -alignment

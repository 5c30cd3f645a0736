"""What gsync has to know about a model: parameters by name, each with its codec, and their device."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .config import BLOCK_CODECS, SyncConfig

# Dtypes of gradients; complex ones travel as pairs of real numbers.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.complex32)
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Model:
    """The parameters of a model in the order of their names. Holds them weakly."""

    label: str  # the class of the module, for messages
    names: list[str]
    codecs: list[str]
    alternatives: dict[str, list[str]]  # the same, by what codec="auto" may choose; else empty
    block_size: int  # of the block codecs; 0: their own
    references: list[weakref.ref[torch.Tensor]]
    identities: frozenset[int]
    device: torch.device
    communicates: str  # a module that communicates in its backward pass, or ""

    def alive(self) -> list[torch.Tensor]:
        """The parameters that still exist."""
        return [param for reference in self.references if (param := reference()) is not None]

    def has(self, param: torch.Tensor) -> bool:
        """Whether `param` is one of the model's."""
        return id(param) in self.identities

    def columns(self) -> tuple[list[torch.Tensor], list[str], list[str], list[int]]:
        """Parameters, names, codecs and block sizes, as `Engine.set_parameters` takes them."""
        return self.columns_with(dict(zip(self.names, self.codecs, strict=True)))

    def columns_with(self, codecs: Mapping[str, str]) -> tuple[list[torch.Tensor], list[str], list[str], list[int]]:
        """`columns` with other codecs, by name."""
        rows = [
            (param, name, codecs[name])
            for reference, name in zip(self.references, self.names, strict=True)
            if (param := reference()) is not None
        ]
        sizes = [self.block_size if codec in BLOCK_CODECS else 0 for _, _, codec in rows]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], sizes

    def description(self) -> list[str]:
        """One line for each parameter, to compare between ranks."""
        params = [reference() for reference in self.references]
        return [
            f"{name} {tuple(param.shape)} {param.dtype} {codec}"
            for name, param, codec in zip(self.names, params, self.codecs, strict=True)
            if param is not None
        ]

    def strides(self) -> list[str]:
        """One line for each parameter: elements are counted in the order of memory, so that strides must be equal."""
        params = [reference() for reference in self.references]
        return [f"{name} {param.stride()}" for name, param in zip(self.names, params, strict=True) if param is not None]


def read_model(module: torch.nn.Module, config: SyncConfig) -> Model:
    """Reads the parameters of a module (not of its DDP wrapper), leaving out those that DDP was told to ignore.

    Raises:
        ValueError: no parameter to train, one without a shape, an unsupported dtype or device, more than one device, a parameter
            without a codec, or a pattern of codec or exempt without a parameter.
        TypeError: a parameter is of a tensor subclass with a life of its own, such as DTensor.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = [(name, param) for name, param in module.named_parameters() if name not in ignored]
    for name, param in named:
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet; call the module once before it is synchronised")
    trained = [(name, param) for name, param in named if param.requires_grad]
    if not trained:
        raise ValueError(f"the model ({type(module).__name__}) has no parameter that requires a gradient: nothing to synchronise")
    for name, param in trained:
        _check_parameter(name, param)
    devices = sorted({str(param.device) for _, param in trained})
    if len(devices) > 1:
        raise ValueError(f"the model's parameters are on {len(devices)} devices ({', '.join(devices)}); one SyncState serves one")
    named = [(name, param) for name, param in named if param.dtype in _DTYPES and param.device == trained[0][1].device]
    rows = sorted(
        zip(strip_wrappers([name for name, _ in named]), (param for _, param in named), strict=True), key=lambda row: row[0]
    )
    names = [name for name, _ in rows]
    by_codec = {codec: codecs_of(rows, module, _only(config, codec)) for codec in config.auto_codecs} if config.is_auto else {}
    return Model(
        label=type(module).__name__,
        names=names,
        codecs=by_codec["fp32"] if by_codec else codecs_of(rows, module, config),
        alternatives=by_codec,
        block_size=config.block_size or 0,
        references=[weakref.ref(param) for _, param in rows],
        identities=frozenset(id(param) for _, param in rows),
        device=trained[0][1].device,
        communicates=_communicating_module(module),
    )


def _only(config: SyncConfig, codec: str) -> SyncConfig:
    """What `codec` alone would be under codec="auto". Exempt parameters go in fp32 where their codec is not allowed either."""
    if codec not in BLOCK_CODECS:
        return SyncConfig(codec=codec)
    exempt_codec = config.exempt_codec if config.exempt_codec in config.auto_codecs else "fp32"
    return SyncConfig(codec=codec, exempt=config.exempt, exempt_codec="bf16" if config.exempt == () else exempt_codec)


def strip_wrappers(names: list[str]) -> list[str]:
    """Names as the unwrapped module has them: without a leading ``module.`` and without torch.compile's ``_orig_mod.``."""
    stripped = []
    for name in names:
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        while len(parts) > 1 and parts[0] == "module":
            parts = parts[1:]
        stripped.append(".".join(parts))
    return stripped if len(set(stripped)) == len(names) else names


def codecs_of(rows: Sequence[tuple[str, torch.Tensor]], module: torch.nn.Module, config: SyncConfig) -> list[str]:
    """The codec of each parameter: by pattern, and instead of a block codec `exempt_codec` where it is exempt.

    Args:
        rows: name and parameter.
        module: whose embeddings are exempt by default.

    Raises:
        ValueError: a parameter matches no pattern, or a pattern no parameter, or all parameters with a block codec are exempt.
        TypeError: `exempt` answers something else than a bool.
    """
    names = [name for name, _ in rows]
    patterns = config.codec if isinstance(config.codec, Mapping) else {"*": config.codec}
    matched = []
    for name in names:
        pattern = next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is None:
            raise ValueError(f'codec: parameter {name!r} matches none of the patterns {list(patterns)}; add "*"')
        matched.append(pattern)
    idle = [pattern for pattern in patterns if pattern not in matched]
    if idle:
        raise ValueError(f"codec: pattern {idle[0]!r} is the first to match for no parameter; the names are {_some(names)}")
    blocked = [row for row, pattern in zip(rows, matched, strict=True) if patterns[pattern] in BLOCK_CODECS]
    exempt = _exempt_names(blocked, module, config)
    for pattern in patterns:
        members = {name for name, match in zip(names, matched, strict=True) if match == pattern}
        if patterns[pattern] in BLOCK_CODECS and members <= exempt:
            what = f"pattern {pattern!r}" if isinstance(config.codec, Mapping) else "the model"
            raise ValueError(
                f"codec: every parameter of {what} is exempt from {patterns[pattern]}"
                f"{' (fewer than 2 dimensions, or an embedding)' if config.exempt is None else ''}; exempt=() exempts none"
            )
    return [config.exempt_codec if name in exempt else patterns[pattern] for name, pattern in zip(names, matched, strict=True)]


def _exempt_names(rows: Sequence[tuple[str, torch.Tensor]], module: torch.nn.Module, config: SyncConfig) -> set[str]:
    """Of the parameters that would have a block codec, those that are exempt."""
    exempt = config.exempt
    if exempt is None:
        tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        embeddings = {id(child.weight) for child in module.modules() if isinstance(child, tables)}
        return {name for name, param in rows if param.dim() < 2 or id(param) in embeddings}
    if callable(exempt):
        found = set()
        for name, param in rows:
            answer = exempt(name, param)
            if not isinstance(answer, bool):
                raise TypeError(f"exempt: expected True or False for parameter {name!r}, got {answer!r}")
            if answer:
                found.add(name)
        return found
    for pattern in exempt:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in rows):
            raise ValueError(
                f"exempt: pattern {pattern!r} matches no parameter with a block codec; their names are "
                f"{_some([name for name, _ in rows])}"
            )
    return {name for name, _ in rows if any(fnmatch.fnmatchcase(name, pattern) for pattern in exempt)}


def _check_parameter(name: str, param: torch.Tensor) -> None:
    if type(param.data) is not torch.Tensor:
        raise TypeError(f"parameter {name!r} is a {type(param.data).__name__}; expected a plain tensor")
    if param.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} has layout {param.layout}; expected torch.strided")
    if param.dtype not in _DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(f"parameter {name!r} has dtype {param.dtype}; expected one of {accepted}")
    if param.device.type not in _DEVICES:
        raise ValueError(f"parameter {name!r} is on {param.device}; expected {' or '.join(_DEVICES)}")


def _communicating_module(module: torch.nn.Module) -> str:
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.SyncBatchNorm):
            return f"SyncBatchNorm {name!r}"
    return ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

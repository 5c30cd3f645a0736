"""What gsync has to know about a model: parameters by name, each with its codec, and their device."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .config import SyncConfig

# Dtypes of gradients; complex ones travel as pairs of real numbers.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.complex32)
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Model:
    """The parameters of a model in the order of their names. Holds them weakly."""

    label: str  # the class of the module, for messages
    names: list[str]
    codecs: list[str]
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

    def columns(self) -> tuple[list[torch.Tensor], list[str], list[str]]:
        """Parameters, names and codecs, as `Engine.set_parameters` takes them."""
        rows = [
            (param, name, codec)
            for reference, name, codec in zip(self.references, self.names, self.codecs, strict=True)
            if (param := reference()) is not None
        ]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]

    def description(self) -> list[str]:
        """One line for each parameter, to compare between ranks."""
        params = [reference() for reference in self.references]
        return [
            f"{name} {tuple(param.shape)} {param.dtype}"
            for name, param in zip(self.names, params, strict=True)
            if param is not None
        ]


def read_model(module: torch.nn.Module, config: SyncConfig) -> Model:
    """Reads the parameters of a module (not of its DDP wrapper), leaving out those that DDP was told to ignore.

    Raises:
        ValueError: no parameter to train, an unsupported dtype or device, more than one device, a parameter without a codec, or
            a codec pattern without a parameter.
        TypeError: a parameter is of a tensor subclass with a life of its own, such as DTensor.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = [(name, param) for name, param in module.named_parameters() if name not in ignored]
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
    return Model(
        label=type(module).__name__,
        names=names,
        codecs=codecs_of(names, config),
        references=[weakref.ref(param) for _, param in rows],
        identities=frozenset(id(param) for _, param in rows),
        device=trained[0][1].device,
        communicates=_communicating_module(module),
    )


def strip_wrappers(names: list[str]) -> list[str]:
    """Names as the unwrapped module has them: without a leading ``module.`` and without torch.compile's ``_orig_mod.``."""
    stripped = []
    for name in names:
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        while len(parts) > 1 and parts[0] == "module":
            parts = parts[1:]
        stripped.append(".".join(parts))
    return stripped if len(set(stripped)) == len(names) else names


def codecs_of(names: list[str], config: SyncConfig) -> list[str]:
    """The codec of each parameter.

    Raises:
        ValueError: a parameter matches no pattern, or a pattern no parameter.
    """
    if not isinstance(config.codec, Mapping):
        return [config.codec] * len(names)
    codecs, used = [], set()
    for name in names:
        pattern = next((pattern for pattern in config.codec if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is None:
            raise ValueError(f'codec: parameter {name!r} matches none of the patterns {list(config.codec)}; add "*"')
        used.add(pattern)
        codecs.append(config.codec[pattern])
    idle = [pattern for pattern in config.codec if pattern not in used]
    if idle:
        raise ValueError(f"codec: pattern {idle[0]!r} is the first to match for no parameter; the names are {_some(names)}")
    return codecs


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

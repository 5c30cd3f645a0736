"""What the tests of cases from the field share: both doors behind one interface, and what a codec may lose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.nn as nn
from ddp_cases import EXCHANGES
from reducer_cases import each_engine
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync.config import BLOCK_CODECS, CODECS

DOORS = ("ddp", "reducer")


def _marks(parameter: Any) -> list[Any]:
    marks = parameter.marks
    return list(marks) if isinstance(marks, (list, tuple, set, frozenset)) else [marks]


engines = pytest.mark.parametrize("backend", each_engine())
# Both at two ranks, the faster one at four, too, where there is time.
engines_and_worlds = pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        pytest.param(*engine.values, world_size, marks=[*_marks(engine), *([pytest.mark.slow] if world_size == 4 else [])])
        for engine in each_engine()
        for world_size in (2, 4)
        if (*engine.values, world_size) != ("reference", 4)
    ],
)

# Of the largest magnitude in a block, or of the number itself where there are no blocks: one rounding to nearest.
ONE_ROUNDING = {
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8_e4m3": 16 / 448,
    "fp8_e5m2": 4096 / 57344,
    "int8": 1 / 254,
    "int4": 0.0725,
}


def options_of(codec: str, **more: Any) -> dict[str, Any]:
    """Options under which `codec` serves every parameter, vectors too."""
    return {"codec": codec, **({"exempt": ()} if codec in BLOCK_CODECS else {}), **more}


def modes() -> Iterator[dict[str, Any]]:
    """Every codec under every exchange that it has."""
    for codec in CODECS:
        for exchange in EXCHANGES if codec not in BLOCK_CODECS else ("scatter_gather",):
            yield options_of(codec, exchange=exchange)


def feedback_modes() -> Iterator[dict[str, Any]]:
    """Every codec that loses something, with error feedback."""
    for codec in CODECS[1:]:
        yield options_of(codec, error_feedback=True)


class Door:
    """A module whose gradients gsync synchronises, through DDP or through `GradReducer`.

    Attributes:
        module: as given.
        model: what is called: the DDP instance, or the module.
        sync: what `gsync.register` returned, or the reducer.
        no_sync: context in which backward passes accumulate.
    """

    def __init__(
        self,
        kind: str,
        module: nn.Module,
        backend: str,
        process_group: Any = None,
        ddp: dict[str, Any] | None = None,
        bucket_mb: float | None = None,
        **options: Any,
    ) -> None:
        self.kind, self.module = kind, module
        self.model: Any
        self.sync: Any
        self.no_sync: Callable[[], contextlib.AbstractContextManager[None]]
        if kind == "ddp":
            size = {} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}
            self.model = DistributedDataParallel(module, process_group=process_group, **size, **(ddp or {}))
            self.sync = gsync.register(self.model, backend=backend, **options)
            self.no_sync = self.model.no_sync
        else:
            self.model = module
            self.sync = gsync.GradReducer(module, process_group=process_group, backend=backend, bucket_mb=bucket_mb, **options)
            self.no_sync = self.sync.no_sync

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def close(self) -> None:
        self.sync.close()


def every_door(make: Callable[[], nn.Module], backend: str, **options: Any) -> Iterator[Door]:
    """A new module behind each door; closed when the next one comes."""
    for kind in DOORS:
        door = Door(kind, make(), backend, **options)
        yield door
        door.close()

"""The options of the main job: what the flags say, in a form that travels to the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .rivals import DDP_RIVALS, EXCHANGES, GSYNC, REDUCER, SEVERAL_HOSTS, STOCK, Rival, make_rivals
from .workloads import Sizes, full_sizes

DIGITS_STEPS = 200  # enough to see the digits learnt
SYNTHETIC_STEPS = 40  # with fewer paired steps two identical models differ by more than 3 %


@dataclass(frozen=True)
class Options:
    """What to train, under which rivals, where, for how long.

    Attributes:
        model, sizes: see workloads.
        rivals: names of DDP_RIVALS, "gsync" or "reducer"; empty for all. Stock DDP, which the others are compared with, is always
            there.
        codecs, exchanges: of gsync; every combination is a rival. Empty for all that work together.
        fields: further fields of SyncConfig.
        bucket_cap_mb: bucket size in MiB, of DDP and of the reducer; None for their defaults.
        gradient_as_bucket_view: DDP's flag.
        steps: measured steps of each rival; None for the model's default.
        warmup: steps of each rival before that, not measured.
        seed: of weights, data and the order of rivals.
        threads: of each rank.
        device: "auto", "cpu" or "cuda".
        hosts, ranks_per_host: None: 1, and 2 or the number of GPUs.
        rate: of each host's link, in tc's notation; None for no limit.
        timeout_s: of collectives.
        json: file for the results; None for none.
        report: folder for a page of them; None for none.
        quiet: no progress, only the table.
        command: what was typed, for the record.
    """

    model: str = "digits-cnn"
    sizes: Sizes = field(default_factory=Sizes)
    rivals: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    steps: int | None = None
    warmup: int = 5
    seed: int = 0
    threads: int = 1
    device: str = "auto"
    hosts: int | None = None
    ranks_per_host: int | None = None
    rate: str | None = None
    timeout_s: float = 120.0
    json: str | None = None
    report: str | None = None
    quiet: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        full_sizes(self.model, self.sizes)
        for name in self.rivals:
            if name not in (*DDP_RIVALS, GSYNC, REDUCER):
                raise ValueError(f"--rival {name!r}: expected one of {', '.join((*DDP_RIVALS, GSYNC, REDUCER))}")
        if self.rivals and not {GSYNC, REDUCER} & {*self.rivals} and (self.codecs or self.exchanges or self.fields):
            given = "codec" if self.codecs else "exchange" if self.exchanges else next(iter(self.fields))
            raise ValueError(f"--{given.replace('_', '-')} acts on gsync only, but no --rival gsync is given")
        if "auto_codecs" in self.fields and "auto" not in self.codecs:
            raise ValueError("--auto-codecs acts with --codec auto, which is not given")
        for name, least in (("steps", 1), ("warmup", 2), ("threads", 1), ("hosts", 1), ("ranks_per_host", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
        for name in ("timeout_s", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected more than 0")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device {self.device}: expected auto, cpu or cuda")

    @property
    def num_steps(self) -> int:
        """Measured steps, the default filled in."""
        return self.steps or (DIGITS_STEPS if self.model.startswith("digits") else SYNTHETIC_STEPS)

    def make_rivals(self) -> list[Rival]:
        """Return the rivals in the order of the table.

        Raises:
            ValueError, TypeError: SyncConfig refuses the fields given.
        """
        names = (STOCK, *self.rivals) if self.rivals else (*DDP_RIVALS, GSYNC, REDUCER)
        several = (self.hosts or 1) > 1 and (self.ranks_per_host or 1) > 1
        return make_rivals(names, self.codecs, self.exchanges, self.fields, SEVERAL_HOSTS if several else EXCHANGES)

    def to_json(self) -> str:
        """Return the options as one line that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Options:
        """Return the options that `to_json` wrote."""
        values = json.loads(text)
        for name in ("rivals", "codecs", "exchanges"):
            values[name] = tuple(values[name])
        return Options(**{**values, "sizes": Sizes(**values["sizes"])})

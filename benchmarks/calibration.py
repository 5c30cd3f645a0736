"""What `gsync plan` needs to know of a machine, as measured: how fast it encodes, and its links. Each figure has its quartiles.

`gsync plan --calibrate FILE` measures (benchmarks/calibrate.py) and writes the file; `--calibration FILE` reads it. A prediction
is made three times: with the medians, with all figures at their faster quartile, and with all at their slower one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gsync.config import CODECS
from gsync.cost import Kernel, Link

from .timing import percentile

FORMAT = 1
FAST, MEDIAN, SLOW = "p25", "median", "p75"
LEVELS = (FAST, MEDIAN, SLOW)
OPERATIONS = ("pack", "pack_feedback", "unpack", "reduce_read", "reduce_write")
CASTS = ("fp16", "bf16")


@dataclass(frozen=True)
class Spread:
    """Quartiles of a time, or of a time per byte: the smaller the faster."""

    p25: float
    median: float
    p75: float

    def at(self, level: str) -> float:
        """The figure at FAST, MEDIAN or SLOW."""
        return float(getattr(self, level))


def spread_of(samples: Sequence[float], per: float = 1.0) -> Spread:
    """Return the quartiles of `samples`, over `per`."""
    return Spread(*(percentile(samples, share) / per for share in (0.25, 0.5, 0.75)))


def exactly(value: float) -> Spread:
    """Return a figure that was told, not measured: it has no spread."""
    return Spread(value, value, value)


@dataclass(frozen=True)
class LinkFigures:
    """A link: seconds per byte that a rank sends while all do, and seconds of a message.

    Attributes:
        byte_s, latency_s, message_s: see gsync.cost.Link; the first is 1 over its bandwidth.
        send_cpu_s: seconds of a core for each byte sent and received as messages.
        sum_cpu_s: the same under all_reduce, by codec.
    """

    byte_s: Spread
    latency_s: Spread
    message_s: Spread
    send_cpu_s: Spread
    sum_cpu_s: Mapping[str, Spread]

    def at(self, level: str) -> Link:
        """The link with its figures at FAST, MEDIAN or SLOW."""
        return Link(1.0 / self.byte_s.at(level), self.latency_s.at(level), self.message_s.at(level))


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        device: "cpu" or "cuda".
        ranks: that measured at the same time on each host.
        kernels: codec -> operation -> seconds per byte of fp32 gradients; "fixed" in seconds.
        copy: DDP's copies: seconds per byte; `copy_fixed` in seconds for each parameter.
        casts: codec -> "to" and "back": what torch's hooks do, seconds per byte.
        intra, inter: links; None where they were not measured.
        source: where it comes from, in words.
    """

    device: str
    ranks: int
    kernels: Mapping[str, Mapping[str, Spread]]
    copy: Spread
    copy_fixed: Spread
    casts: Mapping[str, Mapping[str, Spread]]
    intra: LinkFigures | None
    inter: LinkFigures | None
    source: str = ""

    def kernels_at(self, level: str, error_feedback: bool) -> dict[str, Kernel]:
        """The operations of every codec at FAST, MEDIAN or SLOW; with `error_feedback` pack keeps residuals."""
        pack = "pack_feedback" if error_feedback else "pack"
        return {
            codec: Kernel(
                figures[pack].at(level),
                figures["unpack"].at(level),
                figures["reduce_read"].at(level),
                figures["reduce_write"].at(level),
                figures["fixed"].at(level),
            )
            for codec, figures in self.kernels.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """In plain numbers, as it is written."""
        return {"gsync_calibration": FORMAT, **{name: value for name, value in asdict(self).items() if name != "source"}}


def read(path: str) -> Calibration:
    """Return what `gsync plan --calibrate` wrote.

    Raises:
        ValueError: the file cannot be read, or is none of these; the message names the first figure that is wrong.
    """
    where = f"--calibration {path}"
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: is no JSON: {error}") from None
    if not isinstance(content, dict) or "gsync_calibration" not in content:
        raise ValueError(f"{where}: is no calibration; gsync plan --calibrate {path} writes one")
    if content["gsync_calibration"] != FORMAT:
        raise ValueError(f"{where}: has format {content['gsync_calibration']!r}, expected {FORMAT}: calibrate again")
    reader = _Reader(where)
    device = content.get("device")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"{where}: device is {device!r}; expected cpu or cuda")
    kernels = reader.table(content, "kernels", CODECS, (*OPERATIONS, "fixed"))
    casts = reader.table(content, "casts", CASTS, ("to", "back"))
    machine = content.get("machine") or {}
    return Calibration(
        device,
        content["ranks"] if isinstance(content.get("ranks"), int) else 1,
        kernels,
        reader.spread(content, "copy"),
        reader.spread(content, "copy_fixed"),
        casts,
        reader.link(content, "intra"),
        reader.link(content, "inter"),
        f"{path}, measured {content.get('time', 'at an unknown time')} on {machine.get('processor', 'an unknown machine')}",
    )


class _Reader:
    """Reads figures, and says which one is wrong."""

    def __init__(self, where: str) -> None:
        self._where = where

    def spread(self, content: Mapping[str, Any], name: str, above: str = "") -> Spread:
        entry = content.get(name) if isinstance(content, Mapping) else None
        label = f"{above}{name}"
        if not isinstance(entry, dict):
            raise ValueError(f"{self._where}: {label} is missing; expected p25, median and p75")
        values = [float(value) for value in map(entry.get, LEVELS) if isinstance(value, (int, float))]
        if len(values) < len(LEVELS) or not values[0] >= 0:
            raise ValueError(f"{self._where}: {label} is {entry}; expected p25, median and p75, none below 0")
        if not values[0] <= values[1] <= values[2]:
            raise ValueError(f"{self._where}: {label} is {entry}; expected p25 <= median <= p75")
        return Spread(*values)

    def table(
        self, content: Mapping[str, Any], name: str, rows: Sequence[str], columns: Sequence[str]
    ) -> dict[str, dict[str, Spread]]:
        found = content.get(name)
        if not isinstance(found, dict):
            raise ValueError(f"{self._where}: {name} is missing; expected {', '.join(rows)}")
        return {row: {column: self.spread(found.get(row) or {}, column, f"{name}.{row}.") for column in columns} for row in rows}

    def link(self, content: Mapping[str, Any], name: str) -> LinkFigures | None:
        entry = content.get(name)
        if entry is None:
            return None
        if not isinstance(entry, dict):
            raise ValueError(f"{self._where}: {name} is {entry!r}; expected the figures of a link, or null")
        sums = entry.get("sum_cpu_s")
        byte_s = self.spread(entry, "byte_s", f"{name}.")
        if byte_s.p25 <= 0:
            raise ValueError(f"{self._where}: {name}.byte_s is 0; expected seconds per byte above 0")
        if not isinstance(sums, dict):
            raise ValueError(f"{self._where}: {name}.sum_cpu_s is missing")
        return LinkFigures(
            byte_s,
            self.spread(entry, "latency_s", f"{name}."),
            self.spread(entry, "message_s", f"{name}."),
            self.spread(entry, "send_cpu_s", f"{name}."),
            {codec: self.spread(sums, codec, f"{name}.sum_cpu_s.") for codec in ("fp32", *CASTS)},
        )

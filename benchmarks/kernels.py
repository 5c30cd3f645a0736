"""The operations alone: `gsync bench kernels`, or `python -m gsync.benchmarks.kernels`.

pack, reduce and unpack of one bucket under every backend, against a plain copy of the bucket and against what torch's own hooks
do with it: `bucket.to(bf16).div_(world_size)` before the exchange, `bucket.copy_(received)` after it. All take turns in shuffled
order. gsync's are called as its engine calls them, with the bucket's layout and the payload's memory made beforehand; "feedback"
adds a residual and keeps the new one, "measured" adds up what encoding loses. Before anything is timed, every backend's bytes are
compared with the reference's.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from gsync import machine
from gsync.layout import CODEC_KINDS

from . import report, timing
from .progress import Progress

CODECS = tuple(CODEC_KINDS)
BACKENDS = ("reference", "native", "triton")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MIB = 2**20
_CACHE_MIB = 512  # on a GPU work goes round buffers of this size, more than its cache holds
_WRONG_USE, _WRONG_RESULT = 2, 1  # exit codes


@dataclass
class Case:
    """One row: something that is done with a bucket.

    Attributes:
        family: heading in the table.
        name: row.
        num_bytes: read and written.
        work: index of the buffers -> None, does it once.
        stock: name of the stock case that does the same, "" for none.
        refused: why it cannot run here, "" if it can.
    """

    family: str
    name: str
    num_bytes: float
    work: Callable[[int], Any]
    stock: str = ""
    refused: str = ""
    wrong: str = ""
    ms: list[float] = field(default_factory=list)


class Bucket:
    """Gradients of one bucket as `segments` tensors in one buffer, several times over, and room for what is made of them."""

    def __init__(self, size_mb: float, segments: int, world_size: int, device: torch.device) -> None:
        self.numel = max(segments, int(size_mb * _MIB / 4))
        self.world_size = world_size
        self.copies = max(1, int(_CACHE_MIB / size_mb)) if device.type == "cuda" else 1
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self.numel, generator=generator).mul_(1e-2)
        self.buffers = [values.to(device, copy=True) for _ in range(self.copies)]
        self.other = torch.empty_like(self.buffers[0])
        sizes = [self.numel // segments + (1 if idx < self.numel % segments else 0) for idx in range(segments)]
        self.gradients = [list(buffer.split(sizes)) for buffer in self.buffers]
        self.sizes = sizes


def make_cases(bucket: Bucket, codecs: list[str], backends: list[str], explicit: bool) -> list[Case]:
    """Return all rows; a backend that cannot run here is refused, or raises if it was asked for by name (`explicit`)."""
    size = 4.0 * bucket.numel
    buffers, other = bucket.buffers, bucket.other
    cases = [Case("fp32 bucket", "copy", 2 * size, lambda idx: other.copy_(buffers[idx]))]
    for codec in codecs:
        if codec in _DTYPES:
            cases += _stock_cases(bucket, codec, size)
        for backend in backends:
            cases += _gsync_cases(bucket, codec, backend, size, explicit)
    return cases


def default_backends(device: torch.device) -> list[str]:
    """Return the backends that are measured unasked: Triton's interpreter on the CPU tells nothing about speed."""
    return [name for name in BACKENDS if name != "triton" or device.type == "cuda"]


def _stock_cases(bucket: Bucket, codec: str, size: float) -> list[Case]:
    dtype, world_size, buffers = _DTYPES[codec], bucket.world_size, bucket.buffers
    received = [buffer.to(dtype) for buffer in buffers]
    wire = float(received[0].nbytes)
    family = f"torch's {codec} hook"
    return [
        Case(family, "to().div_()", size + 3 * wire, lambda idx: buffers[idx].to(dtype).div_(world_size)),
        Case(family, "copy_", size + wire, lambda idx: bucket.other.copy_(received[idx])),
    ]


def _gsync_cases(bucket: Bucket, codec: str, backend: str, size: float, explicit: bool) -> list[Case]:
    family = f"gsync {codec}"
    stock = f"torch's {codec} hook" if codec in _DTYPES else ""
    try:
        reference = Encoded(bucket, codec, "reference")
        encoded = Encoded(bucket, codec, backend)
        wanted, found = reference.results(), encoded.results()
    except Exception as error:
        if explicit:
            raise
        reason = " ".join(str(error).split())
        names = ("pack", "pack, feedback", "pack, measured", "reduce", "unpack")
        return [Case(family, f"{name} {backend}", 0.0, lambda idx: None, refused=reason) for name in names]
    wire, chunk, world_size = encoded.payloads[0].numel(), encoded.chunk.numel(), bucket.world_size
    cases = [
        Case(family, f"pack {backend}", size + wire, encoded.pack, f"{stock} to().div_()" if stock else ""),
        Case(family, f"pack, feedback {backend}", 3 * size + wire, encoded.pack_with_feedback),
        Case(family, f"pack, measured {backend}", size + wire, encoded.pack_measured),
        Case(family, f"reduce {backend}", chunk * (world_size + 1), encoded.reduce),
        Case(family, f"unpack {backend}", size + wire, encoded.unpack, f"{stock} copy_" if stock else ""),
    ]
    for case, got, expected in zip(cases, found, wanted, strict=True):
        if not torch.equal(got, expected):
            case.wrong = "other bytes than the reference"
    return cases


class Encoded:
    """A bucket under one codec and backend, and the operations as an engine calls them: layout and memory are made once."""

    def __init__(self, bucket: Bucket, codec: str, backend: str) -> None:
        from gsync import backends, encoding, operators

        device, count, world_size = bucket.other.device, len(bucket.sizes), bucket.world_size
        self._kernels = backends.get(backend, device)
        codecs, names = [codec] * count, [str(idx) for idx in range(count)]
        self._whole = operators.layout_for(bucket.sizes, codecs, names, 1, 0)
        self._chunked = operators.layout_for(bucket.sizes, codecs, names, world_size, 0)
        self._gradients, self._scale = bucket.gradients, 1.0 / world_size
        self._unpacked = list(bucket.other.split(bucket.sizes))
        self._options = encoding.EncodeOptions(
            list(backends.empty_payload(4 * bucket.numel, device).view(torch.float32).zero_().split(bucket.sizes))
        )
        error_sums = torch.zeros(self._whole.python.num_tiles, len(encoding.ERROR_SUMS), dtype=torch.float64, device=device)
        self._measuring = encoding.EncodeOptions(error_sums=error_sums)
        num_bytes = int(self._whole.sizes.payload_bytes)
        self.payloads = [backends.empty_payload(num_bytes, device) for _ in bucket.gradients]
        self.carried = backends.empty_payload(num_bytes, device)
        self.chunk = backends.empty_payload(int(self._chunked.sizes.chunk_bytes), device)
        sent = backends.empty_payload(int(self._chunked.sizes.payload_bytes), device)
        self._kernels.pack(self._chunked, bucket.gradients[0], sent, self._scale)
        self._received = [sent[: self.chunk.numel()].clone() for _ in range(world_size)]
        self._partials = torch.empty(self._whole.sizes.num_partials, dtype=torch.float64, device=device)
        self._found_nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self._sums = torch.empty(count, dtype=torch.float64, device=device)

    def pack(self, idx: int) -> None:
        self._kernels.pack(self._whole, self._gradients[idx], self.payloads[idx], self._scale)

    def pack_with_feedback(self, idx: int) -> None:
        self._kernels.pack(self._whole, self._gradients[idx], self.carried, self._scale, None, self._options)

    def pack_measured(self, idx: int) -> None:
        self._kernels.pack(self._whole, self._gradients[idx], self.payloads[idx], self._scale, None, self._measuring)

    def reduce(self, idx: int) -> None:
        self._kernels.reduce(self._chunked, 0, self._received, self.chunk, self._scale)

    def unpack(self, idx: int) -> None:
        self._kernels.unpack(self._whole, self.payloads[idx], self._unpacked, self._partials, self._found_nonfinite, self._sums)

    def results(self) -> list[torch.Tensor]:
        """Do everything once, feedback twice; return the bytes written by each operation in the order of the table's rows."""
        for idx in range(len(self.payloads)):
            self.pack(idx)
        self.pack_with_feedback(0)
        self.pack_with_feedback(0)
        plain = self.payloads[0].clone()
        self.pack_measured(0)
        self.reduce(0)
        self.unpack(0)
        values = torch.cat([part.reshape(-1) for part in self._unpacked])
        return [plain, self.carried.clone(), self.payloads[0].clone(), self.chunk.clone(), values.view(torch.uint8)]


def measure(cases: list[Case], copies: int, repeats: int, device: torch.device, progress: Progress) -> None:
    """Fill in every case's times, after three rounds that are not counted."""
    racing = [case for case in cases if not case.refused and not case.wrong]
    warmup = 3
    for number, order in enumerate(timing.shuffled_rounds(len(racing), warmup + repeats, seed=0)):
        progress.phase("measuring", number, warmup + repeats)
        for position in order:
            took = _time(racing[position].work, number % copies, device)
            if number >= warmup:
                racing[position].ms.append(took)


def _time(work: Callable[[int], Any], idx: int, device: torch.device) -> float:
    """Milliseconds for doing `work` once, on a GPU between two events."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        work(idx)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    work(idx)
    return 1e3 * (time.perf_counter() - began)


def rows_of(cases: list[Case]) -> list[dict[str, Any]]:
    """Return one dictionary per case, as it is written to the file."""
    by_label = {f"{case.family} {case.name}": case for case in cases}
    copy = cases[0]
    rows = []
    for case in cases:
        row: dict[str, Any] = {"family": case.family, "name": case.name, "bytes": case.num_bytes}
        if case.refused or case.wrong:
            rows.append(row | ({"refused": case.refused} if case.refused else {"wrong": case.wrong}))
            continue
        summary = timing.summarize(case.ms)
        row |= {"ms": {**vars(summary), "samples": case.ms}, "gb_per_s": case.num_bytes / summary.median / 1e6}
        row["to_copy"] = vars(timing.summarize(timing.paired_ratios(case.ms, copy.ms)))
        if case.stock:
            row["to_stock"] = vars(timing.summarize(timing.paired_ratios(case.ms, by_label[case.stock].ms)))
        rows.append(row)
    return rows


def print_table(results: dict[str, Any]) -> None:
    """Print one row per case, and below what could not run."""
    out = report.console()
    out.print(f"[bold]{results['size_mb']:g} MiB of fp32 gradients[/bold] in {results['segments']} tensors")
    out.print(
        f"world size {results['world_size']}, {results['device']}, {results['threads']} threads, {results['repeats']} repeats\n"
    )
    grid = report.table(["", "ms", "p10", "p90", "GB/s", "to copy", "to stock"])
    family = ""
    notes: dict[str, int] = {}
    for row in results["rows"]:
        if row["family"] != family:
            family = row["family"]
            grid.add_row(f"[bold]{family}[/bold]")
        if "ms" not in row:
            notes.setdefault(row.get("refused") or f"{row['name']}: {row['wrong']}", len(notes) + 1)
            mark = notes[row.get("refused") or f"{row['name']}: {row['wrong']}"]
            grid.add_row(f" {row['name']} \\[{mark}]", "n/a" if "refused" in row else "[bold red]WRONG[/bold red]")
            continue
        cells = [report.number(row["ms"][name]) for name in ("median", "p10", "p90")]
        stock = f"{row['to_stock']['median']:.2f}" if "to_stock" in row else ""
        grid.add_row(f" {row['name']}", *cells, report.number(row["gb_per_s"]), f"{row['to_copy']['median']:.2f}", stock)
    out.print(grid)
    for text, mark in notes.items():
        out.print(f"[{mark}] {text}", markup=False)
    out.print("\nGB/s: bytes read and written per second. to copy: time over that of copying the")
    out.print("bucket, paired in each round; to stock: over what torch's hook does instead.")


def kernels(
    size_mb: Annotated[float, typer.Option(help="MiB of fp32 gradients.")] = 25.0,
    segments: Annotated[int, typer.Option(help="Tensors that they lie in.")] = 16,
    world_size: Annotated[int, typer.Option(help="Ranks whose payloads are reduced.")] = 2,
    codec: Annotated[list[str] | None, typer.Option(help="May be repeated; all if left out.", show_default=False)] = None,
    backend: Annotated[list[str] | None, typer.Option(help="May be repeated; all if left out.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads on the CPU.")] = 1,
    repeats: Annotated[int, typer.Option(help="Times that each is measured.")] = 40,
    json: Annotated[str | None, typer.Option(help="File for all samples.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option(help="Print the table only.")] = False,
) -> None:
    """Time pack, reduce and unpack alone, in GB/s, against a plain copy and torch's own hooks."""
    try:
        if json:
            report.check_file(json)
        results = _run(size_mb, segments, world_size, codec, backend, device, threads, repeats, quiet)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"gsync bench kernels: {error}", file=sys.stderr)
        raise typer.Exit(_WRONG_USE) from None
    print_table(results)
    if not report.save(results, json, "gsync bench kernels"):
        raise typer.Exit(_WRONG_USE)
    raise typer.Exit(_WRONG_RESULT if any("wrong" in row for row in results["rows"]) else 0)


def _run(size_mb: float, segments: int, world_size: int, codec: list[str] | None, backend: list[str] | None, device: str,
         threads: int, repeats: int, quiet: bool) -> dict[str, Any]:  # fmt: skip
    for name, value in (("size-mb", size_mb), ("segments", segments), ("world-size", world_size), ("threads", threads),
                        ("repeats", repeats)):  # fmt: skip
        if value <= 0:
            raise ValueError(f"--{name} {value}: expected more than 0")
    for name, given, known in (
        ("codec", codec, CODECS),
        ("backend", backend, BACKENDS),
        ("device", [device], ("auto", "cpu", "cuda")),
    ):
        for word in given or ():
            if word not in known:
                raise ValueError(f"--{name} {word}: expected one of {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here (gsync doctor says more)")
    place = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
    torch.set_num_threads(threads)
    with Progress(not quiet) as progress:
        bucket = Bucket(size_mb, segments, world_size, place)
        cases = make_cases(bucket, codec or list(CODECS), backend or default_backends(place), explicit=bool(backend))
        measure(cases, bucket.copies, repeats, place, progress)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    return {"command": shlex.join(["gsync", *sys.argv[1:]]), **machine.circumstances(), "size_mb": size_mb, "segments": segments,
            "world_size": world_size, "device": name, "threads": threads, "repeats": repeats, "rows": rows_of(cases)}  # fmt: skip


if __name__ == "__main__":
    typer.run(kernels)

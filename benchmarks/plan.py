"""Predicts step time, exposed time, bytes and memory without a cluster: `gsync plan`, or `python -m gsync.benchmarks.plan`.

    gsync plan --model transformer --step-ms 250 --world-size 64 --ranks-per-host 8 \\
        --inter-rate 100gbit --inter-latency-us 20 --intra-gb-per-s 50 --intra-latency-us 5
    gsync plan --calibrate here.json        measure this machine; under torchrun or srun also the links between the hosts
    gsync plan --validate bench.json        predict what gsync bench --json has measured, and compare

How it predicts, and what it leaves out: docs/tuning.md.
"""

from __future__ import annotations

import fnmatch
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gsync import cost, machine
from gsync.config import BLOCK_CODECS, CODECS, PLAIN_CODECS
from gsync.schedule import Training

from . import calibrate as measuring
from . import calibration as calibrations
from . import network, plan_report, planner, ready, report, scaling, shapes, validate
from .calibration import Calibration
from .workloads import MODELS, Sizes

WRONG_USE = 2
_MODEL, _STEP, _PLACE, _GSYNC, _FILES = (
    "Model",
    "Step without communication",
    "Ranks and links",
    "gsync (see SyncConfig)",
    "Files",
)
_BACKWARD_SHARE = 2.0 / 3.0
_BLOCK_SIZES = tuple(2**power for power in range(5, 13))
_MODEL_HELP = f"One of {', '.join(MODELS)}; a JSON file of shapes; or module:callable that returns a torch module."


@dataclass(frozen=True)
class Options:
    """What was asked for; see the flags of the same names.

    Raises:
        ValueError: a value is out of range, or does not go with another.
    """

    model: str
    step_ms: float
    world_size: int
    ranks_per_host: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    backward_share: float | None = None
    timeline: str | None = None
    inter_rate: str | None = None
    inter_latency_us: float | None = None
    intra_gb_per_s: float | None = None
    intra_latency_us: float | None = None
    message_us: float | None = None
    device: str = "auto"
    threads: int = 1
    cores_per_rank: float | None = None
    codecs: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    buckets_mb: tuple[float, ...] = ()
    slice_mb: float = 25.0
    block_size: int | None = None
    error_feedback: bool = False
    exempt: tuple[str, ...] | None = None
    exempt_codec: str = "bf16"
    door: str = planner.GSYNC

    def __post_init__(self) -> None:
        cost.Topology(self.world_size, self.ranks_per_host)
        for name in ("step_ms", "slice_mb", "intra_gb_per_s", "cores_per_rank"):
            self._check(name, lambda value: value > 0, "more than 0")
        for name in ("inter_latency_us", "intra_latency_us", "message_us"):
            self._check(name, lambda value: value >= 0, "0 or more")
        self._check("backward_share", lambda value: 0 < value <= 1, "more than 0, at most 1")
        self._check("threads", lambda value: value >= 1, "at least 1")
        self._check("block_size", lambda value: value in _BLOCK_SIZES, "a power of two from 32 to 4096")
        for size in self.buckets_mb:
            if not size > 0:
                raise ValueError(f"--bucket-mb {size}: expected more than 0")
        words = (
            ("device", (self.device,), ("auto", "cpu", "cuda")),
            ("codec", self.codecs, CODECS),
            ("exchange", self.exchanges, cost.EXCHANGES),
            ("exempt-codec", (self.exempt_codec,), PLAIN_CODECS),
            ("door", (self.door,), (planner.GSYNC, planner.REDUCER)),
        )
        for name, given, known in words:
            for word in given:
                if word not in known:
                    raise ValueError(f"--{name} {word}: expected one of {', '.join(known)}")
        if self.codecs and not set(self.codecs) & set(BLOCK_CODECS):
            for name, value in (("block-size", self.block_size), ("exempt", self.exempt)):
                if value is not None:
                    raise ValueError(f"--{name} acts on block codecs, and {', '.join(self.codecs)} is none")
        if self.backward_share is not None and self.timeline is not None:
            raise ValueError("--backward-share and --timeline both say when gradients are ready: give one of them")

    def _check(self, name: str, holds: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected {expected}")

    @property
    def topology(self) -> cost.Topology:
        """Who is where."""
        return cost.Topology(self.world_size, self.ranks_per_host)


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def plan(
    model: Annotated[str | None, _option(_MODEL, _MODEL_HELP)] = None,
    layers: Annotated[int | None, _option(_MODEL, "Layers, of a model of gsync bench.")] = None,
    width: Annotated[int | None, _option(_MODEL, "Features of a layer.")] = None,
    sequence: Annotated[int | None, _option(_MODEL, "Tokens per sample (transformer).")] = None,
    heads: Annotated[int | None, _option(_MODEL, "Attention heads (transformer).")] = None,
    vocabulary: Annotated[int | None, _option(_MODEL, "Distinct tokens (transformer).")] = None,
    step_ms: Annotated[float | None, _option(_STEP, "A step of one rank alone, in ms.")] = None,
    backward_share: Annotated[
        float | None,
        _option(_STEP, "Share of it that is backward; 2/3 if left out: two products of matrices for each of forward."),
    ] = None,
    timeline: Annotated[
        str | None,
        _option(
            _STEP, "File of sync.trace: how long backward takes and when gradients are ready. Else in proportion to their bytes."
        ),
    ] = None,
    world_size: Annotated[int | None, _option(_PLACE, "Ranks.")] = None,
    ranks_per_host: Annotated[int, _option(_PLACE, "Ranks on each host; 1 if left out.")] = 1,
    hosts: Annotated[
        int | None, _option(_PLACE, "With --calibrate: network namespaces to measure between (root, iproute2).")
    ] = None,
    inter_rate: Annotated[
        str | None, _option(_PLACE, "Of a host's link each way, as iperf3 shows it, for example 25gbit.")
    ] = None,
    inter_latency_us: Annotated[float | None, _option(_PLACE, "Of a message between hosts.")] = None,
    intra_gb_per_s: Annotated[float | None, _option(_PLACE, "10^9 bytes/s that a rank sends inside its host.")] = None,
    intra_latency_us: Annotated[float | None, _option(_PLACE, "Of a message inside a host.")] = None,
    message_us: Annotated[
        float | None,
        _option(_PLACE, "What each further message costs, of several sent at once; if left out and not measured its latency."),
    ] = None,
    device: Annotated[str, _option(_PLACE, "auto (a GPU, if one is here), cpu or cuda.")] = "auto",
    threads: Annotated[int, _option(_PLACE, "Cores that a rank computes with on CPUs; 1 if left out.")] = 1,
    cores_per_rank: Annotated[
        float | None, _option(_PLACE, "Cores that a rank has on CPUs; this machine's over --ranks-per-host if left out.")
    ] = None,
    codec: Annotated[list[str] | None, _option(_GSYNC, "May be repeated; all if left out.")] = None,
    exchange: Annotated[list[str] | None, _option(_GSYNC, "May be repeated; all if left out.")] = None,
    bucket_mb: Annotated[
        list[float] | None, _option(_GSYNC, "MiB, of DDP and gsync; may be repeated; DDP's if left out: 1, then 25.")
    ] = None,
    slice_mb: Annotated[float, _option(_GSYNC, "MiB that the engine moves at a time; 25 if left out.")] = 25.0,
    block_size: Annotated[int | None, _option(_GSYNC, "Elements that share one scale.")] = None,
    error_feedback: Annotated[bool, _option(_GSYNC, "Keep residuals.")] = False,
    exempt: Annotated[list[str] | None, _option(_GSYNC, "Name pattern kept out of a block codec; may be repeated.")] = None,
    exempt_codec: Annotated[str, _option(_GSYNC, "Codec of exempt parameters; bf16 if left out.")] = "bf16",
    door: Annotated[
        str, _option(_GSYNC, "gsync: through DDP's hook; reducer: GradReducer, without DDP's copies.")
    ] = planner.GSYNC,
    calibration: Annotated[
        str | None,
        _option(_FILES, "What --calibrate wrote. Without it operations are measured now, and links are those of the flags."),
    ] = None,
    calibrate: Annotated[
        str | None,
        _option(
            _FILES,
            "Measure into a file, and end: --ranks-per-host ranks here, at least two, or those that torchrun or srun started.",
        ),
    ] = None,
    validation: Annotated[
        str | None, _option(_FILES, "Of gsync bench --json: predict each row, compare, and end.", "--validate")
    ] = None,
    json: Annotated[str | None, _option(_FILES, "File for all predictions.")] = None,
    plot: Annotated[
        str | None, _option(_FILES, "File (.svg, .png, .pdf) for a picture: efficiency from 1 to 4096 ranks.")
    ] = None,
    top: Annotated[int, _option(_FILES, "Rows of the table; 15 if left out.")] = 15,
) -> None:
    """Predict step time, exposed time, bytes and memory for every codec, exchange and bucket size.

    Nothing is trained. How it predicts, and what it leaves out: docs/tuning.md.
    """
    try:
        _check_files(calibrate, validation, json, plot, top)
        if calibrate is not None:
            measuring.calibrate(calibrate, _device(device), threads, ranks_per_host, hosts)
            raise typer.Exit(0)
        if hosts is not None:
            raise ValueError(f"--hosts {hosts} acts with --calibrate; a plan has --world-size and --ranks-per-host")
        if validation is not None:
            if cores_per_rank is not None and not cores_per_rank > 0:
                raise ValueError(f"--cores-per-rank {cores_per_rank}: expected more than 0")
            raise typer.Exit(validate.run(validation, calibration, json, cores_per_rank))
        options = Options(
            model=_required("model", model),
            step_ms=_required("step-ms", step_ms),
            world_size=_required("world-size", world_size),
            ranks_per_host=ranks_per_host,
            sizes=Sizes(layers, width, None, sequence, heads, vocabulary),
            backward_share=backward_share,
            timeline=timeline,
            inter_rate=inter_rate,
            inter_latency_us=inter_latency_us,
            intra_gb_per_s=intra_gb_per_s,
            intra_latency_us=intra_latency_us,
            message_us=message_us,
            device=device,
            threads=threads,
            cores_per_rank=cores_per_rank,
            codecs=tuple(codec or ()),
            exchanges=tuple(exchange or ()),
            buckets_mb=tuple(bucket_mb or ()),
            slice_mb=slice_mb,
            block_size=block_size,
            error_feedback=error_feedback,
            exempt=tuple(exempt) if exempt else None,
            exempt_codec=exempt_codec,
            door=door,
        )
        code = _run(options, calibration, json, plot, top)
    except (ValueError, TypeError, ModuleNotFoundError, RuntimeError, OSError) as error:
        if isinstance(error, (typer.Exit, typer.Abort)):
            raise
        print(f"gsync plan: {error}", file=sys.stderr)
        raise typer.Exit(WRONG_USE) from None
    raise typer.Exit(code)


def predict(options: Options, calibration: Calibration) -> dict[str, Any]:
    """Return the predictions, as they are written: the rows in the order of their step times, and what they rest on.

    Raises:
        ValueError: something is missing or wrong; the message says what.
    """
    made = make_planner(options, calibration)
    topology = options.topology
    choices = planner.choices(options.codecs, options.exchanges, options.buckets_mb or (None,), topology, made, options.door)
    rows = [made.predict(choice, topology) for choice in choices]
    stock = min(row["step_ms"]["median"] for row in rows if row["name"] == planner.STOCK)
    for row in rows:
        row["ratio"] = row["step_ms"]["median"] / stock
    rows.sort(key=lambda row: row["step_ms"]["median"])
    link = made.networks[calibrations.MEDIAN]
    return {
        "command": shlex.join(["gsync", *sys.argv[1:]]),
        **machine.circumstances(),
        "model": options.model,
        "parameters": sum(param.numel for param in made.parameters),
        "world_size": options.world_size,
        "ranks_per_host": options.ranks_per_host,
        "device": calibration.device,
        "step_ms": options.step_ms,
        "backward_ms": 1e3 * made.settings.training.backward_s,
        "cores_per_rank": made.settings.training.cores,
        "links": {"inter": vars(link.inter), "intra": vars(link.intra)},
        "calibration": calibration.source,
        "rows": rows,
    }


def make_planner(options: Options, calibration: Calibration) -> planner.Planner:
    """Return what predicts, with everything read that the flags name."""
    if options.device != "auto" and options.device != calibration.device:
        raise ValueError(f"--device {options.device}: the calibration is of {calibration.device}; calibrate on such a machine")
    _, parameters = shapes.read_model(options.model, options.sizes)
    for pattern in options.exempt or ():
        if not any(fnmatch.fnmatchcase(param.name, pattern) for param in parameters):
            raise ValueError(f"--exempt {pattern}: matches no parameter; the first is {parameters[0].name}")
    share: float = options.backward_share or _BACKWARD_SHARE
    curve: ready.Curve = ready.in_proportion
    if options.timeline is not None:
        traced_mb = options.buckets_mb[0] if options.buckets_mb else None
        share, curve = ready.read(options.timeline, options.step_ms, parameters, traced_mb)
    cores = 0.0
    if calibration.device == "cpu":
        cores = options.cores_per_rank or max(1.0, machine.machine()["cores"] / options.ranks_per_host)
    elif options.cores_per_rank is not None:
        raise ValueError(f"--cores-per-rank {options.cores_per_rank} acts on CPUs only, and this plan is of GPUs")
    step_s = 1e-3 * options.step_ms
    training = Training(step_s * (1 - share), step_s * share, 0.0, min(options.threads, cores or options.threads), cores)
    settings = planner.Settings(
        training,
        curve,
        options.slice_mb,
        options.block_size,
        options.error_feedback,
        options.exempt,
        options.exempt_codec,
    )
    return planner.Planner(parameters, settings, calibration, _links(options, calibration))


def _links(options: Options, calibration: Calibration) -> Callable[[str], cost.Network]:
    """Flags before what was measured."""
    topology = options.topology
    rate = None if options.inter_rate is None else _inter_bytes(options.inter_rate)
    bandwidth = None if options.intra_gb_per_s is None else 1e9 * options.intra_gb_per_s
    inter = planner.Told(rate, options.inter_latency_us, options.message_us)
    intra = planner.Told(bandwidth, options.intra_latency_us, options.message_us)
    needed = ((topology.hosts > 1, inter, calibration.inter, ("--inter-rate", "--inter-latency-us")),
              (topology.ranks_per_host > 1, intra, calibration.intra, ("--intra-gb-per-s", "--intra-latency-us")))  # fmt: skip
    for acts, told, measured, flags in needed:
        for missing, flag in ((told.bytes_per_s is None, flags[0]), (told.latency_us is None, flags[1])):
            if acts and missing and measured is None:
                raise ValueError(f"{flag} is missing: this link was not measured (--calibrate under torchrun measures it)")
    links = {"inter": planner.link_of(inter, calibration.inter), "intra": planner.link_of(intra, calibration.intra)}
    return planner.combine(calibration, topology, **links)


def _inter_bytes(rate: str) -> float:
    try:
        return network.parse_rate(rate) / 8
    except ValueError as error:
        raise ValueError(str(error).replace("--rate", "--inter-rate")) from None


def _run(options: Options, calibration_path: str | None, json_path: str | None, plot_path: str | None, top: int) -> int:
    known = calibrations.read(calibration_path) if calibration_path else None
    if known is None:
        shapes.read_model(options.model, options.sizes)  # what is wrong with it shows before seconds of measurement
        _links(options, _unmeasured(_device(options.device)))
        torch.set_num_threads(options.threads)
        known = measuring.here(_device(options.device))
    results = predict(options, known)
    plan_report.print_table(results, top)
    if plot_path:
        curves = scaling.curves(make_planner(options, known), results["rows"], options.ranks_per_host, options.step_ms)
        scaling.draw(curves, results, plot_path)
    return 0 if report.save(results, json_path, "gsync plan") else WRONG_USE


def _unmeasured(device: str) -> Calibration:
    """Stands for a calibration without links where only flags are looked at."""
    nothing = calibrations.exactly(0.0)
    return Calibration(device, 1, {}, nothing, nothing, {}, None, None)


def _device(device: str) -> str:
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch finds no GPU here to measure; give --calibration FILE from a machine that has one")
    return "cuda" if has_gpu and device == "auto" else "cpu" if device == "auto" else device


def _required(name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"--{name} is missing (gsync plan --help)")
    return value


def _check_files(calibrate: str | None, validation: str | None, json: str | None, plot: str | None, top: int) -> None:
    if top < 1:
        raise ValueError(f"--top {top}: expected at least 1")
    if calibrate is not None and validation is not None:
        raise ValueError("--calibrate and --validate are two different things to do: give one of them")
    for flag, path in (("--calibrate", calibrate), ("--json", json), ("--plot", plot)):
        if path is None:
            continue
        try:
            report.check_file(path)
        except ValueError as error:
            raise ValueError(str(error).replace("--json", flag, 1)) from None
    if plot is not None:
        scaling.check(Path(plot))


if __name__ == "__main__":
    typer.run(plan)

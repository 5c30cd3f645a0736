"""The main job's command line: `gsync bench`, or `python -m gsync.benchmarks.ddp`.

Alone it starts the ranks itself, on this machine; started by torchrun or srun it is one of them.

    gsync bench                                                              two ranks, handwritten digits
    gsync bench --model mlp --layers 6 --width 2048 --hosts 2 --rate 1gbit   a slow network (root, iproute2)
    torchrun --nnodes 2 --nproc-per-node 8 ... -m gsync.benchmarks.ddp       a cluster
"""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from gsync.launch import Place, find_place

from .options import DIGITS_STEPS, SYNTHETIC_STEPS, Options
from .rivals import DDP_RIVALS
from .workloads import MODELS, Sizes

WRONG_USE = 2  # exit code
INTERRUPTED = 130

_MODEL, _RIVALS, _GSYNC, _DDP, _RUN, _PLACE = "Model", "Rivals", "gsync (see SyncConfig)", "DDP", "Measurement", "Ranks"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def bench(
    context: typer.Context,
    model: Annotated[str, _option(_MODEL, f"What to train: {', '.join(MODELS)}.")] = "digits-cnn",
    layers: Annotated[int | None, _option(_MODEL, "Layers.")] = None,
    width: Annotated[int | None, _option(_MODEL, "Features of a layer.")] = None,
    batch: Annotated[int | None, _option(_MODEL, "Samples per rank and step.")] = None,
    sequence: Annotated[int | None, _option(_MODEL, "Tokens per sample (transformer).")] = None,
    heads: Annotated[int | None, _option(_MODEL, "Attention heads (transformer).")] = None,
    vocabulary: Annotated[int | None, _option(_MODEL, "Distinct tokens (transformer).")] = None,
    rival: Annotated[
        list[str] | None,
        _option(_RIVALS, f"Of {', '.join(DDP_RIVALS)}, gsync, reducer; may be repeated. All if left out; always with stock."),
    ] = None,
    codec: Annotated[list[str] | None, _option(_GSYNC, "May be repeated; all but auto if left out.")] = None,
    auto_codecs: Annotated[list[str] | None, _option(_GSYNC, "Codecs for auto; may be repeated. fp32, bf16 if left out.")] = None,
    exchange: Annotated[list[str] | None, _option(_GSYNC, "May be repeated; all if left out.")] = None,
    average: Annotated[bool | None, typer.Option(hidden=True)] = None,
    block_size: Annotated[int | None, _option(_GSYNC, "Elements that share one scale.")] = None,
    rounding: Annotated[str | None, _option(_GSYNC, "nearest or stochastic.")] = None,
    error_feedback: Annotated[bool | None, _option(_GSYNC, "Send what encoding lost with the next step.")] = None,
    exempt: Annotated[list[str] | None, _option(_GSYNC, "Name pattern kept out of a block codec; may be repeated.")] = None,
    exempt_codec: Annotated[str | None, _option(_GSYNC, "Codec of exempt parameters.")] = None,
    start_step: Annotated[int | None, _option(_GSYNC, "First step that uses a block codec.")] = None,
    measure_every: Annotated[int | None, _option(_GSYNC, "Every how many steps to add up what encoding loses.")] = None,
    slice_mb: Annotated[float | None, _option(_GSYNC, "MiB that the engine moves at a time.")] = None,
    backend: Annotated[str | None, _option(_GSYNC, "auto, native, triton or reference.")] = None,
    transport: Annotated[str | None, _option(_GSYNC, "auto, nccl or process_group.")] = None,
    stream_priority: Annotated[int | None, _option(_GSYNC, "Priority of gsync's CUDA stream.")] = None,
    nccl_min_ctas: Annotated[int | None, _option(_GSYNC, "Fewest thread blocks NCCL uses.")] = None,
    nccl_max_ctas: Annotated[int | None, _option(_GSYNC, "Most thread blocks NCCL uses.")] = None,
    timeout_s: Annotated[float, _option(_RUN, "Seconds after which a collective counts as failed; 120 if left out.")] = 120.0,
    bucket_cap_mb: Annotated[float | None, _option(_DDP, "Bucket size in MiB, of DDP and the reducer, for every rival.")] = None,
    gradient_as_bucket_view: Annotated[bool, _option(_DDP, "DDP's flag, for every rival.")] = False,
    steps: Annotated[
        int | None, _option(_RUN, f"Measured steps of each rival; {DIGITS_STEPS} (digits) or {SYNTHETIC_STEPS} if left out.")
    ] = None,
    warmup: Annotated[int, _option(_RUN, "Steps of each rival before that; 5 if left out.")] = 5,
    seed: Annotated[int, _option(_RUN, "Of weights, data and the order of rivals; 0 if left out.")] = 0,
    threads: Annotated[int, _option(_PLACE, "Threads of each rank; 1 if left out.")] = 1,
    device: Annotated[str, _option(_PLACE, "auto, cpu or cuda.")] = "auto",
    hosts: Annotated[int | None, _option(_PLACE, "Network namespaces to spread the ranks over (root, iproute2).")] = None,
    ranks_per_host: Annotated[int | None, _option(_PLACE, "2, or all GPUs, or 1 with --hosts, if left out.")] = None,
    rate: Annotated[str | None, _option(_PLACE, "Of each host's link each way, for example 1gbit.")] = None,
    json: Annotated[str | None, _option(_RUN, "File for all samples, machine, versions, commit.")] = None,
    report: Annotated[str | None, _option(_RUN, "Folder for the results as one page of HTML, with pictures.")] = None,
    quiet: Annotated[bool, _option(_RUN, "Print the table only.")] = False,
) -> None:
    """Train one model under stock DDP, torch's hooks and gsync, side by side, and print what each step costs.

    Results are checked before anything is timed. How to read the table: docs/tuning.md.
    """
    if context.invoked_subcommand is not None:
        return
    fields = {
        "auto_codecs": auto_codecs or None,
        "average": average,
        "block_size": block_size,
        "rounding": rounding,
        "error_feedback": error_feedback,
        "exempt": exempt or None,
        "exempt_codec": exempt_codec,
        "start_step": start_step,
        "measure_every": measure_every,
        "slice_mb": slice_mb,
        "backend": backend,
        "transport": transport,
        "stream_priority": stream_priority,
        "nccl_min_ctas": nccl_min_ctas,
        "nccl_max_ctas": nccl_max_ctas,
    }
    place = None
    try:
        place = find_place()
        options = Options(
            model=model,
            sizes=Sizes(layers, width, batch, sequence, heads, vocabulary),
            rivals=tuple(rival or ()),
            codecs=tuple(codec or ()),
            exchanges=tuple(exchange or ()),
            fields={name: value for name, value in fields.items() if value is not None},
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            steps=steps,
            warmup=warmup,
            seed=seed,
            threads=threads,
            device=device,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            rate=rate,
            timeout_s=timeout_s,
            json=json,
            report=report,
            quiet=quiet,
            command=shlex.join(["gsync", "bench", *sys.argv[sys.argv.index("bench") + 1 :]])
            if "bench" in sys.argv
            else shlex.join(["python", "-m", "gsync.benchmarks.ddp", *sys.argv[1:]]),
        )
        code = _run(options, place)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        _complain(error, place)
        code = WRONG_USE
    except KeyboardInterrupt:
        _complain("interrupted", place)
        code = INTERRUPTED
    raise typer.Exit(code)


def _run(options: Options, place: Place | None) -> int:
    """Checks what can be checked before any rank starts, then starts the ranks or is one."""
    from . import launch, network, page, report
    from .worker import run_rank
    from .workloads import make_workload

    options.make_rivals()
    if place is None or place.rank == 0:  # which writes them
        if options.json:
            report.check_file(options.json)
        if options.report:
            page.check(options.report)
    make_workload(options.model, options.sizes, options.seed)
    if options.device == "cuda" and not launch.uses_cuda("auto"):
        raise ValueError("--device cuda: torch finds no GPU here (gsync doctor says more)")
    if place is not None:
        for name in ("hosts", "ranks_per_host", "rate"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} cannot act under {place.launcher}, which has placed the ranks already"
                )
        return run_rank(options, place, launch.store_is_there())
    if options.rate is not None:
        network.parse_rate(options.rate)
        if (options.hosts or 1) < 2:
            raise ValueError(f"--rate {options.rate} needs --hosts 2 or more: it is the rate of the links between hosts")
    try:
        return launch.run_locally(options)
    except network.NetworkError as error:
        raise ValueError(f"--hosts {options.hosts}: {error}") from error
    except launch.StopRequestError as error:
        _complain(f"ended by {error}", None)
        return INTERRUPTED


def _complain(problem: object, place: Place | None) -> None:
    """Says on standard error what is wrong; of several ranks only the first speaks."""
    if place is None or place.rank == 0:
        print(f"gsync bench: {problem}", file=sys.stderr)


def make_app() -> typer.Typer:
    """Return the command line `bench` with its commands `kernels`, `reducer`, `error`, `convergence` and `grid`."""
    from . import convergence, error, grid, kernels, reducer

    app = typer.Typer(add_completion=False, invoke_without_command=True, no_args_is_help=False)
    app.callback(invoke_without_command=True)(bench)
    app.command("kernels")(kernels.kernels)
    app.command("reducer")(reducer.reducer)
    app.command("error")(error.error)
    app.command("convergence")(convergence.convergence)
    app.command("grid")(grid.grid)
    return app


if __name__ == "__main__":
    make_app()(prog_name="gsync bench")

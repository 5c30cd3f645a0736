"""The command `gsync`: `gsync bench` with `kernels`, `reducer`, `error` and `convergence` below it, `gsync plan`, `gsync doctor`.

The core of gsync does without what this needs (typer, rich): without them it says how to get them.
"""

from __future__ import annotations

import importlib
import sys

_EXTRA = "pip install --no-build-isolation '.[bench]' in gsync's source folder"


def main() -> None:
    """Run the command line and exit."""
    try:
        import rich as _rich  # noqa: F401
        import typer
    except ModuleNotFoundError as error:
        print(f"gsync: the command line needs {error.name}: {_EXTRA}\n(python -m gsync.doctor works without)", file=sys.stderr)
        sys.exit(2)
    ddp = importlib.import_module("gsync.benchmarks.ddp")  # the folder benchmarks/ of the source tree

    plan = importlib.import_module("gsync.benchmarks.plan")

    app = typer.Typer(
        add_completion=True,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Gradient synchronisation for data-parallel training in PyTorch.",
    )
    app.add_typer(ddp.make_app(), name="bench")
    app.command("plan")(plan.plan)

    @app.command()
    def doctor(
        json: str = typer.Option("", help="File for everything the report is made of.", show_default=False),
        measure: bool | None = typer.Option(
            None,
            "--measure/--no-measure",
            help="Measure between the ranks for ten seconds and say what to try. Alone: between two ranks on this machine.",
            show_default=False,
        ),
    ) -> None:
        """Say what gsync finds here and what it would use; under torchrun or srun compare the ranks and give advice."""
        from . import doctor as examination

        raise typer.Exit(examination.run(json or None, measure))

    app(prog_name="gsync")


if __name__ == "__main__":
    main()

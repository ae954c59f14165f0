"""Command `rlhfspec`. Only commands that generate import torch."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated

import typer

from rlhfspec.cli.beside import WithCommandsBeside
from rlhfspec.cli.commands import (
    chat,
    compare,
    dashboard,
    drafter,
    explain_moves,
    export,
    job,
    plan,
    run,
    serve,
    tiny,
    top,
    trace,
)

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # StatusLine shows progress instead

app = typer.Typer(
    cls=WithCommandsBeside,
    help="RLHF post-training with lossless tree speculation that adapts its strategy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(tiny.app, name="tiny")
app.add_typer(drafter.app, name="drafter")
job.register(app)
app.command()(plan.plan)
app.command()(run.run)
app.command()(compare.compare)
app.command()(export.export)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(top.top)
app.command()(dashboard.dashboard)
app.command()(trace.trace)
app.command()(explain_moves.explain_moves)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlhfspec {version('rlhfspec')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Every command explains itself with --help."""

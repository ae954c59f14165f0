from __future__ import annotations

from typing import Annotated

import typer

from rlhfspec.cli.progress import StatusLine

app = typer.Typer(help="Small models, made on this machine and cached.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Small models, made on this machine and cached."""


@app.command()
def make(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models: draft, library, library-draft, library-wide, sums, sums-draft, target, wide.  [default: all]"
        ),
    ] = None,
) -> None:
    """Make missing models and print all folders. The first time takes six minutes."""
    import torch

    from rlhfspec.tiny.models import ensure
    from rlhfspec.tiny.recipe import RECIPES

    wanted = names or list(RECIPES)
    unknown = [name for name in wanted if name not in RECIPES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(RECIPES)}")
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    with StatusLine() as status:
        models = ensure(*wanted, report=status)
    for name in wanted:
        typer.echo(f"{name:12}{getattr(models, name.replace('-', '_'))}")

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.errors import InvalidRequest

_DASHBOARD_HOST = "127.0.0.1"

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free port.")]


def dashboard(runs: Runs, port: Port = 8000) -> None:
    """Show finished and running runs in a browser: curves, generators, moves and samples. Ctrl-C ends it."""
    with exit_on_problems():
        for run in runs:
            if not run.is_dir():
                raise InvalidRequest("RUN", str(run), "is not a folder")
        try:
            from rlhfspec.common.web import serve
            from rlhfspec.dashboard.access import LaptopAccess
            from rlhfspec.dashboard.jobs.laptop import LaptopSource
            from rlhfspec.dashboard.server import Dashboard
        except ModuleNotFoundError as error:
            problem = "needs a package that is not installed: pip install 'rlhfspec[dashboard,processes]'"
            raise InvalidRequest("dashboard", error.name, problem) from None
        access = LaptopAccess()

        def ready(at: int) -> None:
            typer.echo(f"http://{_DASHBOARD_HOST}:{at}/?token={access.token}")

        asyncio.run(serve(Dashboard(LaptopSource(runs), access).app(), _DASHBOARD_HOST, port, ready=ready))

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.messages.access.connections import Connections
    from rlhfspec.runs.live.live import LiveView
    from rlhfspec.runs.view.roster import ProcessState

_EVERY_SECONDS = 1.0

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with --processes.", show_default=False)]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")]


def top(run: Run, watch: Watch = False) -> None:
    """Show the processes of a run: host, activity, load and number of samples."""
    with exit_on_problems():
        connections = _connections(run)
        table = _table(_look(connections))
        if not watch:
            wide_console().print(table)
            return
        with Live(table, console=wide_console(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while True:
                time.sleep(_EVERY_SECONDS)
                live.update(_table(_look(connections)), refresh=True)


def _connections(run: Path) -> Connections:
    from rlhfspec.messages.access.connections import Connections

    path = run / "processes" / "connections.json"
    if not path.exists():
        raise InvalidRequest("RUN", str(run), f"no run with --processes is active in this folder{_of_one_process(run)}")
    return Connections.read(path)


def _of_one_process(run: Path) -> str:
    """Return the progress of a one-process run in the folder, and where to see more, or "" if there is none."""
    from rlhfspec.runs.folder.run_folder import RunFolder

    folder = RunFolder(run)
    if not folder.job_file.exists():
        return ""
    steps, manifest = folder.steps(), folder.manifest()
    done = f"{steps[-1].step if steps else 0} of {folder.job().spec.training.steps} steps"
    return f"; its run ({manifest.outcome}, {done}) is shown by `rlhfspec dashboard {run}`"


def _look(connections: Connections) -> LiveView:
    from rlhfspec.runs.live.live import read_live

    assert connections.redis_url is not None
    url, uid, credentials = connections.redis_url, connections.uid, connections.credentials
    return asyncio.run(read_live(url, uid, credentials=credentials))


def _table(view: LiveView) -> Table:
    from rlhfspec.runs.view.roster import process_states

    states = process_states(view.run, view.now)
    table = Table(caption=None if states else "no worker has reported yet")
    for title in ("worker", "process", "state", "activity"):
        table.add_column(title)
    for title in ("for", "busy", "runs", "queue", "tokens/s", "samples"):
        table.add_column(title, justify="right")
    for state in states:
        table.add_row(*map(Text, _row(state)))
    return table


def _row(state: ProcessState) -> tuple[str, ...]:
    from rlhfspec.runs.view.text import one_line

    load = state.load
    running = ("", "", "", "") if load is None else (
        str(load.num_running), str(load.num_waiting), f"{load.tokens_per_second:.0f}", str(len(load.sample_ids) or ""),
    )  # fmt: skip
    return (
        f"{state.stage}-{state.worker}",
        one_line(f"{state.host}:{state.pid or ''}" if state.host else str(state.pid or "")),
        state.doing,
        one_line(state.what),
        f"{state.since_seconds:.1f} s",
        f"{state.busy_seconds:.0f} s",
        *running,
    )

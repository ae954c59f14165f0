"""Roster, control, `top` and dashboard use the same age of silence."""

import asyncio

import pytest
from dashboards import beat, load
from rich.console import Console

from rlhfspec.cli.commands.top import _row
from rlhfspec.control.show import document_of
from rlhfspec.dashboard.live.live_state import Live
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.plugin.status import table_of
from rlhfspec.runs.live.live import LiveView
from rlhfspec.runs.live.run_state import SILENT_SECONDS, KnownRun
from rlhfspec.runs.view.roster import process_states

INFO = WorkerInfo(id="w", job="sums", stage="reward", worker=0, host="h", pid=1, grpc_address="", http_address="")


def plugin_top(view: LiveView) -> str:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(table_of(document_of(view), []))
    return captured.get()


@pytest.mark.parametrize(("seconds", "is_told"), [(SILENT_SECONDS - 0.5, False), (SILENT_SECONDS + 0.5, True)])
def test_all_that_tell_of_silence_tell_it_at_one_time(seconds: float, is_told: bool) -> None:
    clock = FakeClock()
    known, live = KnownRun(clock), Live()
    known.tell(INFO, beat(), load())
    asyncio.run(clock.advance(seconds))
    view = LiveView(run=known.run, now=clock.now())
    live.seen(view)
    [state] = process_states(known.run, clock.now())
    [page], [tile] = live.content(clock.now())["workers"], live.content(clock.now())["generators"]
    told = {
        "roster": state.doing,
        "dashboard": page["doing"],
        "its generators": "silent" if tile["silent"] else "working",
        "top": _row(state)[2],
        "kubectl rlhf top": "silent" if "silent" in plugin_top(view) else "working",
    }
    assert set(told.values()) == {"silent" if is_told else "working"}, told

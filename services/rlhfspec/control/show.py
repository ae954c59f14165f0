"""`python -m rlhfspec.control.show [--json | --view | --sample ID]`: current state of a run, for `kubectl rlhf`.

Runs in control's pod. `--json`: workers, loads, last steps and samples; `--view`: the live view; `--sample`: a
trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfspec.cluster.names import CONNECTIONS_FILE

if TYPE_CHECKING:
    from rlhfspec.messages.access.connections import Connections
    from rlhfspec.runs.live.live import LiveView

SHOW_SECONDS = 0.5
_NO_READER_SECONDS = 60.0  # an output that takes nothing for this long has no reader
OF_SAMPLES = ("sample_ids", "num_generated", "num_held")  # fields of a load, replaced by the number of samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhfspec.control.show", description="Show the state of a run.")
    parser.add_argument("--connections", type=Path, default=Path(CONNECTIONS_FILE), metavar="FILE")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON document (the default)")
    how.add_argument("--view", action="store_true", help="the live view, until Ctrl-C")
    how.add_argument("--sample", metavar="ID", help="trace of this sample, as log lines")
    arguments = parser.parse_args()
    from rlhfspec.errors import RLHFSpecError
    from rlhfspec.messages.access.connections import Connections
    from rlhfspec.messages.access.rights import CONTROL
    from rlhfspec.worker import exits
    from rlhfspec.worker.mirror import mirrored

    try:
        connections = Connections.read(arguments.connections)
        if arguments.view or arguments.sample:
            mirror = mirrored(connections, CONTROL, 0)
            if mirror is not None and arguments.sample:
                mirror.fetch_traces()
        if arguments.view:
            asyncio.run(_view(connections))
        elif arguments.sample:
            print(json.dumps(trace_lines(connections.folder, arguments.sample), ensure_ascii=False))
        else:
            print(json.dumps(document_of(asyncio.run(_look(connections))), ensure_ascii=False))
    except RLHFSpecError as error:
        print(error, file=sys.stderr)
        return exits.code_of(error)
    return exits.DONE


def document_of(view: LiveView) -> dict[str, Any]:
    """Return workers, recent steps and samples as one JSON document.

    >>> from rlhfspec.runs.live.live import LiveView, Window
    >>> document_of(LiveView(window=Window(steps=('{"step": 1}',))))
    {'workers': [], 'steps': [{'step': 1}], 'samples': []}
    """
    from rlhfspec.runs.view.roster import process_states

    workers = []
    for state in process_states(view.run, view.now):
        worker = asdict(state)
        if state.load is not None:
            load = {key: value for key, value in worker["load"].items() if key not in OF_SAMPLES}
            worker["load"] = {**load, "num_samples": len(state.load.sample_ids)}
        workers.append({"name": f"{state.stage}-{state.worker}", **worker})
    steps = [json.loads(line) for line in view.window.steps]
    return {"workers": workers, "steps": steps, "samples": [asdict(sample) for sample in view.window.samples]}


def trace_lines(folder: Path, sample: str) -> list[dict[str, str]]:
    """Return a sample's trace as log lines, or raise InvalidRequest."""
    from rlhfspec.runs.view.waterfall import notes, seconds
    from rlhfspec.telemetry.read import life_of

    life = life_of(folder, sample)
    return [
        {
            "time": datetime.fromtimestamp(span.ended, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "worker": f"{span.stage}-{span.worker}",
            "level": "trace",
            "message": "; ".join([f"{span.name}, {seconds(span.seconds)}", *notes(life, span)]),
            "sample": life.sample,
        }
        for span in life.spans
    ]


async def _look(connections: Connections) -> LiveView:
    from rlhfspec.errors import InvalidRequest
    from rlhfspec.runs.live.live import read_live

    if connections.redis_url is None:
        raise InvalidRequest("redis_url", None, "must be set, because the state of processes is read from Redis")
    return await read_live(connections.redis_url, connections.uid, credentials=connections.credentials)


async def _view(connections: Connections) -> None:
    from rich.console import Console

    from rlhfspec.common.awake_clock import AwakeClock
    from rlhfspec.control.knowledge import RunKnowledge
    from rlhfspec.control.looking import Looking, last_checkpoint, steps_of, view_of
    from rlhfspec.messages.access.connecting import connect
    from rlhfspec.messages.access.rights import CONTROL
    from rlhfspec.messages.loop import workers_of
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.runs.view.watch import WatchService
    from rlhfspec.stage.bus import Bus
    from rlhfspec.stage.supervisor import Supervisor
    from rlhfspec.stage.tasks import together
    from rlhfspec.stage.vitals import Vitals

    job, folder, vitals = connections.job(), RunFolder(connections.folder), Vitals(AwakeClock())
    view, stop = view_of(job, Console(), shown=True), asyncio.Event()
    view.progress.history(steps_of(folder))
    knowledge = RunKnowledge(job, connections.uid, connections.nats_url, vitals.clock)
    transport = await connect(connections, CONTROL, name="control-view", clock=vitals.clock)
    bus = Bus(
        transport, job.metadata.name, uid=connections.uid, workers=workers_of(job) | {"view": 1}, clock=vitals.clock
    )
    services = [
        WatchService(vitals, bus.of("view"), view=view, known=knowledge.known),
        Looking(vitals, bus, knowledge, partial(last_checkpoint, folder)),
    ]

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(vitals, stall_seconds=float("inf"), grace_seconds=1.0, final=())
    try:
        with view:
            await together(supervisor.run(services, stop), _end_when_nobody_reads(stop))
    finally:
        await transport.close()


async def _end_when_nobody_reads(stop: asyncio.Event) -> None:
    """End this process once its output has no reader, because a write would block forever."""
    from rlhfspec.worker import exits

    read_at = time.monotonic()
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SHOW_SECONDS)
        if select.select([], [sys.stdout], [], 0.0)[1]:
            read_at = time.monotonic()
        elif time.monotonic() - read_at > _NO_READER_SECONDS:
            os._exit(exits.DONE)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:  # also during imports
        raise SystemExit(128 + signal.SIGINT) from None

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.processes import send
from runs import train
from started import Started, caught, eventually, hold_rewards

from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.loop import subject
from rlhfspec.messages.records import Plan, Sample
from rlhfspec.messages.transport.jetstream.streams import stream_name
from rlhfspec.stage.bus import Bus
from rlhfspec.telemetry.folder import read_spans

ROLES = (CONTROL, "rebalancer")
PPO = ("algorithm={name: ppo, samplesPerPrompt: 2, klCoefficient: 0.05}", "training.steps=8", "generation.maxTokens=24")
PPO += ("training.promptsPerStep=8", "roles.generator.workers=2")


def scored_by_guests(folder: Path) -> list[str]:
    spans = [span for span in read_spans(folder) if span.name == "reference"]
    return [span.sample for span in spans if span.worker > 0]


class Control:
    """Client of a run's servers that observes as control and plans as the rebalancer."""

    def __init__(self, run: Started) -> None:
        self._connections = Connections.read(run.folder / "processes" / "connections.json")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Control":
        self._thread.start()
        self._control, self._rebalancer = (self._do(connect(self._connections, role, name=role)) for role in ROLES)
        return self

    def __exit__(self, *error: object) -> None:
        for transport in (self._control, self._rebalancer):
            self._do(transport.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30.0)

    def plan(self, dry: dict[int, str]) -> None:
        bus = Bus(self._rebalancer, "letters", uid=self._connections.uid, workers={"rebalancer": 1})
        self._do(bus.of("rebalancer").publish(Plan(id="letters/plan", job="letters", dry=dry)))

    def reference(self) -> dict[str, Any]:
        stream = stream_name(subject("letters", self._connections.uid, Sample))
        return self._do(self._control._connection.api(f"CONSUMER.INFO.{stream}.reference"))


@contextmanager
def held(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)


def stop_at_a_sample(control: Control, pid: int) -> None:
    """Stop generator 1 while it has a reference sample: more are unacknowledged than the stopped reference holds."""
    least = control.reference()["num_ack_pending"]

    def is_at_a_sample() -> bool:
        nonlocal least
        out = control.reference()["num_ack_pending"]
        if out > least:
            return True
        least = min(least, out)
        control.plan({1: "score"})
        return False

    caught([pid], is_at_a_sample, "generator 1 scores")


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
def test_a_dry_generator_killed_while_scoring_keeps_the_curve(job_file: Path, starting: Callable[..., Started]) -> None:
    """The reference is stopped, so generator 1 scores alone, and is killed once."""
    hold = hold_rewards(job_file, "0 many")
    whole = train(job_file, "one", *PPO)
    run = starting("many", *PPO)
    run.until("(8 of 8)")
    generators = [run.pid_of("generator", worker) for worker in (0, 1)]
    with ExitStack() as all_held:
        all_held.enter_context(held(run.pid_of("reference"), run.pid_of("rebalancer")))
        with held(*generators):
            control = all_held.enter_context(Control(run))
            eventually(lambda: control.reference()["num_waiting"] == 0, "the reference asks for nothing any more")
        hold.unlink()
        stop_at_a_sample(control, generators[1])
        os.kill(generators[1], signal.SIGKILL)
        assert "started again" in run.until("generator 1: killed by SIGKILL")

        def has_scored() -> bool:
            control.plan({1: "score"})
            return len(scored_by_guests(run.folder)) > 16

        eventually(has_scored, "it scores again, and what it had was delivered again")
    run.ends()
    run.check_alike(whole)

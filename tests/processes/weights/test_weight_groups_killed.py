"""Weight group members die, stop or join during a version: none keeps half of it or waits long."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import warmed
from group_member import MEGABYTE, MIDDLE, NUM_BYTES, state
from weight_groups import GroupNode, GroupTrainer, eventually, record_of

from rlhfspec.training.weights.group import shares
from rlhfspec.training.weights.group.sender import GroupSender, hold_up_seconds

Events = list[Callable[[], None]]

START = f"import sys, runpy; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import group_member as g; "


class Member:
    def __init__(self, leaving: ExitStack, call: str) -> None:
        self.process: Any = warmed.Popen(
            [sys.executable, "-c", START + call], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        leaving.callback(self.end)
        self.said = self.next_line()

    def next_line(self) -> str:
        return str(self.process.stdout.readline().strip())

    def tell(self, line: object) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def has(self, version: int) -> bool:
        self.tell(version)
        return self.next_line() == "has"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def leaving() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def half_way(monkeypatch: pytest.MonkeyPatch) -> Events:
    events: Events = []
    fill = shares.fill
    count = 0

    def filled(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count % (NUM_BYTES // MEGABYTE) == MIDDLE and events:
            events.pop(0)()
        return fill(*arguments)

    monkeypatch.setattr(shares, "fill", filled)
    return events


def trainer_of(leaving: ExitStack) -> GroupTrainer:
    trainer = GroupTrainer(bucket_bytes=MEGABYTE)
    leaving.callback(trainer.close)
    return trainer


def sent(sender: GroupSender, version: int) -> str:
    """Return the error of a send, which must come in time."""
    began = time.monotonic()
    problem = sender.begin("policy", version, state(version)).end(record_of(version, state(version)).digest)
    assert time.monotonic() - began < hold_up_seconds(NUM_BYTES)
    return problem


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_generator_killed_or_stopped_mid_transfer_leaves_the_group(
    number: signal.Signals, leaving: ExitStack, half_way: Events
) -> None:
    trainer = trainer_of(leaving)
    sender = trainer.sender
    members = [Member(leaving, f"g.receive({trainer.address!r})") for _ in range(2)]
    eventually(lambda: len(sender.members) == 2)
    assert sent(sender, 1) == ""
    half_way.append(lambda: members[1].process.send_signal(number))
    assert sent(sender, 2), "not all have it"
    assert members[0].has(1)
    assert not members[0].has(2), "it takes that version by the store"
    eventually(lambda: sender.members == {members[0].said})
    assert sent(sender, 3) == "", "of those who live"
    assert members[0].has(3)
    if number == signal.SIGSTOP:
        members[1].process.send_signal(signal.SIGCONT)
        eventually(lambda: len(sender.members) == 2)
        assert not members[1].has(2)
        assert sent(sender, 4) == ""
        assert all(member.has(4) for member in members)


def test_a_generator_that_joins_mid_transfer_receives_the_next_version(leaving: ExitStack, half_way: Events) -> None:
    trainer = trainer_of(leaving)
    sender = trainer.sender
    members = [Member(leaving, f"g.receive({trainer.address!r})"), Member(leaving, "g.receive()")]
    eventually(lambda: len(sender.members) == 1)

    def come() -> None:
        members[1].tell(trainer.address)
        eventually(lambda: len(sender.members) == 2)

    half_way.append(come)
    assert sent(sender, 1) == ""
    assert [member.has(1) for member in members] == [True, False]
    assert sent(sender, 2) == ""
    assert [member.has(2) for member in members] == [True, True]


def test_a_trainer_killed_mid_transfer_delivers_the_version_after_a_restart(leaving: ExitStack) -> None:
    trainer = Member(leaving, "g.send()")
    trainers = [trainer.said]
    node = GroupNode(lambda: trainers[-1])
    leaving.callback(node.close)
    assert trainer.next_line() == "half of it is sent"
    trainer.process.kill()
    trainer.process.wait()
    assert not node.has(1, state(1))
    again = trainer_of(leaving)
    trainers.append(again.address)
    eventually(lambda: len(again.sender.members) == 1)
    assert sent(again.sender, 1) == ""
    assert node.has(1, state(1))

"""`rlhfspec chat`: in a terminal, without one, and with a server."""

import asyncio
import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warmed
from chats import TOKEN, run_that_chats, serving
from runs import command

from rlhfspec.engine.core import Engine

# A shell starts what runs in the background with SIGINT ignored, and tests may run there.
BEGIN = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); from rlhfspec.cli.start import main; main()"
)
PATIENCE_SECONDS = 100.0


class Terminal:
    """`rlhfspec chat` in a terminal of its own. `shown`: what `until` has not passed yet."""

    def __init__(self, width: int, *arguments: str) -> None:
        self._handle, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
        line = [sys.executable, "-c", BEGIN, "chat", *arguments]
        environment = os.environ | {"TERM": "xterm"}
        self.process = warmed.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def until(self, words: str) -> str:
        """Wait for words, and return what was shown before them."""
        while words not in self.shown:
            assert select.select([self._handle], [], [], PATIENCE_SECONDS)[0], f"never {words}: {self.shown}"
            try:
                self.shown += os.read(self._handle, 1 << 16).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended without {words}: {self.shown}") from None
        before, _, self.shown = self.shown.partition(words)
        return before

    def left(self) -> int:
        return int(self.process.wait(PATIENCE_SECONDS))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._handle)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(width: int, *arguments: str) -> Terminal:
        opened.append(Terminal(width, *arguments))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def run(job_file: Path) -> Path:
    return run_that_chats(job_file)


def votes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "feedback.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("width", [140, 70])
def test_the_better_answer_of_first_and_latest_goes_on(
    run: Path, terminal: Callable[..., Terminal], width: int
) -> None:
    talk = terminal(width, str(run), "--max-tokens", "8", "--seed", "5")
    talk.until("> ")
    for key in "+-\r":
        talk.press("2+2=\r")
        shown = talk.until("- first is better")
        assert "first: before training" in shown
        assert "latest: step 1" in shown
        talk.press(key)
        talk.until("> ")
    talk.press("\x04")
    assert talk.left() == 0
    better, worse, again, against = votes(run)
    assert (better["policy"], better["vote"], worse["policy"], worse["vote"]) == ("latest", "up", "first", "down")
    assert (better["against"], worse["against"]) == (worse["id"], better["id"])
    assert (set(better["weights_versions"]), set(worse["weights_versions"])) == ({1}, {0})
    assert better["seed"] == worse["seed"] == 5
    assert (again["policy"], again["vote"], against["policy"]) == ("first", "up", "latest")
    assert again["messages"][:2] == [*better["messages"], better["answer"]]


async def test_ctrl_c_ends_one_answer_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, terminal: Callable[..., Terminal]
) -> None:
    genuine = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.05), genuine(self))[1])
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    async with serving() as served:
        await asyncio.to_thread(_end_an_answer, terminal(140, f"{served.url}/v1", "--temperature", "0"))


def _end_an_answer(talk: Terminal) -> None:
    talk.until("> ")
    talk.press("2+2=\r")
    talk.until("2+2=")
    talk.until("\n")
    while not talk.shown.strip():
        talk.shown += os.read(talk._handle, 1 << 16).decode(errors="replace")
    talk.press("\x03")
    talk.until("not finished")
    talk.until("> ")
    while talk.process.poll() is None:  # Python loses a Ctrl-C between readline's prompt and its wait for a key
        talk.press("\x03")
        time.sleep(0.3)
    assert talk.left() == 0


def test_a_script_gets_both_answers_or_one(run: Path) -> None:
    asked = ["chat", str(run), "--prompt", "2+2=", "--seed", "3", "--max-tokens", "8"]
    both = command(asked, 0)
    again = command([*asked, "--only", "latest"], 0)
    assert again.stdout.strip()
    assert both.stdout.endswith(again.stdout)
    assert both.stdout.startswith("first: before training")
    assert "weights 0 · seed 3" in both.stderr
    assert "weights 1 · seed 3" in both.stderr
    assert "GB of memory" in both.stderr


async def test_a_server_is_talked_to_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        asked = ["chat", f"{served.url}/v1", "--prompt", "2+2=", "--seed", "3", "--max-tokens", "8"]
        for key, code in ((TOKEN, 0), ("wrong", 1)):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            result = await asyncio.to_thread(command, asked, code)
            assert ("weights 0 · seed 3" if code == 0 else "answers 401: wrong or missing token") in result.stderr
        assert (await asyncio.to_thread(command, ["chat", "http://127.0.0.1:9/v1", "--prompt", "x"], 1)).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--prompt", "x"], "path: no such folder"),
        (["nowhere"], "--prompt: is needed without a terminal"),
        (["nowhere", "--prompt", "x", "--only", "best"], "--only: must be first or latest"),
        (["nowhere", "--prompt", "x", "--only", "first"], "--only: needs the folder of a run"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str) -> None:
    assert said in command(["chat", *arguments], 2).output

"""Streams of clients whose generators are killed. KILLS=200 in the environment kills that often."""

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import pytest
from faults.processes import is_alive, named
from openai import OpenAI
from started import Started, eventually

from rlhfspec.cli.signals import STOPPED
from rlhfspec.worker.last_words import last_activity

NUM_KILLS = int(os.environ.get("KILLS", "5"))
NUM_STREAMS = 4
WARM = 0.3  # seconds in which streams run before a kill
UNCHANGED = "training.optimizer.learningRate=1e-30"  # versions grow, and the weights stay


class Talk(Thread):
    """Client that asks for the same stream again and again."""

    def __init__(self, client: OpenAI, seed: int, over: Event) -> None:
        super().__init__(daemon=True)
        self.answers: list[tuple[list[int], list[float]]] = []
        self.spans: list[list[float]] = []  # times of the chunks of each answer
        self._client, self._seed, self._over = client, seed, over

    def run(self) -> None:
        while not self._over.is_set():
            self.spans.append([])
            self.answers.append(answer(self._client, self._seed, lambda: self.spans[-1].append(time.monotonic())))

    def pause_after(self, moment: float) -> float:
        """Return the longest pause of the stream that was open at this moment, in the second after it."""
        steps = (step for times in self.spans if times and times[0] <= moment for step in pairwise(times))
        return max((after - before for before, after in steps if before < moment + 1 and after > moment), default=0.0)


def answer(client: OpenAI, seed: int, came: Callable[[], Any] = lambda: None) -> tuple[list[int], list[float]]:
    token_ids, log_probs, reason = [], [], None
    stream = client.completions.create(
        model="policy", prompt=f"{seed}+1=", seed=seed, max_tokens=400, stream=True, logprobs=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for chunk in stream:
        [choice] = chunk.choices
        came()
        token_ids += choice.model_dump()["token_ids"]
        log_probs += (choice.logprobs and choice.logprobs.token_logprobs) or []
        reason = choice.finish_reason or reason
    assert reason == "length", "every stream ends complete"
    return token_ids, log_probs


@pytest.mark.timeout(180 + 30 * NUM_KILLS)
def test_every_stream_survives_the_kills_of_its_generators(job_file: Path, starting: Callable[..., Started]) -> None:
    steps = ("training.steps=100000", "checkpoint.everySteps=100000", UNCHANGED)
    run = starting("out", "roles.generator.workers=2", *steps, serve=True)
    url = run.until("OPENAI_BASE_URL=").strip().partition("=")[2]
    client = OpenAI(base_url=url, api_key=run.until("OPENAI_API_KEY=").strip().partition("=")[2], max_retries=0)
    reading = Thread(target=lambda: run.lines.extend(run.process.stdout or ()))  # else the pipe fills
    reading.start()
    expected = [answer(client, seed) for seed in range(NUM_STREAMS)]
    over = Event()
    talks = [Talk(client, seed, over) for seed in range(NUM_STREAMS)]
    for talk in talks:
        talk.start()
    kills, dead = [], set[int]()
    for number in range(NUM_KILLS):
        eventually(lambda: are_ready(run, dead), f"both generators run before kill {number}")
        time.sleep(WARM)
        os.kill(pid := run.pid_of("generator", number % 2), signal.SIGKILL)
        kills.append(time.monotonic())
        dead.add(pid)
    eventually(lambda: are_ready(run, dead), "both generators run again")
    os.kill(leaving := run.pid_of("generator", 1), signal.SIGTERM)
    eventually(lambda: not is_alive(leaving), "a generator that is asked to leave does so")
    over.set()
    for talk in talks:
        talk.join()
    os.kill(run.pid_of("gateway"), signal.SIGKILL)  # it comes back at the same address
    assert answer(OpenAI(base_url=url, api_key=client.api_key, max_retries=60), 0) == expected[0]
    for talk, wanted in zip(talks, expected, strict=True):
        assert all(found == wanted for found in talk.answers)
    gaps = [max(talk.pause_after(moment) for talk in talks) for moment in kills]
    print(f"{NUM_KILLS} kills, {sum(len(talk.answers) for talk in talks)} streams, longest pause after a kill: "
          f"median {median(gaps):.3f} s, {max(gaps):.3f} s at most")  # fmt: skip
    run.process.send_signal(signal.SIGINT)
    reading.join()
    assert run.process.wait() == STOPPED, "".join(run.lines)
    assert any("generator 1 left: another program stopped it" in line for line in run.lines), "".join(run.lines)


def are_ready(run: Started, dead: set[int]) -> bool:
    """Return whether two generators run, other than the dead ones."""
    connections = run.connections
    for name in ("generator-0", "generator-1"):
        what = last_activity(Path(connections["activity_folder"], name))  # at first that of the dead one
        is_up = bool(what) and not any(word in what for word in ("loading", "starting", "to be opened"))
        if not is_up or dead.issuperset(named(connections["uid"], name)):
            return False
    return True

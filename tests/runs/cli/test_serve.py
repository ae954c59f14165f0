"""`rlhfspec serve`, as a user starts it. CHATS=1000 in the environment chats that often while rewards are held."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import warmed
from chats import run_that_chats
from openai import APIError, OpenAI
from runs import command, curve_of, samples_of, train
from started import OFF, eventually, hold_rewards

NUM_CHATS = int(os.environ.get("CHATS", "4"))
TALK = [{"role": "user", "content": "2+2="}]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[subprocess.Popen[str]] = []

    def start(*arguments: str, token: str | None = None) -> subprocess.Popen[str]:
        environment = os.environ | ({} if token is None else {"RLHFSPEC_SERVE_TOKEN": token})
        line = [sys.executable, "-m", "rlhfspec.cli.start", *arguments]
        servers.append(warmed.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
        return servers[-1]

    yield start
    for each in servers:
        if each.poll() is None:
            each.kill()
        each.communicate()


def told(server: "subprocess.Popen[str]") -> dict[str, str]:
    """Return the two variables that a server prints once it listens."""
    found: dict[str, str] = {}
    lines = []
    for line in server.stdout or ():
        lines.append(line)
        name, is_set, value = line.strip().partition("=")
        if is_set and name.startswith("OPENAI_"):
            found[name] = value
        if len(found) == 2:
            return found
    raise AssertionError(f"it never listened: {''.join(lines)}")


def test_a_run_is_served_until_ctrl_c(job_file: Path, start: Start) -> None:
    """The chat template comes from the run's tokenizer; the policy is exported on the way."""
    server = start("serve", str(run_that_chats(job_file)), "--port", "0", token="mine")
    found = told(server)
    assert found["OPENAI_API_KEY"] == "mine"
    client = OpenAI(base_url=found["OPENAI_BASE_URL"], api_key="mine", max_retries=0)
    [model] = client.models.list().data
    assert model.model_dump()["root"] == "run"
    asked = {"model": "policy", "messages": TALK, "max_tokens": 8}
    answer = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    seed = answer.choices[0].model_dump()["seed"]
    assert set(answer.choices[0].model_dump()["weights_versions"]) == {1}
    again = client.chat.completions.create(**asked, seed=seed)  # type: ignore[call-overload]
    assert again.choices[0].message == answer.choices[0].message
    endless = client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    next(iter(endless))
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    assert (job_file.parent / "run" / "export" / "config.json").exists()


@pytest.mark.timeout(180 + NUM_CHATS)
@pytest.mark.parametrize("way", [(), ("--processes", "--set", "roles.generator.workers=2")], ids=["one", "processes"])
def test_chats_while_a_policy_trains_change_no_sample(way: tuple[str, ...], job_file: Path, start: Start) -> None:
    """They take rows from samples, and follow the weights."""
    hold, steps = hold_rewards(job_file, "0 served"), ("training.steps=6", "generation.maxSequences=2")
    whole = train(job_file, "alone", OFF, *steps)
    sets = [word for each in (OFF, *steps) for word in ("--set", each)]
    run = start("run", str(job_file), *way, *sets, "--out", str(job_file.parent / "served"), "--serve", "0")
    found = told(run)
    client = OpenAI(base_url=found["OPENAI_BASE_URL"], api_key=found["OPENAI_API_KEY"], max_retries=0)
    seen: list[Any] = []

    def chat() -> None:
        with suppress(APIError):  # the run is over
            while run.poll() is None:
                answer = client.completions.create(model="policy", prompt="1+1=", seed=3, max_tokens=10, n=2)
                seen.extend(choice.model_dump() for choice in answer.choices)

    chats = [Thread(target=chat) for _ in range(3)]
    for each in chats:
        each.start()
    for number in range(1, NUM_CHATS + 1):
        eventually(lambda least=2 * number: len(seen) >= least, f"chat {number} is answered while the rewards are held")
    assert client.models.list().data[0].model_dump()["takes_feedback"]
    hold.unlink()
    output = run.communicate(timeout=120)[0]
    for each in chats:
        each.join()
    assert run.returncode == 0, output
    assert curve_of(job_file, "served") == whole
    assert samples_of(job_file, "served") == samples_of(job_file, "alone")
    answers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for each in seen:
        answers.setdefault((each["index"], *each["weights_versions"]), set()).add(tuple(each["token_ids"]))
    assert max(len(tokens) for tokens in answers.values()) == 1, "the same request has one answer"
    assert len({versions[-1] for versions in answers}) > 1, "chats follow the weights"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            ["--set", "roles.generator.workers=2"],
            "--serve: needs generation.engine: own and roles.generator.workers: 1",
        ),
        (["--processes", "--set", "generation.engine.name=vllm"], "--serve: needs generation.engine: own"),
    ],
)
def test_a_run_that_cannot_be_served_is_refused(option: list[str], said: str, job_file: Path) -> None:
    assert said in command(["run", str(job_file), "--set", OFF, "--serve", "0", *option], 2).output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["nowhere"], "path: no such folder"),
        (["--tool-parser", "hermes"], "--tool-parser: must be among qwen3"),
        (["--dtype", "int3"], "dtype: must be one of float32"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(change: list[str], said: str, models: Path) -> None:
    folder = [] if change[0] == "nowhere" else [str(models / "policy")]
    result = command(["serve", *folder, *change], 2)
    assert len([line for line in result.output.splitlines() if said in line]) == 1
    assert "Traceback" not in result.output


def test_a_wrong_tool_parser_is_refused_before_a_model_is_loaded() -> None:
    result = command(["serve", "nowhere", "--tool-parser", "hermes"], 2)
    assert "--tool-parser: must be among qwen3" in result.output


def test_a_port_in_use_is_refused_in_one_line(models: Path, job_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = command(["serve", str(models / "policy"), "--port", port], 2)
        assert "--port: cannot listen on this port: " in result.output
        result = command(["run", str(job_file), "--set", OFF, "--processes", "--serve", port], 2)
        assert "--serve: cannot listen on this port: " in result.output

"""The child of the engine `vllm` is killed, hung or refused, and leaves nothing."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.processes import is_alive
from vllm_children import STEP_SECONDS, Children, python_with_vllm

from rlhfspec.engine.base import Completion, Request
from rlhfspec.engine.vllm.client import MOST_RESTARTS, VllmEngine
from rlhfspec.engine.vllm.process import VllmEnded, VllmProcess
from rlhfspec.errors import EngineFailed, InvalidRequest
from rlhfspec.testing.engine import PROMPTS, bits, drain, log_probs_of, reference, request, run
from rlhfspec.tiny import perturbed
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there

LONG = tuple(range(3, 200))  # more than a block of it would be taken from the prefix cache


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    children = Children(reference(), perturbed(reference(), 0.1), max_context=256, max_sequences=8)
    yield children
    children.close()


@pytest.fixture
def engine(children: Children) -> VllmEngine:
    return children.engine("off", reference(), hugging_face_tokenizer())


def some() -> list[Request]:
    return [request(f"r{seed}", prompt, seed=seed, max_tokens=24) for seed, prompt in enumerate(PROMPTS * 2)]


def kill(engine: VllmEngine) -> int:
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_new_weights_reset_the_prefix_cache_of_vllm(children: Children) -> None:
    """Without a reset of its prefix cache vLLM reuses the old weights' KV of a repeated prompt."""
    newer = perturbed(reference(), 0.3)
    engine = children.engine("off", reference())
    run(engine, request("before", LONG, max_tokens=8))
    engine.load_weights(newer.state_dict(), version=1)
    after = run(engine, request("after", LONG, max_tokens=8))["after"]
    np.testing.assert_allclose(after.log_probs, log_probs_of(newer, after), atol=2e-5)
    assert bits(after) == bits(run(children.engine("off", newer), request("after", LONG, max_tokens=8))["after"])


def test_a_killed_child_costs_no_token(engine: VllmEngine) -> None:
    """This includes new weights that came meanwhile, and text ended by a stop string."""
    undisturbed = run(engine, *some())
    word = hugging_face_tokenizer().decode(list(undisturbed["r0"].token_ids[8:10]), skip_special_tokens=True)
    for each in some():
        engine.submit(each)
    done: dict[str, Completion] = {}
    for _ in range(7):
        done |= {each.id: each for each in engine.step().finished}
    pid = kill(engine)
    done |= drain(engine)
    assert engine.pid != pid
    assert not is_alive(pid)
    assert {n: bits(x)[0] for n, x in done.items()} == {n: bits(x)[0] for n, x in undisturbed.items()}
    assert max(each.stats.num_preemptions for each in done.values()) == 1
    stopped = run(engine, request("s", PROMPTS[0], seed=0, max_tokens=24, stop=(word,)))["s"]
    assert (stopped.finish_reason, word in (stopped.text or "")) == ("stop", False)
    assert stopped.token_ids == undisturbed["r0"].token_ids[: len(stopped.token_ids)]


def test_child_runs_ahead_longer_while_no_request_comes(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = children.engine("off", reference(), hugging_face_tokenizer(), ahead_seconds=1e-4)
    times, ask = list[int](), engine._child.ask

    def noting(name: str, arguments: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        times.append(round(arguments["ahead_seconds"] / 1e-4))
        return ask(name, arguments, seconds=seconds)

    def steps(num: int) -> list[int]:
        times.clear()
        for _ in range(num):
            engine.step()
        return times

    with monkeypatch.context() as patched:
        patched.setattr(engine._child, "ask", noting)
        engine.submit(request("calm", PROMPTS[0], seed=1, max_tokens=200))
        assert steps(6) == [1, 2, 4, 8, 8, 8]
        engine.submit(request("another", PROMPTS[1], seed=2, max_tokens=200))
        assert steps(3) == [1, 2, 4]
        engine.cancel("another")
        assert steps(2) == [1, 2]
        engine.submit(request("stops", PROMPTS[2], seed=3, max_tokens=200, stop=("never said",)))
        assert steps(3) == [1, 1, 1], "a stop string is found here, and what the child did beyond it is for nothing"
    engine.cancel("calm")
    engine.cancel("stops")
    engine.check_integrity()


def test_a_step_that_hangs_is_ended(engine: VllmEngine) -> None:
    expected = run(engine, request("a"))["a"].token_ids
    engine.submit(request("b"))
    os.kill(engine.pid, signal.SIGSTOP)
    engine._step_seconds = 1.0
    began, pid = time.monotonic(), engine.pid
    engine.step()
    engine._step_seconds = STEP_SECONDS
    assert time.monotonic() - began > 1.0
    assert not is_alive(pid)
    assert run(engine)["b"].token_ids == expected


def test_a_child_that_dies_again_and_again_ends_the_worker(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = engine.pid
    assert pid is not None
    engine.close()
    assert not is_alive(pid), "nothing is left when it is closed"
    monkeypatch.setattr(engine._child, "start", lambda: {})  # what is started dies at once
    engine.submit(request("a"))
    with pytest.raises(EngineFailed, match=f"started {MOST_RESTARTS} times without finishing a sequence"):
        drain(engine)


def test_new_weights_that_lack_a_tensor_are_refused(engine: VllmEngine) -> None:
    state = reference().state_dict()
    del state["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(InvalidRequest, match="lack 1 tensors, such as"):
        engine.load_weights(state, version=1)


def test_a_refusal_of_vllm_is_one_line_that_names_the_field(children: Children) -> None:
    orders = children.orders("off")
    orders["open"]["arguments"]["quantization"] = "no-such"
    with pytest.raises(InvalidRequest, match=r"^spec\.generation\.engine\.arguments: .*no-such") as caught:
        VllmProcess(python_with_vllm(), orders, {}).start()
    assert "\n" not in str(caught.value)


def test_an_interpreter_that_cannot_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(VllmEnded, match="ended with 3: no such thing"):
        VllmProcess(Path(broken.name), {"open": {}}, {}).start()

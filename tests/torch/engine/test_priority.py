"""Priorities: who gets a row first. Tokens never depend on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moving import VOCAB, alone, bits, drain, make, request

from rlhfspec.engine import Engine
from rlhfspec.engine.vllm.client import VllmEngine
from rlhfspec.engine.vllm.process import VllmProcess
from rlhfspec.errors import InvalidRequest


def full_engine() -> Engine:
    engine = make(max_sequences=2)
    for index in range(3):
        engine.submit(request(f"rollout {index}", seed=index))
    for _ in range(3):
        engine.step()
    assert [engine.stats().num_running, engine.stats().num_waiting] == [2, 1]
    return engine


def test_a_higher_priority_takes_the_row_of_the_youngest_and_changes_no_token() -> None:
    engine = full_engine()
    engine.submit(replace(request("chat", seed=9), priority=2))
    engine.step()
    running = {view.id: view.is_waiting for view in engine.sequences()}
    assert running == {"rollout 0": False, "chat": False, "rollout 1": True, "rollout 2": True}
    assert engine.stats().num_preemptions == 1
    done = drain(engine)
    assert [name for name in done if name.startswith("rollout")] == ["rollout 0", "rollout 1", "rollout 2"]
    assert all(bits(done[f"rollout {index}"]) == alone(seed=index) for index in range(3))
    assert bits(done["chat"]) == alone(seed=9)
    engine.check_integrity()


def test_memory_is_taken_from_the_lowest_priority_first() -> None:
    engine = make(max_sequences=3, kv_cache_tokens=208, tree_slots=0, speculation="off")
    for index in range(2):
        engine.submit(request(f"rollout {index}", tuple(range(50 * index, 50 * index + 40)), seed=index))
    engine.step()
    engine.submit(replace(request("chat", tuple(range(100, 180)), seed=9), priority=2))
    engine.step()
    assert not {view.id: view.is_waiting for view in engine.sequences()}["chat"]
    preempted: dict[str, int] = {}
    while engine.has_work:
        for done in engine.step().finished:
            preempted[done.id] = done.stats.num_preemptions
    assert preempted["chat"] == 0
    assert sum(preempted.values()) > 0
    engine.check_integrity()


def test_equal_priorities_wait_in_their_order_and_preempt_nobody() -> None:
    engine = full_engine()
    for name in ("a", "b", "c"):
        engine.submit(replace(request(name), priority=2))
    engine.step()
    assert [view.id for view in engine.sequences() if not view.is_waiting] == ["a", "b"]
    assert [sequence.request.id for sequence in engine.scheduler.waiting] == [
        "c", "rollout 0", "rollout 1", "rollout 2"
    ]  # fmt: skip
    assert engine.stats().num_preemptions == 2


@pytest.mark.parametrize("asked", [{"priority": 2}, {"top_log_probs": 5}])
def test_the_engine_vllm_refuses_by_name_what_it_cannot_do(asked: dict[str, Any]) -> None:
    child = VllmProcess(Path("python"), {}, {})
    opened = {"num_token_ids": VOCAB, "num_blocks": 4, "eos_token_ids": []}
    engine = VllmEngine(child, opened, max_context=128, max_sequences=2, step_seconds=1.0)
    with pytest.raises(InvalidRequest, match=f"{next(iter(asked))}: needs the engine own"):
        engine.submit(replace(request("x"), **asked))
    assert not engine.has_work

"""A turn is an append: a kept sequence continues as if all were one prompt."""

from typing import Any

import numpy as np
import pytest
from moving import PROMPT, SUFFIX, TREE, at_once, bits, drain, in_rounds, make, model, request

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest, WeightsVersionError
from rlhfspec.tiny import perturbed

PARAMS = SamplingParams(max_tokens=13, ignore_eos=True)


def staying(name: str = "chat", prompt: tuple[int, ...] = PROMPT, **changes: Any) -> Request:
    given = {"params": PARAMS, "seed": 7} | changes
    return Request(id=name, prompt_token_ids=prompt, stays=True, **given)


def said(turn: int) -> tuple[int, ...]:
    return tuple(range(60 + 10 * turn, 60 + 10 * turn + 5 + turn))


def fresh(done: Completion, *, seed: int, weights: Any = None, params: SamplingParams = PARAMS) -> object:
    engine = make(speculation="off")
    if weights is not None:
        engine.load_weights(weights.state_dict(), version=1)
    engine.submit(Request(id="x", prompt_token_ids=done.prompt_token_ids, params=params, seed=seed))
    return bits(drain(engine)["x"])


def talk(engine: Engine, turns: range, *, names: tuple[str, ...] = ("chat",)) -> int:
    """Run all turns together, compare with fresh requests, and return the prompt tokens run."""
    before = engine.stats().num_prefill_tokens
    for turn in turns:
        for index, name in enumerate(names):
            engine.extend(name, said(turn), seed=100 * turn + index)
        done = drain(engine)
        for index, name in enumerate(names):
            assert done[name].prompt_token_ids[-5 - turn :] == said(turn)
            assert bits(done[name]) == fresh(done[name], seed=100 * turn + index)
    return engine.stats().num_prefill_tokens - before


@pytest.mark.parametrize("speculation", ["off", TREE, SUFFIX, "adaptive"])
def test_extending_a_sequence_runs_only_the_new_tokens(speculation: str | DraftPlan) -> None:
    """Also the last token of the previous turn runs, which was chosen but not run."""
    engine = make(speculation=speculation)
    engine.submit(staying())
    assert drain(engine)["chat"].finish_reason == "length"
    num_run = talk(engine, range(1, 4))
    most, least = sum(len(said(turn)) + 1 for turn in range(1, 4)), sum(len(said(turn)) for turn in range(1, 4))
    assert least <= num_run <= most, "an accepted last token has run already"
    assert engine.stats().num_staying == 1
    assert engine.stats().num_free_blocks < engine.stats().num_blocks
    assert engine.cancel("chat")
    assert (engine.stats().num_staying, engine.stats().num_free_blocks) == (0, engine.stats().num_blocks)


def test_a_staying_sequence_gives_up_its_memory_when_it_is_needed() -> None:
    engine = make(max_sequences=2, kv_cache_tokens=16 * 16)
    names = tuple(f"chat{index}" for index in range(4))
    for index, name in enumerate(names):
        engine.submit(staying(name, tuple(range(index, index + 40)), seed=index))
    drain(engine)
    resting = [each for each in engine.scheduler.staying.values() if each.resting]
    assert 0 < len(resting) < 4, "of two rows and sixteen blocks"
    assert resting == list(engine.scheduler.staying.values())[-len(resting) :], "the last ones still have their KV"
    talk(engine, range(1, 3), names=names)
    for seed in range(2):  # they need all of the memory
        engine.submit(request(f"large{seed}", tuple(range(seed, seed + 98)), seed=seed, max_tokens=30))
    drain(engine)
    assert not any(each.resting for each in engine.scheduler.staying.values())
    assert engine.stats().room == 2
    engine.extend("chat1", said(3), seed=1)
    done = drain(engine)["chat1"]
    assert bits(done) == fresh(done, seed=1)


def test_no_staying_sequence_is_evicted_if_that_frees_too_little() -> None:
    engine = make(speculation="off", kv_cache_tokens=16 * 12)
    engine.submit(staying())
    drain(engine)
    engine.submit(request("runs", tuple(range(100, 196))))  # seven of the twelve blocks
    engine.step()
    engine.submit(request("waits", tuple(range(90)), seed=2, max_tokens=30))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    assert engine.scheduler.staying["chat"].resting
    assert set(drain(engine)) == {"runs", "waits"}


def test_room_counts_the_blocks_of_staying_sequences_as_free() -> None:
    engine = make(speculation="off", kv_cache_tokens=16 * 16)
    before = engine.stats()
    engine.submit(staying())
    drain(engine)
    after = engine.stats()
    assert after.num_free_blocks < before.num_free_blocks
    assert (after.room, after.num_free_tokens) == (before.room, before.num_free_tokens)


def test_an_extension_uses_its_own_or_the_previous_parameters() -> None:
    engine = make(speculation="off")
    engine.submit(staying())
    drain(engine)
    colder = SamplingParams(max_tokens=5, temperature=0.3, ignore_eos=True)
    for params in (colder, None):
        engine.extend("chat", said(1), seed=3, params=params)
        done = drain(engine)["chat"]
        assert len(done.token_ids) == 5
        assert bits(done) == fresh(done, seed=3, params=colder)
    engine.extend("chat", (), seed=4)  # nothing is said: it goes on
    done = drain(engine)["chat"]
    assert bits(done) == fresh(done, seed=4, params=colder)


def test_an_extended_sequence_can_be_preempted_and_moved() -> None:
    """Its blocks are then not those of one prompt, so they are not shared until recomputed."""
    here, there = make(), make()
    for name in ("preempted", "moved", "in rounds", "waiting"):
        here.submit(staying(name, seed=len(name)))
        drain(here)
        here.extend(name, said(1), seed=3)
        if name != "waiting":
            here.step()
        match name:
            case "preempted":
                assert here.preempt(name)
                done = drain(here)[name]
            case "in rounds":
                finished = in_rounds(here, there, name, np.random.default_rng(2))
                done = [*finished, *drain(there).values(), *drain(here).values()][0]
            case _:
                at_once(here, there, name, np.random.default_rng(2))
                done = drain(there)[name]
        assert bits(done) == fresh(done, seed=3)
        whole = Request(id="other", prompt_token_ids=done.prompt_token_ids, params=PARAMS, seed=5)
        for engine in (here, there):
            engine.submit(whole)
            assert bits(drain(engine)["other"]) == fresh(done, seed=5)
    there.extend("moved", said(2), seed=6)
    done = drain(there)["moved"]
    assert bits(done) == fresh(done, seed=6), "it stays where it finished"


def test_new_weights_free_staying_memory_and_end_pinned_sequences() -> None:
    engine, newer = make(), perturbed(model(), 0.3)
    engine.submit(staying())
    engine.submit(staying("pinned", weights_version=0))
    drain(engine)
    engine.load_weights(newer.state_dict(), version=1)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.extend("chat", said(1), seed=3)
    done = drain(engine)["chat"]
    assert bits(done) == fresh(done, seed=3, weights=newer)
    with pytest.raises(WeightsVersionError):
        engine.extend("pinned", said(1), seed=3)
    assert engine.cancel("pinned")


def test_an_impossible_extension_is_refused_and_changes_nothing() -> None:
    engine = make()
    engine.submit(staying())
    engine.submit(request("other"))
    with pytest.raises(InvalidRequest, match=r"^request_id: is not kept here"):
        engine.extend("chat", said(1), seed=3)
    drain(engine)
    for name in ("other", "nobody"):
        with pytest.raises(InvalidRequest, match=r"^request_id: is not kept here"):
            engine.extend(name, said(1), seed=3)
    with pytest.raises(InvalidRequest, match=r"^id: is already in the engine"):
        engine.submit(staying())
    for tokens, field in (((1,) * 200, "prompt_token_ids"), ((9999,), "prompt_token_ids"), ((1,) * 70, "max_tokens")):
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            engine.extend("chat", tokens, seed=3)
    with pytest.raises(InvalidRequest, match=r"^seed: "):
        engine.extend("chat", said(1), seed=-1)
    with pytest.raises(InvalidRequest, match=r"^stays: "):
        engine.submit(Request(id="odd", prompt_token_ids=(1,), params=PARAMS, seed=0, stays=1))  # type: ignore[arg-type]
    assert talk(engine, range(1, 2)) <= len(said(1)) + 1


def test_tokens_accepted_after_a_stop_token_are_dropped_from_the_context() -> None:
    engine = make(speculation=DraftPlan(drafter="model", depth=6), draft=model())  # it is always right
    engine.submit(request("free", max_tokens=20))
    free = drain(engine)["free"].token_ids
    too_far = 0
    for token in free[4:12]:
        engine.submit(staying("chat", params=SamplingParams(max_tokens=20, stop_token_ids=(token,))))
        stopped = drain(engine)["chat"]
        assert stopped.finish_reason == "stop"
        engine.extend("chat", said(1), seed=4, params=PARAMS)
        done = drain(engine)["chat"]
        assert bits(done) == fresh(done, seed=4)
        engine.cancel("chat")
        too_far += stopped.stats.num_drafted > stopped.stats.num_accepted  # all of them are accepted, some too late
    assert too_far

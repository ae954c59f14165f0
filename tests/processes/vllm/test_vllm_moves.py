"""Sequences leave and rejoin vLLM at any time by their tokens alone."""

import asyncio
import copy
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import moving
import numpy as np
import pytest
from movers import Generator
from vllm_children import Children

from rlhfspec.engine.base import Completion, MovableByTokens, SequenceState
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.kv.state_bytes import from_bytes, to_bytes
from rlhfspec.engine.vllm.client import VllmEngine
from rlhfspec.errors import InvalidRequest, SequenceStateError
from rlhfspec.moves.migration.control import DirectControl
from rlhfspec.testing.engine import PROMPTS, bits, drain, log_probs_of, reference, request, run
from rlhfspec.tiny import perturbed
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there
MAX_CONTEXT = 448


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    children = Children(reference(), perturbed(reference(), 0.1), max_context=MAX_CONTEXT, max_sequences=8)
    yield children
    children.close()


@pytest.fixture
def theirs(children: Children) -> VllmEngine:
    return children.engine("off", reference(), hugging_face_tokenizer())


def own() -> Any:
    config = EngineConfig(max_sequences=8, max_context=MAX_CONTEXT, profile=False, num_threads=1, speculation="off")
    return make_engine(copy.deepcopy(reference()), config, tokenizer=hugging_face_tokenizer())


def move_away_and_back(engine: MovableByTokens, name: str) -> None:
    read = from_bytes(to_bytes(engine.export_sequence(name)))
    assert isinstance(read, SequenceState)
    assert engine.cancel(name)
    engine.import_sequence(read)


def asked() -> list[Any]:
    params = [{}, {"top_k": 9, "top_p": 0.9, "temperature": 1.3}, {"temperature": 0.7}, {"temperature": 0.0}]
    return [
        request(f"r{seed}", PROMPTS[seed % 4], seed=seed, max_tokens=24, **params[seed % 4])
        for seed in range(8)
    ]  # fmt: skip


def test_sequences_moved_at_any_time_give_the_tokens_of_unmoved_ones(theirs: VllmEngine) -> None:
    wanted = run(theirs, *asked())
    draw, done, moves = np.random.default_rng(3), dict[str, Completion](), 0
    for each in asked():
        theirs.submit(each)
    while theirs.has_work:
        done |= {each.id: each for each in theirs.step().finished}
        if views := theirs.sequences():
            move_away_and_back(theirs, views[int(draw.integers(len(views)))].id)
            moves += 1
        theirs.check_integrity()
    assert moves > 8
    assert {n: x.token_ids for n, x in done.items()} == {n: x.token_ids for n, x in wanted.items()}
    for name, each in done.items():
        np.testing.assert_allclose(each.log_probs, wanted[name].log_probs, atol=1e-5)
        np.testing.assert_allclose(each.tempered_log_probs, wanted[name].tempered_log_probs, atol=1e-5)
    assert sum(each.stats.num_moves for each in done.values()) == theirs.stats().num_moves == moves


def test_the_move_protocol_sends_tokens_alone_between_two_vllm_children(theirs: VllmEngine) -> None:
    wanted = bits(run(own(), moving.request("x", seed=1, max_tokens=400))["x"])

    async def main() -> None:
        control = DirectControl()
        made = [Generator("here", theirs, control), Generator("there", other, control)]
        for each in made:
            control.serve(each.name, each.mover.answer)
            each.start()
        try:
            await made[0].submit("x", seed=1, max_tokens=400)
            for here, there in (made, made[::-1]):
                steps = here.steps
                await here.until(lambda here=here, steps=steps: here.steps > steps)
                moved = await here.move("x", there)
                assert (moved.how, moved.num_bytes) == ("tokens", 0), moved
            await made[0].until(lambda: not made[0].engine.has_work)
        finally:
            await asyncio.gather(*(each.mover.close() for each in made))
            await asyncio.gather(*(each.stop() for each in made))
        assert [list(each.finished) for each in made] == [["x"], []]
        assert bits(made[0].finished["x"])[0] == wanted[0]
        for each in made:
            each.engine.check_integrity()

    with closing(Children(reference(), reference(), max_context=MAX_CONTEXT, max_sequences=8)) as others:
        other = others.engine("off", reference(), hugging_face_tokenizer())
        asyncio.run(main())


def test_our_engine_refuses_a_sequence_that_vllm_began(theirs: VllmEngine) -> None:
    begun(theirs)
    state = theirs.export_sequence("7")
    with pytest.raises(SequenceStateError, match="architecture"):
        own().import_sequence(state)
    with pytest.raises(SequenceStateError, match="architecture"):
        own().reserve(state.manifest)
    theirs.cancel("7")


def begun(engine: VllmEngine) -> None:
    engine.submit(request("7", max_tokens=24))
    for _ in range(4):
        engine.step()


def test_an_exported_sequence_stays_in_the_engine_until_it_is_cancelled(theirs: VllmEngine) -> None:
    wanted = bits(run(theirs, request("7", max_tokens=24))["7"])
    begun(theirs)
    [view] = theirs.sequences()
    assert (view.num_generated, view.num_held, view.num_prefill, view.is_waiting) == (4, 7, 0, False)
    theirs.export_sequence("7")
    assert not theirs.has_work
    theirs.check_integrity()
    with pytest.raises(InvalidRequest, match="already in the engine"):
        theirs.submit(request("7"))
    theirs.reattach("7")
    assert bits(drain(theirs)["7"])[0] == wanted[0]
    for call in (theirs.reattach, theirs.export_sequence, theirs.manifest):
        with pytest.raises(InvalidRequest, match="request_id"):
            call("7")
    begun(theirs)
    state = theirs.export_sequence("7")
    assert theirs.cancel("7")
    assert not theirs.cancel("7")
    theirs.import_sequence(state)
    assert bits(drain(theirs)["7"])[0] == wanted[0]


def test_an_import_that_does_not_fit_is_refused_by_field(theirs: VllmEngine) -> None:
    begun(theirs)
    state = theirs.export_sequence("7")
    theirs.cancel("7")
    manifest = state.manifest
    wrong = {
        "architecture": {"manifest": replace(manifest, architecture="another")},
        "weights_version": {"manifest": replace(manifest, weights_version=1)},
        "schema": {"manifest": replace(manifest, schema=2)},
        "token_ids": {"token_ids": np.full_like(state.token_ids, 1 << 20)},
        "log_probs": {"log_probs": state.log_probs[1:]},
        "num_tokens": {"manifest": replace(manifest, num_tokens=1 << 20)},
    }
    for field, changes in wrong.items():
        with pytest.raises(SequenceStateError, match=field):
            theirs.import_sequence(replace(state, **changes))
    assert theirs.abilities.moves_kv is None
    assert not theirs.has_work
    theirs.check_integrity()


def test_each_token_has_the_version_of_its_weights_after_a_move(theirs: VllmEngine) -> None:
    newer = perturbed(reference(), 0.3)
    begun(theirs)
    state = theirs.export_sequence("7")
    theirs.cancel("7")
    theirs.load_weights(newer.state_dict(), version=3)
    theirs.import_sequence(state)
    done = drain(theirs)["7"]
    assert done.weights_versions == (0,) * 4 + (3,) * 20
    for version, model in ((0, reference()), (3, newer)):
        chosen = np.array(done.weights_versions) == version
        np.testing.assert_allclose(np.array(done.log_probs)[chosen], log_probs_of(model, done)[chosen], atol=2e-5)

"""Suites of links, weight stores and engines see bugs: each of these breaks one promise, and its test is red."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhfspec.engine import Engine, EngineStep, Request
from rlhfspec.engine.base import SequenceState
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.kv.state_bytes import checksum_of
from rlhfspec.engine.loading import make_engine
from rlhfspec.messages.records import Role, Weights
from rlhfspec.moves.migration.links.base import Sending
from rlhfspec.moves.migration.links.inbox import Landing
from rlhfspec.moves.migration.links.opening import make_landing, open_sending
from rlhfspec.testing.engine import EngineContract, reference
from rlhfspec.testing.link import LinkContract
from rlhfspec.testing.movable import MovableWithKVContract
from rlhfspec.testing.weight_store import WeightStoreContract
from rlhfspec.training.weights import MemoryWeightStore
from rlhfspec.training.weights.base import StateDict

RED = (AssertionError, pytest.fail.Exception)


class Through:
    """Whatever it does not do itself, the other does."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


class OneBitOff(Through):
    def send(self, key: str, num_bytes: int) -> None:
        self._room[0] ^= 1
        self._other.send(key, num_bytes)

    def room(self, num_bytes: int) -> memoryview:
        self._room = self._other.room(num_bytes)
        return self._room


class TakesAnyLength(Through):
    def send(self, key: str, num_bytes: int) -> None:
        self._other.send(key, num_bytes + 1)

    def room(self, num_bytes: int) -> memoryview:
        return self._other.room(num_bytes + 1)[:num_bytes]


@pytest.mark.parametrize(
    ("broken", "test", "arguments"),
    [
        (OneBitOff, "test_bytes_arrive_whole", (4097,)),
        (OneBitOff, "test_what_lies_there_is_not_touched_before_it_is_done", ()),
        (TakesAnyLength, "test_another_length_is_refused", ()),
    ],
)
def test_a_broken_link_is_seen(broken: type[Through], test: str, arguments: tuple[Any, ...]) -> None:
    class Suite(LinkContract):
        def landing(self, **settings: Any) -> Landing:
            return make_landing("memory", **settings)

        def sending(self, offer: str, **settings: Any) -> Sending:
            return broken(open_sending(offer, **settings))

    with pytest.raises(RED):
        getattr(Suite(), test)(*arguments)


class KeepsWhatItWasGiven(MemoryWeightStore):
    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        record = super().put(job, role, version, state_dict)
        kept, _ = self._versions[job, role][version]
        self._versions[job, role][version] = kept, dict(state_dict)
        return record


class BelievesEveryRecord(MemoryWeightStore):
    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        return super().get(replace(record, digest=self._versions[record.job, record.role][record.version][0]))


class KeepsEverything(MemoryWeightStore):
    def __init__(self, *, keep: int) -> None:
        super().__init__(keep=100)


class CopiesTiedTensors(MemoryWeightStore):
    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in super().get(record).items()}


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (KeepsWhatItWasGiven, "test_training_on_in_place_changes_nothing_that_was_put"),
        (BelievesEveryRecord, "test_other_weights_than_announced_are_refused"),
        (KeepsEverything, "test_the_newest_stay_a_role_of_a_job_each"),
        (CopiesTiedTensors, "test_what_was_put_is_what_is_got"),
    ],
)
def test_a_broken_weight_store_is_seen(broken: type[MemoryWeightStore], test: str) -> None:
    class Suite(WeightStoreContract):
        def make(self, keep: int) -> MemoryWeightStore:
            return broken(keep=keep)

    with pytest.raises(RED):
        getattr(Suite(), test)()


class SameForEverySeed(Engine):
    def submit(self, request: Request) -> None:
        super().submit(replace(request, seed=3))


class SeedByCrowd(Engine):
    def submit(self, request: Request) -> None:
        super().submit(replace(request, seed=request.seed + self.stats().num_running))


class WrongLogProbs(Engine):
    def step(self) -> EngineStep:
        step = super().step()
        finished = (replace(each, log_probs=each.tempered_log_probs) for each in step.finished)
        return replace(step, finished=tuple(finished))


class CancelsNothing(Engine):
    def cancel(self, request_id: str) -> bool:
        return request_id in {view.id for view in self.sequences()}


class KeepsOldWeights(Engine):
    def load_weights(self, state_dict: Any, *, version: int, draft_state_dict: Any = None) -> None:
        super().load_weights(reference().state_dict(), version=version)


class MovesWithAnotherSeed(Engine):
    def export_sequence(self, request_id: str, start: Any = None) -> SequenceState:
        state = super().export_sequence(request_id, start)
        request = replace(state.manifest.request, seed=state.manifest.request.seed + 1)
        return replace(state, manifest=replace(state.manifest, request=request))


class TakesAnyBytes(Engine):
    def import_range(self, kv: Any) -> None:
        super().import_range(replace(kv, checksum=checksum_of(kv.kv)))


def an_engine(broken: type[Engine], model: Any, mode: Any) -> Engine:
    config = EngineConfig(max_sequences=8, max_context=96, profile=False, num_threads=1, speculation=mode)
    engine = make_engine(model, config)
    engine.__class__ = broken
    return engine


@pytest.mark.parametrize(
    ("broken", "test", "arguments"),
    [
        (SameForEverySeed, "test_another_seed_gives_other_tokens_and_the_same_seed_the_same", ()),
        (SeedByCrowd, "test_a_sequence_is_the_same_bits_alone_and_among_others", (1.0,)),
        (WrongLogProbs, "test_tokens_are_those_of_the_slow_decoder", (0.7,)),
        (CancelsNothing, "test_cancelled_is_forgotten_and_the_others_go_on", ()),
        (KeepsOldWeights, "test_after_new_weights_tokens_are_theirs", ()),
    ],
)
def test_a_broken_engine_is_seen(broken: type[Engine], test: str, arguments: tuple[Any, ...]) -> None:
    class Suite(EngineContract):
        def make(self, model: Any, mode: Any) -> Engine:
            return an_engine(broken, model, mode)

    with pytest.raises(RED):
        getattr(Suite(), test)(*arguments)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (MovesWithAnotherSeed, "test_tokens_alone_are_enough"),
        (TakesAnyBytes, "test_a_changed_byte_is_refused_and_changes_nothing"),
    ],
)
def test_a_broken_move_is_seen(broken: type[Engine], test: str) -> None:
    class Suite(MovableWithKVContract):
        def make(self, model: Any, mode: Any) -> Engine:
            return an_engine(broken, model, mode)

    with pytest.raises(RED):
        getattr(Suite(), test)()

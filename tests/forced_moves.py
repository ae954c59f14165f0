"""Random forced moves between engines, compared bit for bit with unmoved sequences in a plain engine."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import moving
import numpy as np
from moving import DRAFTS_FOR_ITSELF, PROMPT, SUFFIX, TREE, Bits, bits, check, make, model

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.base import Watermark
from rlhfspec.engine.kv.state_bytes import from_bytes, to_bytes
from rlhfspec.errors import SequenceStateError
from rlhfspec.tiny import perturbed
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

SPECULATIONS = ("off", "suffix", "model", "adaptive", TREE, SUFFIX)
PROMPTS = (PROMPT, (*PROMPT[:32], 200, 201, 202), tuple(range(99, 80, -1)))
STOPS = ((), (), ("e", "Q7"), ("k", "\n", "zz"))
REFUSALS = {"room", "epoch", "reservation", "weights_version"}  # what may come of a legal move at a bad time


@functools.cache
def tokenizer() -> Any:
    return hugging_face_tokenizer()


@functools.cache
def weights(version: int) -> Mapping[str, Any]:
    return perturbed(model(), 0.1, seed=version).state_dict() if version else model().state_dict()


def a_request(index: int) -> Request:
    params = SamplingParams(max_tokens=20 + 7 * (index % 3), ignore_eos=True, stop=STOPS[index % len(STOPS)])
    prompt = PROMPTS[index % len(PROMPTS)]
    return Request(id=str(index), prompt_token_ids=prompt, params=params, seed=index, history=((7, 8, 9, 7, 8),))


@functools.cache
def unmoving(make: Callable[..., Engine]) -> Engine:
    return make(speculation="off", tokenizer=tokenizer())


@functools.cache
def unmoved(index: int, versions: tuple[int, ...], make: Callable[..., Engine] = make) -> tuple[Bits, str | None]:
    engine = make(speculation="off", tokenizer=tokenizer()) if any(versions) else unmoving(make)
    engine.submit(a_request(index))
    while True:
        [view] = engine.sequences()
        wanted = versions[min(view.num_generated, len(versions) - 1)]
        if engine.weights_version != wanted and view.num_generated < len(versions):
            engine.load_weights(weights(wanted), version=wanted)
        if done := engine.step().finished:
            if any(versions):
                engine.close()
            return bits(done[0]), done[0].text


@dataclass
class Going:
    source: Engine
    destination: Engine
    mark: Watermark
    through_bytes: bool


@dataclass
class Fleet:
    engines: list[Engine]
    rng: np.random.Generator
    going: dict[str, Going] = field(default_factory=dict)
    done: dict[str, Completion] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def some(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def step(self) -> None:
        engine = self.some(self.engines)
        for done in engine.step().finished if engine.has_work else ():
            assert done.id not in self.done, "finished twice"
            self.done[done.id] = done
            if done.id in self.going:
                self.seen["finished in mid-copy"] += 1
                assert self.going.pop(done.id).destination.cancel(done.id)

    def begin(self) -> None:
        source, destination = self.rng.permutation(np.array(self.engines, object))[:2]
        names = [name for name in source.state.sequences if name not in self.going]
        if not names:
            return
        name = self.some(names)
        try:
            mark = destination.reserve(source.manifest(name))
        except SequenceStateError as error:
            self.refused(error)
            return
        self.seen["shares a prompt there"] += mark.positions[0] > 0
        self.going[name] = Going(source, destination, mark, bool(self.rng.integers(2)))

    def advance(self) -> None:
        if not self.going:
            return
        name = self.some(list(self.going))
        move = self.going[name]
        try:
            if self.rng.random() < 0.5:
                kv = move.source.export_range(name, move.mark, max_bytes=int(self.some([1, 3000, 40_000])))
                move.mark = kv.end
                move.destination.import_range(self.sent(kv, move))
            else:
                self.hand_over(name, move)
        except SequenceStateError as error:
            self.refused(error)
            self.give_up(name)

    def hand_over(self, name: str, move: Going) -> None:
        state = move.source.export_sequence(name, move.mark)
        match int(self.rng.integers(12)):
            case 0:  # what was sent of the KV is lost
                state = replace(state, rest=None)
            case 1:  # nobody answers: it goes on here
                self.give_up(name)
                return
        move.destination.import_sequence(self.sent(state, move))
        assert move.source.cancel(name)
        del self.going[name]
        self.seen["moved"] += 1

    def sent(self, record: Any, move: Going) -> Any:
        return from_bytes(to_bytes(record)) if move.through_bytes else record

    def tokens_only(self) -> None:
        source, destination = self.rng.permutation(np.array(self.engines, object))[:2]
        names = [name for name in source.state.sequences if name not in self.going]
        if not names:
            return
        name = self.some(names)
        newer = destination.weights_version > source.weights_version
        try:
            destination.import_sequence(replace(source.export_sequence(name), rest=None))
        except SequenceStateError as error:
            self.refused(error)
            source.reattach(name)
            return
        assert source.cancel(name)
        self.seen["tokens to newer weights" if newer else "tokens"] += 1

    def give_up(self, name: str) -> None:
        move = self.going.pop(name)
        move.destination.cancel(name)
        if name in move.source.scheduler.away:
            move.source.reattach(name)
            self.seen["taken back"] += 1

    def abort(self) -> None:
        if self.going:
            self.give_up(self.some(list(self.going)))
            self.seen["given up"] += 1

    def preempt(self) -> None:
        engine = self.some(self.engines)
        if engine.scheduler.running:
            engine.preempt(self.some(engine.scheduler.running).request.id)

    def change_weights(self) -> None:
        engine = self.some(self.engines)
        if self.rng.random() < 0.7:
            engine = min(self.engines, key=lambda each: each.weights_version)
        if engine.weights_version < 3:
            version = engine.weights_version + 1
            engine.load_weights(weights(version), version=version)
            self.seen["new weights"] += 1

    def change_speculation(self) -> None:
        self.some(self.engines).set_speculation(self.some(SPECULATIONS))

    def refused(self, error: SequenceStateError) -> None:
        assert error.field in REFUSALS, error
        self.seen[f"refused: {error.field}"] += 1


ACTIONS = {
    "step": 10, "begin": 4, "advance": 8, "tokens_only": 0.7, "abort": 0.5,
    "preempt": 0.4, "change_weights": 0.15, "change_speculation": 0.5,
}  # fmt: skip


def play(
    seed: int, *, num_sequences: int = 7, most_actions: int = 1500, make: Callable[..., Engine] = make
) -> Counter[str]:
    """Play random moves and return event counts. Raise AssertionError if any bit changed."""
    rng = np.random.default_rng(seed)
    options = {"tokenizer": tokenizer(), "prefill_chunk": int(rng.choice([24, 512])), "max_sequences": 5}
    if seed % 2 and make is moving.make and DRAFTS_FOR_ITSELF:
        options["draft"] = "self"
    tight = {"kv_cache_tokens": int(rng.choice([240, 400, 1024]))}
    engines = [make(speculation="off", **options, **tight) for _ in range(2 + seed % 2)]
    fleet = Fleet(engines, rng)
    for index in range(num_sequences):
        fleet.some(engines).submit(a_request(index))
    names, chances = list(ACTIONS), np.array(list(ACTIONS.values()))
    chances /= chances.sum()
    for _ in engines:
        fleet.change_speculation()
    for _ in range(most_actions):
        if len(fleet.done) == num_sequences:
            break
        getattr(fleet, str(rng.choice(names, p=chances)))()
        check(*engines)
    assert len(fleet.done) == num_sequences, "somebody is nowhere, or nobody went on"
    for engine in engines:
        for name in fleet.going:
            engine.cancel(name)
        check(engine)
        assert not engine.has_work
        assert engine.stats().num_free_blocks == engine.stats().num_blocks, "blocks are kept for nobody"
        engine.close()
    for name, done in fleet.done.items():
        assert (bits(done), done.text) == unmoved(int(name), done.weights_versions, make), f"sequence {name}"
        fleet.seen["stopped at a string"] += done.finish_reason == "stop"
        fleet.seen["moved twice or more"] += done.stats.num_moves >= 2
        fleet.seen["preempted"] += done.stats.num_preemptions > 0
        fleet.seen["drafted"] += done.stats.num_accepted > 0
    return fleet.seen

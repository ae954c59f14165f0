"""Random use of two engines that share, keep, copy, extend and move KV, with three independent judges.

# ten thousand operations and more
python -m pytest tests/torch/engine/test_engine_memory.py --hypothesis-profile=whole
"""

import copy
import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from moving import fresh_forward, kv_at
from on_device import BY_COMPANY
from sweeps import examples

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.engine.kv.cache import Prefix
from rlhfspec.errors import InvalidRequest, SequenceStateError
from rlhfspec.kernels import gumbel
from rlhfspec.tiny import perturbed, random_model

VOCAB, BLOCK = 61, 8
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=3, max_nodes=6)
MODES: tuple[str | DraftPlan, ...] = ("off", "suffix", "adaptive", TREE)
PROMPTS = [
    tuple(np.random.default_rng(stem).integers(0, VOCAB, 64)[:length].tolist())
    for stem, length in ((0, 30), (0, 30), (0, 25), (0, 17), (1, 21), (1, 5), (1, 2), (2, 36), (2, 1))
]
TEMPERATURES = (1.0, 0.7, 0.0)
ENDS = ("land", "land", "tokens", "give up", "take back")  # of a move


@functools.cache
def weights() -> list[Any]:
    model = random_model("llama", seed=3, vocab_size=VOCAB)
    return [model, perturbed(model, 0.3, seed=1), perturbed(model, 0.3, seed=2)]


def make(index: int = 0, **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": 80, "block_size": BLOCK, "profile": False, "num_threads": 1} | options
    draft = perturbed(weights()[0], 0.15)
    return make_engine(copy.deepcopy(weights()[index]), EngineConfig(**chosen), draft=draft)


@functools.cache
def engines() -> tuple[Engine, Engine]:
    return make(kv_cache_tokens=208, tree_slots=12, prefill_chunk=24), make(kv_cache_tokens=264, tree_slots=24)


@functools.cache
def judges() -> list[Engine]:
    return [make(index, speculation="off") for index in range(len(weights()))]


def replay(done: Completion, asked: Request, index_of: dict[int, int]) -> None:
    count, versions = len(done.token_ids), np.asarray(done.weights_versions)
    tokens = np.asarray((*done.prompt_token_ids, *done.token_ids), np.int32)
    wanted = len(done.prompt_token_ids) - 1 + np.arange(count)
    params, ones = asked.params, np.ones(count, np.float32)
    for version in set(done.weights_versions):
        logits = fresh_forward(judges()[index_of[version]].state.target.runner, tokens, wanted)
        said = gumbel.sample(
            logits, np.full(count, asked.seed, np.uint64), np.arange(count, dtype=np.int32),
            ones * np.float32(params.temperature), np.full(count, params.top_k, np.int32), ones,
        )  # fmt: skip
        at = versions == version
        assert np.array_equal(said.tokens.numpy()[at], tokens[wanted + 1][at])
        assert np.array_equal(said.log_probs.numpy()[at], np.asarray(done.log_probs, np.float32)[at])
        assert np.array_equal(said.tempered_log_probs.numpy()[at], np.asarray(done.tempered_log_probs, np.float32)[at])


class Memory(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()

    @initialize()
    def begin(self) -> None:
        self.engines = engines()
        self.asked: dict[str, Request] = {}
        self.left: set[str] = set()
        self.index_of = {self.version: self.index_of_version}
        self.prompts: set[tuple[int, ...]] = set()
        self.swap(0)

    @property
    def version(self) -> int:
        return self.engines[0].weights_version

    @property
    def index_of_version(self) -> int:
        return self.version % len(weights())

    @rule(place=st.integers(0, 1), prompt=st.integers(0, len(PROMPTS) - 1), length=st.integers(1, 20),
          temperature=st.sampled_from(TEMPERATURES), stays=st.booleans(), again=st.integers(1, 6))  # fmt: skip
    def submit(self, place: int, prompt: int, length: int, temperature: float, stays: bool, again: int) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        for _ in range(again):
            seed = len(self.asked)
            asked = Request(
                id=f"r{seed}", prompt_token_ids=PROMPTS[prompt], params=params, seed=seed, stays=stays,
                priority=2 * (seed % 3 == 1),
            )  # fmt: skip
            self.asked[asked.id] = asked
            self.left.add(asked.id)
            self.prompts.add(asked.prompt_token_ids)
            self.engines[place].submit(asked)
        Memory.seen["submitted"] += again

    @rule(place=st.integers(0, 1), count=st.integers(1, 6))
    def step(self, place: int, count: int) -> None:
        for _ in range(count):
            self._step(self.engines[place])

    def _step(self, engine: Engine) -> None:
        for done in engine.step().finished:
            assert done.finish_reason == "length"
            Memory.seen["finished"] += 1
            replay(done, self.asked[done.id], self.index_of)
            if not self.asked[done.id].stays:
                self.left.remove(done.id)

    @rule(place=st.integers(0, 1), which=st.integers(0, 99))
    def preempt(self, place: int, which: int) -> None:
        if name := self._pick(self.engines[place].state.sequences, which, place):
            Memory.seen["preempted"] += self.engines[place].preempt(name)

    @rule(place=st.integers(0, 1), which=st.integers(0, 99))
    def cancel(self, place: int, which: int) -> None:
        if name := self._pick(self._names(self.engines[place]), which, place):
            assert self.engines[place].cancel(name)
            self.left.remove(name)
            Memory.seen["cancelled"] += 1

    @rule(to=st.integers(0, 2), really=st.integers(0, 3))
    def now_and_then(self, to: int, really: int) -> None:
        if not really:
            self.swap(to)

    def swap(self, to: int) -> None:
        version = self.version + 1
        while version % len(weights()) != to:
            version += 1
        for engine in self.engines:
            engine.load_weights(weights()[to].state_dict(), version=version)
        self.index_of[version] = to
        Memory.seen["swapped"] += 1

    @rule(place=st.integers(0, 1), which=st.integers(0, 99), count=st.integers(0, 12))
    def extend(self, place: int, which: int, count: int) -> None:
        engine = self.engines[place]
        staying = engine.scheduler.staying
        without = {name: sequence for name, sequence in staying.items() if not sequence.resting}
        if name := self._pick(without if without and which % 2 else staying, which, place):  # few let go of their KV
            stayed, said = staying[name], tuple(range(count))
            prompt, seed = (*stayed.generated.token_ids.tolist(), *said), self.asked[name].seed + 1000
            try:
                engine.extend(name, said, seed=seed)
            except InvalidRequest:  # longer than the context
                assert len(prompt) + stayed.request.params.max_tokens > 80
                return
            asked = self.asked[name]
            self.asked[name] = replace(asked, prompt_token_ids=prompt, seed=seed)
            self.prompts.add(prompt)
            Memory.seen["extended with its KV" if stayed.resting else "extended without"] += 1

    @rule(place=st.integers(0, 1), mode=st.sampled_from(MODES))
    def switch(self, place: int, mode: str | DraftPlan) -> None:
        self.engines[place].set_speculation(mode)

    @rule(place=st.integers(0, 1), which=st.integers(0, 99), rounds=st.integers(0, 3), end=st.sampled_from(ENDS))
    def move(self, place: int, which: int, rounds: int, end: str) -> None:
        here, there = self.engines[place], self.engines[1 - place]
        name = self._pick(here.state.sequences, which, place)
        if not name or there.scheduler.find(name):
            return
        mark = None
        try:
            if rounds:
                mark = there.reserve(here.manifest(name))
            for _ in range(rounds):
                kv = here.export_range(name, mark, max_bytes=6000)
                there.import_range(kv)
                mark = kv.end
                self._step(here)
                self._step(there)
            state = here.export_sequence(name, None if end == "tokens" else mark)
        except (SequenceStateError, InvalidRequest) as refusal:  # no room, it lost its memory, or it finished
            Memory.seen[f"refused: {refusal.field}"] += 1
            there.cancel(name)
            return
        if end in ("give up", "take back"):
            there.cancel(name)
            here.cancel(name) if end == "give up" else here.reattach(name)
            self.left -= {name} if end == "give up" else set()
        else:
            there.import_sequence(state if end == "land" else replace(state, rest=None))
            assert here.cancel(name)
        Memory.seen[end] += 1

    def _pick(self, names: Iterable[str], nth: int, place: int) -> str:
        known = sorted(names)
        if not known:
            self.submit(place, nth % len(PROMPTS), 3 + nth % 17, TEMPERATURES[nth % 3], nth % 2 == 0, 1 + nth % 4)
            self._step(self.engines[place])
        return known[nth % len(known)] if known else ""

    def _names(self, engine: Engine) -> list[str]:
        scheduler = engine.scheduler
        return [*engine.state.sequences, *scheduler.staying, *scheduler.away, *scheduler.arriving]

    @invariant()
    def blocks_and_sequences_add_up(self) -> None:
        Memory.seen["operations"] += 1
        assert self.left == {name for engine in self.engines for name in self._names(engine)}
        for engine in self.engines:
            engine.check_integrity()
            self._check_rows(engine)

    def teardown(self) -> None:
        for engine in self.engines:
            self._check_kept(engine)
            for place in (engine.scheduler.away, engine.scheduler.arriving):
                for name in list(place):
                    engine.cancel(name)
            while engine.has_work:
                self._step(engine)
            for name in list(engine.scheduler.staying):
                engine.cancel(name)
            self._check_kept(engine)
            engine.check_integrity()
            assert engine.stats().num_free_blocks == engine.stats().num_blocks

    def _check_rows(self, engine: Engine) -> None:
        rows, scheduler = engine.state.rows, engine.scheduler
        for sequence in scheduler.running[-1:]:
            held = rows.tokens[sequence.row]
            for index, space in enumerate(engine.state.spaces):
                cached = int(space.cached[sequence.row])
                self._same_kv(space.runner, index, held[:cached], space.table.slots[sequence.row, :cached])
        for sequence in [each for each in scheduler.staying.values() if each.resting][-1:]:
            for index, (space, kv) in enumerate(zip(engine.state.spaces, sequence.resting, strict=True)):
                tokens = sequence.generated.token_ids[: kv.num_cached]
                self._same_kv(space.runner, index, tokens, kv.slots[: kv.num_cached])

    def _check_kept(self, engine: Engine) -> None:
        pool = engine.state.pool
        for prompt in self.prompts:
            prefix = Prefix.of(prompt, BLOCK)
            parts = [*((each, BLOCK) for each in prefix.hashes), (prefix.tail_hash, prefix.num_tail)]
            for part, (prefix_hash, count) in enumerate(parts):
                block = pool.shared.get(prefix_hash)
                for index, space in enumerate(engine.state.spaces if block is not None else ()):
                    if space.filled[block]:
                        tokens, slots = np.asarray(prompt[: part * BLOCK + count]), block * BLOCK + np.arange(count)
                        self._same_kv(space.runner, index, tokens, slots)
                        Memory.seen["blocks compared"] += 1

    def _same_kv(self, runner: ModelRunner, index: int, tokens: np.ndarray, slots: np.ndarray) -> None:
        """Compare the KV of the last positions, one per slot."""
        if len(slots):
            judge = judges()[self.index_of_version].state.spaces[index].runner
            fresh_forward(judge, tokens, np.zeros(1))
            expected = kv_at(judge, np.arange(len(tokens) - len(slots), len(tokens)))
            assert torch.equal(kv_at(runner, slots), expected)


@pytest.mark.on_the_cpu(BY_COMPANY)
@pytest.mark.timeout(1800)
def test_random_calls_leave_tokens_kv_and_blocks_right() -> None:
    Memory.seen.clear()
    run_state_machine_as_test(Memory, settings=examples(50, whole=250))
    print(dict(Memory.seen))
    missing = {
        "finished", "preempted", "cancelled", "swapped", "extended with its KV", "extended without", "land", "tokens",
        "give up", "take back", "refused: room", "blocks compared",
    } - {what for what, times in Memory.seen.items() if times}  # fmt: skip
    assert not missing, Memory.seen
    assert min([engine.stats().num_found_tokens for engine in engines()]) > 0

import copy
import gc
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from sweeps import examples

from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.tiny import perturbed, random_model

VOCAB = 31
OPERATIONS = examples(4_000, whole=10_000).max_examples
STEPS = 1_500  # of each way to draft, once a thousand are done
TREE = DraftPlan(drafter="model", depth=3, width=1, branch=2)
SUFFIX_TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)


def make(**options: object) -> Engine:
    model = random_model("llama", seed=0, vocab_size=VOCAB)
    chosen = {"max_sequences": 6, "max_context": 64, "kv_cache_tokens": 256, "profile": False, "num_threads": 1}
    config = EngineConfig(**(chosen | {"speculation": TREE} | options))
    return make_engine(copy.deepcopy(model), config, draft=perturbed(model, 0.1))


class RandomUser:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.engines = [make(), make(speculation="adaptive", block_size=16)]
        self.weights = random_model("llama", seed=0, vocab_size=VOCAB).state_dict()
        self.version = 0
        self.submitted = 0
        self.left: set[str] = set()
        self.counts: dict[str, int] = {}

    def act(self) -> None:
        chances: list[tuple[float, Callable[[Engine], None]]] = [
            (0.45, self.step), (0.25, self.submit), (0.08, self.preempt), (0.08, self.cancel), (0.1, self.move),
            (0.02, self.swap), (0.02, self.switch),
        ]  # fmt: skip
        action = chances[int(self.rng.choice(len(chances), p=[chance for chance, _ in chances]))][1]
        action(self.engines[int(self.rng.integers(2))])
        self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1

    def step(self, engine: Engine) -> None:
        for done in engine.step().finished:
            assert done.finish_reason in ("stop", "length")
            self.left.remove(done.id)

    def submit(self, engine: Engine) -> None:
        if len(engine.state.sequences) >= 12:
            return
        prompt = tuple(int(token) for token in self.rng.integers(0, 3, int(self.rng.integers(1, 36))))
        params = SamplingParams(
            max_tokens=int(self.rng.integers(1, 24)), temperature=float(self.rng.choice([0, 0.7, 1]))
        )
        name = f"r{self.submitted}"
        self.submitted += 1
        engine.submit(Request(id=name, prompt_token_ids=prompt, params=params, seed=self.submitted))
        self.left.add(name)

    def preempt(self, engine: Engine) -> None:
        if name := self.any_of(engine):
            engine.preempt(name)

    def cancel(self, engine: Engine) -> None:
        if name := self.any_of(engine):
            assert engine.cancel(name)
            self.left.remove(name)

    def move(self, engine: Engine) -> None:
        other = self.engines[1 - self.engines.index(engine)]
        if name := self.any_of(engine):
            other.import_sequence(engine.export_sequence(name))
            assert engine.cancel(name)

    def swap(self, _: Engine) -> None:
        self.version += 1
        for engine in self.engines:
            engine.load_weights(self.weights, version=self.version)

    def switch(self, engine: Engine) -> None:
        engine.set_speculation(str(self.rng.choice(["off", "suffix", "model", "adaptive", "model-d3"])))

    def any_of(self, engine: Engine) -> str:
        names = list(engine.state.sequences)
        return names[int(self.rng.integers(len(names)))] if names else ""


@pytest.mark.timeout(240)
def test_integrity_holds_after_thousands_of_random_operations() -> None:
    user = RandomUser(seed=11)
    for _ in range(OPERATIONS):
        user.act()
        for engine in user.engines:
            engine.check_integrity()
    assert user.left == {name for engine in user.engines for name in engine.state.sequences}
    while any(engine.has_work for engine in user.engines):
        for engine in user.engines:
            user.step(engine)
            engine.check_integrity()
    assert not user.left
    for engine in user.engines:
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert min(user.counts.values()) > 50, user.counts


@pytest.mark.whole("thousands of steps, counted byte by byte")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mode", "most_bytes"),
    [(TREE, 100_000), (SUFFIX_TREE, 100_000), ("off", 100_000), ("adaptive", 1_000_000)],
    ids=["tree", "suffix-tree", "off", "adaptive"],
)
def test_no_memory_grows_over_thousands_of_steps(mode: str | DraftPlan, most_bytes: int) -> None:
    """The Python heap and the KV in use stay constant once windows, journals and indexes are full."""
    engine = make(speculation=mode)
    submitted = 0

    def run(steps: int) -> None:
        nonlocal submitted
        for _ in range(steps):
            while len(engine.state.sequences) < 8:
                group = submitted // 4  # prompt groups come and go, as in training
                prompt = (group % VOCAB, group // VOCAB % VOCAB, 1, 2)
                params = SamplingParams(max_tokens=20, ignore_eos=True)
                engine.submit(Request(id=str(submitted), prompt_token_ids=prompt, params=params, seed=submitted))
                submitted += 1
            engine.step()
            owned = {block for sequence in engine.scheduler.running for block in sequence.blocks}
            assert engine.state.pool.num_blocks - engine.state.pool.num_free == len(owned)

    tracemalloc.start()
    try:
        run(1_000)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run(STEPS)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < most_bytes, f"{grown} bytes more after {STEPS} steps"

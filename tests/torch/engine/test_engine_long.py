import gc
import tracemalloc

import pytest

from rlhfspec.engine import Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.tiny import perturbed, random_model

VOCAB = 31
STEPS = 1_500  # of each way to draft, once a thousand are done
TREE = DraftPlan(drafter="model", depth=3, width=1, branch=2)
SUFFIX_TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)


@pytest.mark.whole("thousands of steps, counted byte by byte")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mode", "most_bytes"),
    [(TREE, 100_000), (SUFFIX_TREE, 100_000), ("off", 100_000), ("adaptive", 1_000_000)],
    ids=["tree", "suffix-tree", "off", "adaptive"],
)
def test_no_memory_grows_over_thousands_of_steps(mode: str | DraftPlan, most_bytes: int) -> None:
    """The Python heap and the KV in use stay constant once windows, journals and indexes are full."""
    model = random_model("llama", seed=0, vocab_size=VOCAB)
    chosen = {"max_sequences": 6, "max_context": 64, "kv_cache_tokens": 256, "profile": False, "num_threads": 1}
    engine = make_engine(model, EngineConfig(speculation=mode, **chosen), draft=perturbed(model, 0.1))
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

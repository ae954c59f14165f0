import sys

import numpy as np
import pytest
import torch
from moving import bits, drain, request

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.kv.cache import give_back, new_kv, resident_bytes
from rlhfspec.tiny.random_models import large_kv_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at as Linux has it"),
    pytest.mark.proves_anew,
]
MEGABYTE = 1 << 20
_on_the_cpu = pytest.mark.on_the_cpu("pages come and go with what is used in main memory alone")


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        dtype="bfloat16", max_sequences=4, max_context=1024, num_threads=1, speculation="suffix", profile=True
    )
    return make_engine(large_kv_model(vocab_size=260), config)


def resident(engine: Engine) -> int:
    return resident_bytes(engine.state.target.runner.kv)


@_on_the_cpu
def test_the_proof_of_a_model_leaves_nothing_in_memory() -> None:
    config = EngineConfig(max_sequences=4, max_context=256, num_threads=1, speculation="off")
    assert resident(make_engine(large_kv_model(vocab_size=260), config)) == 0


def step_with(engine: Engine, count: int) -> int:
    for index in range(count):
        prompt = tuple(np.random.default_rng(index).integers(0, 260, 400).tolist())
        engine.submit(request(str(index), prompt, max_tokens=8))
    drain(engine)
    return engine.state.pool.num_touched * engine.state.target.runner.kv[0].nbytes


def new_weights(engine: Engine) -> None:
    engine.load_weights(large_kv_model(vocab_size=260).state_dict(), version=engine.weights_version + 1)


@_on_the_cpu
def test_unused_kv_memory_is_given_back_to_the_system(engine: Engine) -> None:
    engine.set_speculation("off")
    pool = engine.state.target.runner.kv.nbytes
    assert pool > 270 * MEGABYTE
    assert resident(engine) < pool / 1000, "neither the proof nor the profile left anything"
    used = step_with(engine, 3)
    assert used > 70 * MEGABYTE
    assert abs(resident(engine) - used) < used / 20
    new_weights(engine)
    assert abs(resident(engine) - used) < used / 20, "the next step will need as much"
    less = step_with(engine, 1)
    assert less < used / 2
    new_weights(engine)
    assert abs(resident(engine) - less) < less / 20


@_on_the_cpu
def test_what_was_given_back_is_used_again_with_the_same_bits(engine: Engine) -> None:
    give_back(engine.state.target.runner.kv)
    engine.submit(request("x"))
    first = bits(drain(engine)["x"])
    engine.scheduler.drop_kv()
    give_back(engine.state.target.runner.kv)
    assert resident(engine) == 0
    engine.submit(request("x"))
    assert bits(drain(engine)["x"]) == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_blocks", [0, 1, 300])
def test_the_kv_cache_is_an_ordinary_tensor(dtype: torch.dtype, num_blocks: int) -> None:
    kv = new_kv(
        num_blocks=num_blocks, num_layers=3, block_size=4, num_kv_heads=2, head_dim=5, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert (kv.shape, kv.dtype, kv.is_contiguous()) == ((num_blocks, 3, 2, 4, 2, 5), dtype, True)
    kv += 1
    give_back(kv, first_block=num_blocks // 2)
    kept = kv[: num_blocks // 2]
    assert torch.equal(kept, torch.ones_like(kept)), "nothing of the blocks before"
    assert not kv[num_blocks // 2 + 52 :].any(), "a page behind the first one given back"
    kv += 1
    assert torch.equal(kv[: num_blocks // 2], kept)

"""A device's memory and costs, and one copy to it and one back in a step."""

import gc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from flash_played import have_flash, played_there
from on_device import call_again
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward import chunks, graphs, profile, runner
from rlhfspec.engine.forward.staging import Staging
from rlhfspec.engine.kv.cache import SlotTable
from rlhfspec.engine.kv.space import KVSpace
from rlhfspec.errors import InvalidRequest
from rlhfspec.kernels.tree_attention import AttentionMeta
from rlhfspec.tiny import perturbed, random_model

pytestmark = pytest.mark.turns(parts=2)

MIB = 1 << 20


def engine_on_second(*, drafter: bool = False, **options: Any) -> Engine:
    used = {"max_sequences": 64, "max_context": 512, "profile": False, "speculation": "off"} | options
    model = random_model("llama", seed=0)
    return make_engine(model, EngineConfig(device="second:0", **used), draft=perturbed(model, 0.1) if drafter else None)


def kv_bytes(engine: Engine) -> int:
    return sum(space.runner.kv.nbytes for space in engine.state.spaces)


def test_weights_reach_the_device_in_the_type_in_which_they_are_kept(second: Any) -> None:
    """In float32, a model that fits might not."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12,
            max_position_embeddings=128,
        )
    ).eval()  # fmt: skip
    weights = sum(parameter.numel() for parameter in model.parameters()) * torch.bfloat16.itemsize
    config = EngineConfig(
        device="second:0", dtype="bfloat16", max_sequences=1, max_context=64, prefill_chunk=16, profile=False,
        speculation="off",
    )  # fmt: skip
    with second.limited(int(1.8 * weights)):
        make_engine(model, config)


def test_a_roomy_device_holds_every_row_at_full_context(second: Any) -> None:
    assert engine_on_second().state.config.num_blocks == EngineConfig(max_sequences=64, max_context=512).num_blocks


@pytest.mark.parametrize("drafter", [False, True])
def test_kv_takes_what_is_left(second: Any, drafter: bool) -> None:
    whole = kv_bytes(engine_on_second(drafter=drafter))
    with second.limited((36 if drafter else 27) * MIB):
        engine = engine_on_second(drafter=drafter)
        assert 4 * MIB < kv_bytes(engine) < whole
        assert engine.stats().num_blocks == len(engine.state.target.runner.kv)
        done = engine.generate([[5] * 300] * 24, SamplingParams(max_tokens=8, ignore_eos=True))
        assert [len(each.token_ids) for each in done] == [8] * 24
        engine.check_integrity()
        smaller = kv_bytes(engine)
        del engine
        gc.collect()
        assert kv_bytes(engine_on_second(drafter=drafter, gpu_memory_fraction=0.6)) < smaller


def test_a_model_that_does_not_fit_is_refused_with_the_sum(second: Any) -> None:
    with second.limited(MIB // 4), pytest.raises(InvalidRequest) as refused:
        engine_on_second()
    assert refused.value.field == "gpu_memory_fraction"
    assert "weights" in str(refused.value)


def test_a_forward_that_does_not_fit_is_refused_with_the_sum(second: Any) -> None:
    said = r"2 forwards take .* GB, keys and values of one sequence take"
    with second.limited(12 * MIB), pytest.raises(InvalidRequest, match=said):
        engine_on_second()
    with second.limited(5 * MIB), pytest.raises(InvalidRequest, match="out of memory"):
        engine_on_second()


def test_a_requested_cache_size_is_used_or_refused(second: Any) -> None:
    assert engine_on_second(kv_cache_tokens=1024).stats().num_blocks == 64
    with second.limited(4 * MIB), pytest.raises(InvalidRequest, match="keys and values take"):
        engine_on_second(kv_cache_tokens=1 << 20)


TREE = DraftPlan(drafter="model", depth=3, width=2, branch=2)


class DeviceClock:
    def __init__(self, second: Any) -> None:
        self.now, self._second, self._num_kernels = 0.0, second, second.seen().kernels

    def synchronize(self, *device: Any) -> None:
        self.now += self._second.seen().kernels > self._num_kernels
        self._num_kernels = self._second.seen().kernels

    def perf_counter(self) -> float:
        return self.now


def test_timing_skips_the_first_call_and_waits_for_the_device(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on_second(max_sequences=4, max_context=64)
    clock = DeviceClock(second)
    monkeypatch.setattr(torch.get_device_module("second"), "synchronize", clock.synchronize)
    monkeypatch.setattr(profile, "time", clock)
    target = engine.state.target.runner
    for draft in (False, True):
        assert profile._time_forward(target, 4, 16, engine.state.target.table.slots.shape, draft=draft) == 1.0


def test_the_profile_times_the_same_graphs_that_steps_replay(second: Any) -> None:
    """Graphs depend on the slot table's shape, so the profile uses the engine's."""
    engine = engine_on_second(max_sequences=4, max_context=64)
    target = engine.state.target.runner
    target._graphs = graphs.GraphedForward(target._run_layers, torch.device("second:0"), call_again)
    profile.profile(engine.state)
    shapes = set(target._graphs._captured)
    assert {shape[2] for shape in shapes} == {engine.state.target.table.slots.shape}
    engine.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=8))
    assert set(target._graphs._captured) == shapes


def test_a_graph_capture_tolerates_calls_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture mode "global" would break on calls of other threads, such as a trainer's."""
    given: list[dict[str, Any]] = []
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: type("Graph", (), {"replay": lambda self: None})())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **keywords: given.append(keywords) or nullcontext())
    assert graphs.CudaCapture()(lambda: torch.ones(1))().item() == 1.0
    assert given == [{"pool": (0, 1), "capture_error_mode": "thread_local"}]


@pytest.mark.parametrize(("speculation", "exact"), [("off", "off"), (TREE, "off"), (TREE, "on")])
def test_all_graphs_are_captured_before_the_first_step(
    second: Any, monkeypatch: pytest.MonkeyPatch, speculation: Any, exact: str
) -> None:
    """All graphs are captured at construction, the largest first, as a capture takes as long as many steps."""
    captured: list[int] = []

    def capture(run: Any) -> Any:
        captured.append(run().shape[1])
        return run

    monkeypatch.setattr(runner, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "CudaCapture", lambda: capture)
    settings = {"max_sequences": 4, "max_context": 64, "prefill_chunk": 8, "tree_slots": 16}
    engine = engine_on_second(drafter=True, speculation=speculation, exact=exact, **settings)
    assert captured == [rows for space in captures(engine) for rows in space]
    at_the_start = len(captured)
    assert at_the_start > 0
    engine.generate([[5, 6, 7]] * 3 + [[8] * 20], SamplingParams(max_tokens=12))
    assert len(captured) == at_the_start


def captures(engine: Any) -> list[list[int]]:
    found = []
    for space in engine.state.spaces:
        shapes = [key[:2] for key in space.runner._graphs._captured]
        assert shapes == sorted(shapes, reverse=True)
        found.append([rows for rows, _ in shapes])
    return found


UP, DOWN = 1, 1  # copies a step
TABLE_BYTES = 4 * (1024 + 65)  # of a row


@pytest.fixture
def played(second: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from second_device.attention import attend

    for module in (runner, chunks):
        monkeypatch.setattr(module, "tree_attention", attend)
    return second


def engine_of(**options: Any) -> Engine:
    settings = {"max_sequences": 4, "max_context": 1024, "profile": False, "num_threads": 1, "kv_cache_tokens": 8192}
    draft = perturbed(random_model("llama", seed=0), 0.1) if options.pop("drafts", False) else None
    model = random_model("llama", seed=0)
    for each in filter(None, (model, draft)):
        each.config.max_position_embeddings = 2048
    return make_engine(model, EngineConfig(device="second:0", **(settings | options)), draft=draft)


def submitted(engine: Engine) -> Engine:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, top_k=20)
    for place, prompt in enumerate(((5, 6, 7), (8, 9) * 9, (5, 6, 7), (3,) * 20)):
        engine.submit(Request(id=f"r{place}", prompt_token_ids=prompt, params=params, seed=place))
    engine.step()
    engine.step()
    return engine


@pytest.mark.parametrize("speculation", ["off", DraftPlan(drafter="suffix", depth=4, width=2, branch=2)])
@pytest.mark.parametrize("exact", ["off", "on", "off, with graphs"])
def test_a_step_copies_once_to_the_device_and_once_back(played: Any, speculation: Any, exact: str) -> None:
    engine = engine_of(speculation=speculation, exact=exact.partition(",")[0])
    if "graphs" in exact:
        there = engine.state.target.runner
        there._graphs = graphs.GraphedForward(there._run_layers, torch.device("second:0"), call_again)
    submitted(engine)
    num_drafted = 0
    for _ in range(12):
        with played.counted() as seen:
            num_drafted += engine.step().num_verified_nodes
        assert (seen.h2d, seen.d2h, seen.waits) == (UP, DOWN, DOWN), seen.names
        assert seen.h2d_bytes < TABLE_BYTES, "rows of the slot table go up whole"
    assert (num_drafted > 0) is (speculation != "off")


def test_flash_attention_chunks_add_no_copy_and_no_wait(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    have_flash(monkeypatch, played_there(played), least_rows=8)
    engine = submitted(engine_of(speculation="off", prefill_chunk=24))
    params = SamplingParams(max_tokens=4)
    for place in range(3):
        prompt = tuple(range(3 + place, 63 + place))
        engine.submit(Request(id=f"longer{place}", prompt_token_ids=prompt, params=params, seed=9))
    for name in ("r0", "r1", "r2"):
        engine.cancel(name)
    num_prefilled = 0
    for _ in range(7):
        with played.counted() as seen:
            num_prefilled += engine.step().num_prefill_tokens
        assert (seen.h2d, seen.d2h, seen.waits) == (UP, DOWN, DOWN), seen.names
        assert seen.h2d_bytes < TABLE_BYTES
    assert num_prefilled > 150
    assert engine.reports["model"].prefill == "varlen_attn"


def test_each_level_of_a_drafting_model_adds_one_copy_each_way(played: Any) -> None:
    plan = DraftPlan(drafter="model", depth=3, width=2, branch=2)
    engine = submitted(engine_of(speculation=plan, drafts=True))
    for _ in range(4):
        with played.counted() as seen:
            engine.step()
        assert seen.h2d <= UP * (1 + plan.depth), seen.names
        assert seen.d2h == seen.h2d


def test_the_slot_table_on_the_device_equals_the_one_on_the_host(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device keeps accepted tree entries by swapping. A stale table costs draft quality, no token."""
    num_looks, stage = 0, KVSpace.stage

    def looking(space: KVSpace, meta: AttentionMeta, **arrays: Any) -> Any:
        nonlocal num_looks
        found, given = stage(space, meta, **arrays)
        assert np.array_equal(played.opened(found.slot_table).numpy(), space.table.slots)
        num_looks += 1
        return found, given

    monkeypatch.setattr(KVSpace, "stage", looking)
    engine = submitted(engine_of(speculation=DraftPlan(drafter="model", depth=3, width=2, branch=2), drafts=True))
    steps = [engine.step() for _ in range(6)]
    assert num_looks > 20
    assert any(step.num_committed > step.num_decoding for step in steps), "drafts came true"


def test_changes_of_a_slot_table_reproduce_it_on_the_device() -> None:
    draw = np.random.default_rng(0)
    table, there = SlotTable(4, 64, 4), np.full(4 * 64, -1, np.int32)
    first, _ = table.take_changed()
    assert len(first) == 4 * 64
    for step in range(60):
        row = int(draw.integers(4))
        if step % 7 == 6:
            table.clear(row)
            table.hold(row, draw.integers(0, 99, 8).astype(np.int32))
        elif table.capacity[row] < 60:
            table.append(row, draw.integers(0, 9, 1).tolist())
        if (length := int(table.capacity[row])) > 4:
            held = np.array([draw.integers(2, length)], np.int32)
            table.keep_path(np.array([row], np.int32), held - 2, held)
        if step % 3 == 0:
            places, slots = table.take_changed()
            assert len(places) < 64
            there[places] = slots
            for each in range(4):
                owned = slice(each * 64, each * 64 + int(table.capacity[each]))
                assert np.array_equal(there[owned], table.slots.reshape(-1)[owned])


def test_staged_arrays_arrive_unchanged(second: Any) -> None:
    staging = Staging(torch.device("second:1"))
    draw = np.random.default_rng(0)
    for size in (5, 1, 400, 0):
        given = {
            "odd": draw.integers(0, 99, (size, 3)).astype(np.int32),
            "seeds": draw.integers(0, 1 << 63, size).astype(np.uint64) * 2 + 1,
            "strided": draw.random((size, 4)).astype(np.float32)[:, 1],
        }
        with second.counted() as seen:
            found = staging.up(given)
        assert seen.h2d == 1
        for name, array in given.items():
            assert found[name].device == torch.device("second:1")
            assert np.array_equal(found[name].cpu().numpy().view(array.dtype), array)
    numbers = torch.tensor([1.5, -0.0, torch.nan], device="second:1")
    with second.counted() as seen:
        down = staging.down([numbers, numbers > 1, torch.tensor([1, 2, 3], dtype=torch.int32).to("second:1")])
    assert seen.d2h == 1
    assert [each.tolist() for each in down[1:]] == [[True, False, False], [1, 2, 3]]
    assert down[0].view(np.int32).tolist() == numbers.cpu().view(torch.int32).tolist()

"""The policy in 8 bits as its own drafter: the same tokens, nearly always accepted, made anew with the weights."""

import copy
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from moving import DRAFTS_FOR_ITSELF, TREE, bits, drain, fresh_forward, kv_at, make, model, request

from rlhfspec.engine import Engine
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftOutcome, DraftPlan
from rlhfspec.engine.drafting.cost import TARGET, CostModel, CostTable, draft_kind
from rlhfspec.engine.forward import memory, models
from rlhfspec.engine.forward.few_bits import FewBits
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling import speculation
from rlhfspec.engine.scheduling.speculation import Speculator
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import MODEL_KINDS, perturbed

pytestmark = [
    pytest.mark.skipif(not DRAFTS_FOR_ITSELF, reason="needs the kernels of a CPU"),
    pytest.mark.on_the_cpu("test_few_bits_device.py has what holds on a device"),
]
CHAIN = DraftPlan(drafter="model", depth=5)


def numbers_of(engine: Engine) -> list[torch.Tensor]:
    few_bits = engine.state.few_bits
    assert few_bits is not None
    layers = [copied for copied, _ in few_bits._pairs]
    return [tensor for layer in layers for tensor in (getattr(layer, "packed", None), getattr(layer, "gate_up", None))
            if tensor is not None]  # fmt: skip


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_model_that_drafts_for_itself_keeps_the_bits_of_plain_decoding(kind: str, dtype: str) -> None:
    plain = make(model=model(kind), draft=None, dtype=dtype, speculation="off")
    engine = make(model=model(kind), draft="self", dtype=dtype)
    for number, plan in enumerate((CHAIN, TREE, "adaptive")):
        engine.set_speculation(plan)
        before = engine.stats()
        for each in (engine, plain):
            each.submit(request("x", seed=number, max_tokens=60))
        assert bits(drain(engine)["x"]) == bits(drain(plain)["x"])
        num_steps = engine.stats().num_steps - before.num_steps
        assert num_steps < 60 * (0.35 if plan is CHAIN else 0.6), "most drafts are accepted"


def test_the_effect_of_drafts_is_counted() -> None:
    engine = make(draft="self", speculation=CHAIN, profile=True)
    assert engine.stats().drafting == ()
    for number in range(4):
        engine.submit(request(str(number), seed=number, max_tokens=60))
    done = drain(engine)
    [told] = engine.stats().drafting
    assert told.drafter == "model"
    assert len(told.acceptance) == 3
    assert min(told.acceptance) > 0.8
    assert told.level_share is not None
    assert 0 < told.level_share < 10
    first_ones = sum(each.stats.num_verifications for each in done.values()) - told.num_verifications
    assert 0 <= first_ones <= 4, "a prompt's token is not drafted"
    assert told.tokens_per_verification > 2.5
    assert np.isfinite(told.saved_seconds)


def test_a_draft_for_part_of_the_batch_counts_only_that_part() -> None:
    engine = make(draft="self", speculation=DraftPlan(drafter="model", depth=5, num_sequences=1))
    for number in range(8):
        engine.submit(request(str(number), seed=number, max_tokens=60))
    done = drain(engine)
    [told] = engine.stats().drafting
    assert 4 * told.num_verifications < sum(each.stats.num_verifications for each in done.values())
    assert told.tokens_per_verification > 2.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_drafter_follows_new_weights_of_the_policy(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlhfspec.engine.forward.few_bits")
    engine, plain = make(draft="self", dtype=dtype, speculation=CHAIN), make(draft=None, dtype=dtype, speculation="off")
    first = [numbers.clone() for numbers in numbers_of(engine)]
    new = perturbed(model(), 0.5, seed=3)
    for each in (engine, plain):
        each.submit(request("x", max_tokens=60))
        each.step()
        each.load_weights(dict(model().state_dict()), version=1)
        each.load_weights(dict(new.state_dict()), version=2)
    assert all(map(torch.equal, numbers_of(engine), first)), "nothing was drafted since"
    assert bits(drain(engine)["x"]) == bits(drain(plain)["x"])
    assert ["quantised the policy" in line for line in caplog.messages] == [True], "once, for the engine that drafts"
    there_at_once = numbers_of(make(model=new, draft="self", dtype=dtype))
    assert all(map(torch.equal, numbers_of(engine), there_at_once))
    assert not any(map(torch.equal, numbers_of(engine), first))


def test_the_time_of_quantising_counts_against_what_is_saved_and_not_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, engine = FewBits.requantise, make(draft="self", speculation=CHAIN)
    selector = engine.speculation.selector
    observe, step_seconds = selector.observe, []

    def slow(few_bits: FewBits) -> float:
        time.sleep(2.0)
        return genuine(few_bits) + 2.0

    def watch(seen: DraftOutcome) -> None:
        step_seconds.append(seen.step_seconds)
        observe(seen)

    monkeypatch.setattr(FewBits, "requantise", slow)
    monkeypatch.setattr(selector, "observe", watch)
    engine.load_weights(dict(model().state_dict()), version=1)
    engine.submit(request("x", max_tokens=60))
    drain(engine)
    [told] = engine.stats().drafting
    assert told.saved_seconds < -1.0
    assert max(step_seconds) < 2.0


def test_the_cache_holds_what_the_policy_writes() -> None:
    """What a draft wrote behind the verified tokens never stays where the policy's KV should be."""
    engine, fresh = make(draft="self"), make(draft=None, speculation="off")
    space, rows = engine.state.target, engine.state.rows
    engine.submit(request("x", max_tokens=60))
    compared = 0
    while engine.has_work:
        for sequence in engine.scheduler.running:
            length = int(space.cached[sequence.row])
            fresh_forward(fresh.state.target.runner, rows.tokens[sequence.row, :length], np.zeros(1))
            afresh = kv_at(fresh.state.target.runner, np.arange(length))
            assert torch.equal(kv_at(space.runner, space.table.slots[sequence.row, :length]), afresh)
            compared += 1
        engine.step()
    assert compared > 10


def test_a_self_drafter_adds_no_kv_to_a_move() -> None:
    engines = [make(draft="self"), make(draft=None, speculation="off")]
    assert len(engines[0].state.spaces) == 1
    assert engines[0].state.target.runner.fingerprint() == engines[1].state.target.runner.fingerprint()


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"dtype": "float32", "arithmetic": "torch"}])
def test_a_self_drafter_is_refused_without_cpu_kernels(options: dict[str, Any]) -> None:
    config = EngineConfig(max_sequences=2, max_context=64, profile=False, num_threads=1, **options)
    with pytest.raises(InvalidRequest, match=r"drafter: .*CPU kernels.*self"):
        make_engine(copy.deepcopy(model()), config, draft="self")
    engine = make_engine(copy.deepcopy(model()), config, draft="auto")
    assert engine.state.draft is None, "auto goes without"
    for mode in ("model", CHAIN, "model-d4"):
        with pytest.raises(InvalidRequest, match=r"drafter: .*CPU kernels.*auto"):
            make_engine(copy.deepcopy(model()), replace(config, speculation=mode), draft="auto")


@pytest.mark.parametrize(("level", "pays"), [(0.3, True), (0.8, True), (1.0, False)])
def test_auto_drafters_that_do_not_pay_are_dropped(monkeypatch: pytest.MonkeyPatch, level: float, pays: bool) -> None:
    tables = {TARGET: [1.0, 1.5], draft_kind("model"): [level, level], draft_kind("model", first=True): [level, level]}
    costs = CostModel({kind: CostTable([1, 64], seconds) for kind, seconds in tables.items()})
    monkeypatch.setattr(Speculator, "_profile", lambda self: costs)
    engine, plain = make(draft="auto", speculation="adaptive", profile=True), make(draft=None, speculation="off")
    assert (engine.state.few_bits is not None) == ("model" in engine.speculation.drafters) == pays
    for each in (engine, plain):
        each.submit(request("x", max_tokens=60))
    assert bits(drain(engine)["x"]) == bits(drain(plain)["x"])


@pytest.mark.parametrize(("level", "pays"), [(0.8, True), (0.96, False)])
def test_one_row_shows_what_can_never_pay(monkeypatch: pytest.MonkeyPatch, level: float, pays: bool) -> None:
    measured: list[tuple[bool, bool]] = []

    def measure(state: EngineState, *, only_one_row: bool = False) -> CostModel:
        measured.append((only_one_row, state.few_bits is not None))
        seconds = {TARGET: [1.0], draft_kind("model"): [level], draft_kind("model", first=True): [level]}
        return CostModel({kind: CostTable([1], each) for kind, each in seconds.items()})

    monkeypatch.setattr(speculation, "profile", measure)
    monkeypatch.setenv("RLHFSPEC_KEPT", "")
    engine = make(draft="auto", speculation="adaptive", profile=True)
    assert measured == [(True, True), (False, pays)]
    assert (engine.state.few_bits is not None) == pays


def test_auto_needs_room_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "spare_bytes", lambda config, runner: 1000)
    assert make(draft="auto", speculation="adaptive").state.few_bits is None
    assert make(draft="self").state.few_bits is not None, "it was asked for"


def test_costs_measured_before_drafting_drop_what_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostModel({kind: CostTable([1, 64], [1.0, 1.0]) for kind in (TARGET, draft_kind("model"))})
    monkeypatch.setattr(Speculator, "_profile", lambda self: costs)
    engine = make(draft="auto", speculation="off", profile=True)
    assert engine.state.few_bits is not None
    engine.speculation.measure()
    engine.set_speculation("adaptive")
    assert engine.state.few_bits is None
    assert list(engine.speculation.drafters) == ["suffix"]


def test_spare_memory_of_a_cpu_contains_kv_and_a_full_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_on_the_host", lambda: 1 << 20)
    engine = make(draft="auto", speculation="adaptive", max_sequences=256)
    runner, config = engine.state.target.runner, engine.state.config
    assert engine.state.few_bits is not None
    assert runner.bytes_per_position * config.num_blocks * config.block_size > memory.spare_bytes(config, runner) > 0

    def fill(*_: Any) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory, "is_measured", lambda device: True)
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1 << 40)
    monkeypatch.setattr(memory, "_forward_bytes", fill)
    assert memory.spare_bytes(config, runner) == 0


def test_the_self_drafter_shares_all_weights_but_the_matrices() -> None:
    engine = make(draft="self")
    few_bits = engine.state.few_bits
    assert few_bits is not None
    held = {tensor.data_ptr() for tensor in engine.state.target.runner.fused.held()}
    mine = [tensor for name, tensor in few_bits.runner.parts.model.state_dict().items() if "embed" in name]
    assert mine
    assert all(tensor.data_ptr() in held for tensor in mine)

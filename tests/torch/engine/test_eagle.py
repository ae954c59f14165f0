"""EAGLE-3 heads draft what their format says, change no token, and learn."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_heads import best_drafts, write_head
from moving import at_once, bits, drain, in_rounds, request
from recorded_drafts import recorded
from safetensors.torch import load_file
from transformers import LlamaConfig

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.distilling import before, learning as distilling
from rlhfspec.engine.distilling.before import begin, drafter_of
from rlhfspec.engine.distilling.lessons import Lesson, LessonRing
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward.models import load_drafter
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.heads.eagle import EagleHead, load_head, new_head, save_head
from rlhfspec.tiny import perturbed, random_model

VOCAB, DRAFTED = 61, 40
CHAIN = DraftPlan(drafter="model", depth=4)
TREE = DraftPlan(drafter="model", depth=3, width=2, branch=2)
SHORT = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9, 8], [7] * 40, [3]]


@pytest.fixture(scope="module")
def policy() -> Any:
    return random_model("llama", seed=3, vocab_size=VOCAB, num_layers=8)


@pytest.fixture(scope="module")
def folder(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    write_head(folder, policy, num_drafted=DRAFTED)
    return folder


def make(policy: Any, folder: Path | EagleHead | None, **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": 96, "profile": False, "num_threads": 1, "speculation": CHAIN}
    draft = load_head(folder) if isinstance(folder, Path) else folder
    config = EngineConfig(**chosen | ({"speculation": "off"} if folder is None else {}) | options)
    return make_engine(copy.deepcopy(policy), config, draft=draft)


def generated(engine: Engine, **params: Any) -> list[Any]:
    chosen = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | params)
    return [bits(done) for done in engine.generate(PROMPTS, chosen, seeds=range(len(PROMPTS)))]


@pytest.mark.parametrize(("arithmetic", "pauses"), [("auto", False), ("torch", False), ("auto", True)])
def test_drafts_are_those_of_the_slow_twin(
    policy: Any, folder: Path, arithmetic: str, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(folder / "model.safetensors")
    drafted = recorded(monkeypatch)
    engine = make(policy, folder, arithmetic=arithmetic, target_tpot=1e-9)
    if pauses:
        engine.submit(replace(request("chat", (5, 6, 7), max_tokens=60, temperature=0.0), priority=2))
    generated(engine, temperature=0.0)
    assert len(drafted) > (50 if pauses else 60)  # beside clients nothing is drafted until they end
    for tokens, chain in drafted:
        if len(tokens) > 1:  # a single token has no state before it
            assert chain == best_drafts(weights, policy, tokens, len(chain))


@pytest.mark.parametrize("plan", [CHAIN, TREE, "model", "adaptive"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_changes_no_bit(policy: Any, folder: Path, plan: Any, dtype: str) -> None:
    plain = generated(make(policy, None, dtype=dtype))
    assert generated(make(policy, folder, dtype=dtype, speculation=plan, max_sequences=2)) == plain


@pytest.mark.parametrize("move", [at_once, in_rounds])
def test_moves_and_preemptions_keep_bits_and_drafts(policy: Any, folder: Path, move: Any) -> None:
    wanted = bits(drain(_with(make(policy, None), request("r", (5, 6, 7))))["r"])
    here, there = _with(make(policy, folder), request("r", (5, 6, 7))), make(policy, folder)
    for _ in range(3):
        here.step()
    here.preempt("r")
    for _ in range(3):
        here.step()
    move(here, there, "r", np.random.default_rng(0))
    assert bits(drain(there)["r"]) == wanted


def _with(engine: Engine, asked: Any) -> Engine:
    engine.submit(asked)
    return engine


def test_a_head_drafts_on_another_device_as_on_the_cpu(second: Any, policy: Any, folder: Path) -> None:
    there = make(policy, folder, device="second:0", arithmetic="torch")
    found = [(done.token_ids, done.stats.num_accepted) for done in there.generate(PROMPTS, SHORT, seeds=range(5))]
    with second.without_kernels():
        here = make(policy, folder, arithmetic="torch")
        assert found == [(done.token_ids, done.stats.num_accepted) for done in here.generate(PROMPTS, SHORT, range(5))]


def test_new_weights_of_the_policy_reach_the_head(policy: Any, folder: Path) -> None:
    other = perturbed(policy, 0.5)
    engine = make(policy, folder)
    generated(engine)
    engine.load_weights(other.state_dict(), version=1)
    assert generated(engine) == generated(make(other, None))


def test_a_head_comes_back_bit_for_bit(policy: Any, folder: Path, tmp_path: Path) -> None:
    save_head(load_head(folder), tmp_path / "again")
    assert _same(load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors"))
    save_head(load_head(tmp_path / "again"), tmp_path / "third")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "third" / "config.json").read_text()


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"norm_output": True}, "norm_output"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"num_hidden_layers": 2}, "one layer"),
        ({"target_hidden_size": 7}, "hidden states of 7 values"),
        ({"draft_vocab_size": 39}, "lm_head.weight"),
        ({"attention_bias": True}, "lacks"),
    ],
)
def test_what_cannot_be_drafted_with_is_refused_by_name(
    policy: Any, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    write_head(tmp_path / "head", policy, num_drafted=DRAFTED, **config)
    with pytest.raises(InvalidRequest, match=said):
        load_head(tmp_path / "head", target_width=policy.config.hidden_size)


@pytest.mark.parametrize(
    ("of_head", "said"),
    [
        ({"vocab_size": VOCAB + 1}, "vocabulary size must equal the policy's 61"),
        ({"num_key_value_heads": 4}, "more or wider key/value heads"),
        ({"head_dim": 16}, "more or wider key/value heads"),
    ],
)
def test_a_head_that_does_not_fit_the_policy_is_refused(policy: Any, of_head: dict[str, int], said: str) -> None:
    head = new_head(policy, DRAFTED)
    config = head.config.to_dict() | of_head
    with pytest.raises(InvalidRequest, match=said):
        make(policy, EagleHead(LlamaConfig(**config), target_width=policy.config.hidden_size))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"draft_vocab_size": 40}'])
def test_a_folder_that_holds_no_drafter_is_refused_by_name(policy: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidRequest, match="drafter"):
            load_drafter(path, policy, field="drafter")


def test_one_lesson_of_one_label_teaches_a_head_nothing(policy: Any, folder: Path) -> None:
    engine = make(policy, folder, learning=1.0)
    engine.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert not engine.abilities.learning.learn_while_idle()


def test_few_long_lessons_are_never_padded_by_many_short_ones() -> None:
    ring = LessonRing(most_tokens=10_000, passes=1)
    for size in (256, *[4] * 64):
        ring.add(a_lesson(size))
    assert [len(ring.take(most_tokens=512)) for _ in range(2)] == [4, 61]


def a_lesson(size: int) -> Lesson:
    ids, values = np.zeros((size, 2), np.int32), np.zeros((size, 2), np.float32)
    states = torch.zeros(size, 1)
    return Lesson(
        tokens=np.zeros(size, np.int32), label_ids=ids, label_log_probs=values, temperature=1.0, states=states
    )


def test_a_policy_of_few_layers_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 7 layers"):
        make(random_model("llama", seed=3, vocab_size=VOCAB, num_layers=4), folder)


def test_a_new_head_learns_and_changes_no_bit(policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distilling, "LESSON_TOKENS", 64)
    monkeypatch.setattr(before, "_SHARE_DRAFTED", 2)
    policy.save_pretrained(tmp_path / "policy")
    config = EngineConfig(
        max_sequences=4, max_context=96, profile=False, num_threads=1, speculation=CHAIN, learning=1.0
    )
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.5)
    engine = begin(str(tmp_path / "policy"), None, config, PROMPTS, params)
    for seed in range(12):
        engine.generate(PROMPTS, params, seeds=[7 * seed + number for number in range(len(PROMPTS))])
        while engine.abilities.learning.learn_while_idle():
            pass
    report = engine.abilities.learning.report
    assert report.law_now[0] > report.law_before[0] + 0.05
    assert len(report.law_now) == 3, "of each depth"
    assert generated(engine) == generated(make(policy, None))
    save_head(drafter_of(engine), tmp_path / "learnt")
    again = load_head(tmp_path / "learnt", target_width=policy.config.hidden_size)
    assert len(json.loads((tmp_path / "learnt" / "config.json").read_text())["architectures"]) == 1
    assert np.array_equal(again.token_ids.numpy(), engine.state.student.model.token_ids.numpy())

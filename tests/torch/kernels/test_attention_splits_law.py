"""The law in contexts of several splits: engine, trainer and scorer have the same bits."""

import copy
import functools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlhfspec.engine import Request, SamplingParams, oracle
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest, SequenceStateError
from rlhfspec.huggingface.proof.check import report_of
from rlhfspec.kernels.cpu import build
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.sweep.ways import Samples, check_same, moving, one_by_one, preempt, together
from rlhfspec.tiny import MODEL_KINDS, perturbed, random_model
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.packed import PackedRow, pack_sequences
from rlhfspec.training.scoring import log_probs as scoring
from rlhfspec.training.scoring.log_probs import LogProbScorer

pytestmark = [
    pytest.mark.turns(parts=3),
    pytest.mark.skipif(build.load() is None, reason=f"needs the CPU kernels: {build.unavailable_reason()}"),
]
SPLIT = 64
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=2)
CONTEXT = 200
LENGTHS = (5, 60, 63, 120, 170)  # of prompts: their responses cross borders of splits, or nearly


@functools.cache
def model_of(kind: str) -> Any:
    return random_model(kind, seed=3)


def engine_of(kind: str, **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": CONTEXT, "kv_cache_tokens": 1200, "profile": False, "num_threads": 1}
    config = EngineConfig(**(chosen | {"attention_split": SPLIT, "speculation": "off"} | options))
    return make_engine(copy.deepcopy(model_of(kind)), config, draft=perturbed(model_of(kind), 0.1))


def some_requests(seed: int, lengths: tuple[int, ...] = LENGTHS, temperature: float = 0.8) -> list[Request]:
    draw = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    prompts = [tuple(draw.integers(3, 60, length).tolist()) for length in lengths]
    return [Request(id=f"r{n}", prompt_token_ids=p, params=params, seed=seed + n) for n, p in enumerate(prompts)]


@functools.cache
def alone(kind: str, dtype: str) -> Samples:
    return one_by_one(engine_of(kind, dtype=dtype), some_requests(1))


def packed(samples: Samples) -> tuple[PackedRow, torch.Tensor]:
    batch = pack_sequences([s.prompt_token_ids for s in samples.values()], [s.token_ids for s in samples.values()])
    return batch, torch.tensor([number for sample in samples.values() for number in sample.tempered_log_probs])


every_kind = pytest.mark.parametrize("kind", MODEL_KINDS)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.mark.sweep(parts=6)
@every_dtype
@every_kind
def test_samples_are_the_same_bits_in_every_way(kind: str, dtype: str) -> None:
    wanted, requests = alone(kind, dtype), some_requests(1)
    drafted = engine_of(kind, dtype=dtype, speculation=TREE, prefill_chunk=11, num_threads=2)
    check_same("together, with trees, in chunks", wanted, together(drafted, requests))
    suffix = engine_of(kind, dtype=dtype, speculation="suffix")
    check_same("preempted, with the suffix drafter", wanted, together(suffix, requests, every_step=preempt))
    check_same("moving", wanted, moving(drafted, suffix, requests))


@pytest.mark.sweep(parts=4)
@every_kind
def test_split_attention_gives_hugging_face_log_probs_but_other_bits(kind: str) -> None:
    wanted = alone(kind, "float32")
    plain = copy.deepcopy(model_of(kind))
    plain.set_attn_implementation("eager")
    for one in some_requests(1):
        ours = wanted[one.id]
        with torch.inference_mode():
            theirs = oracle.decode(plain, list(one.prompt_token_ids), one.params, one.seed, forced=list(ours.token_ids))
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=2e-5, rtol=0)
    unsplit = one_by_one(engine_of(kind, attention_split=4096), some_requests(1))
    assert unsplit["r0"].log_probs == wanted["r0"].log_probs  # 24 tokens
    assert any(unsplit[name].log_probs != wanted[name].log_probs for name in wanted)  # else nothing was split here


@pytest.fixture(scope="module")
def driven() -> Engine:
    return engine_of("llama", speculation="adaptive", kv_cache_tokens=512)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 175), min_size=1, max_size=6).map(tuple), seed=st.integers(0, 1 << 30),
    mode=st.sampled_from(["off", "suffix", "model", "adaptive", TREE]), chunk=st.sampled_from([5, 64, 512]),
)  # fmt: skip
def test_no_schedule_changes_a_bit(
    driven: Engine, lengths: tuple[int, ...], seed: int, mode: str | DraftPlan, chunk: int
) -> None:
    requests = some_requests(seed, lengths)
    wanted = one_by_one(_plain(), requests)
    driven.set_speculation(mode)
    driven.scheduler.prefill_chunk = chunk
    check_same(str(mode), wanted, together(driven, requests, every_step=preempt))


@functools.cache
def _plain() -> Engine:
    return engine_of("llama")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_decoder_in_one_call_splits_as_its_layers_do(kind: str) -> None:
    engine = engine_of(kind, speculation=TREE, prefill_chunk=50)
    for space in engine.state.spaces:
        assert space.runner.native is not None
        space.runner.native = None
    check_same("layer by layer", alone(kind, "float32"), together(engine, some_requests(1)))


def test_only_engines_with_the_same_splits_exchange_sequences() -> None:
    here = engine_of("llama")
    here.submit(some_requests(1)[1])
    here.step()
    state = here.export_sequence("r1")
    with pytest.raises(SequenceStateError, match="architecture"):
        engine_of("llama", attention_split=128).import_sequence(state)
    engine_of("llama").import_sequence(state)


@pytest.mark.parametrize("split", [0, 63, 100, -64])
def test_a_split_that_tiles_do_not_fit_into_is_refused_by_name(split: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^attention_split: must be a multiple of 64"):
        EngineConfig(attention_split=split)


@pytest.mark.sweep(parts=3)
@every_dtype
@every_kind
def test_the_exact_trainer_differs_from_the_engine_by_nothing(kind: str, dtype: str) -> None:
    batch, wanted = packed(alone(kind, dtype))

    def found(split: int) -> torch.Tensor:
        model = prepared(copy.deepcopy(model_of(kind)))
        forward = ExactForward(model, 0.8, max_context=CONTEXT, dtype=dtype, attention_split=split)
        return forward(batch).log_probs.detach()

    assert float((found(SPLIT) - wanted).abs().max()) == 0.0
    if dtype == "float32":  # in bfloat16 the rounding of activations may hide it
        assert float((found(4096) - wanted).abs().max()) > 0.0


def test_across_the_default_split_engine_trainer_and_scorer_agree() -> None:
    config = tiny_config("llama", num_hidden_layers=2, max_position_embeddings=8192)
    context = 4224
    prompt = tuple(np.random.default_rng(0).integers(3, 60, 4090).tolist())
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)

    def sampled(**options: Any) -> Samples:
        chosen = {"max_sequences": 2, "max_context": context, "kv_cache_tokens": 2 * context, "profile": False}
        engine = make_engine(tiny_model(config), EngineConfig(**(chosen | {"speculation": "off"} | options)))
        return together(engine, [Request(id=f"{n}", prompt_token_ids=prompt, params=params, seed=n) for n in (1, 2)])

    samples = sampled()
    check_same("drafting", samples, sampled(speculation="suffix", prefill_chunk=300))
    batch, wanted = packed(samples)
    with torch.no_grad():
        found = ExactForward(prepared(tiny_model(config)), 0.8, max_context=context)(batch).log_probs
    assert torch.equal(found, wanted)
    scorer = LogProbScorer(tiny_model(config), temperature=0.8, max_context=context)
    assert scorer.log_probs(prompt, samples["1"].token_ids) == list(samples["1"].tempered_log_probs)
    unsplit = sampled(attention_split=8192)
    before, after = zip(samples["1"].log_probs, unsplit["1"].log_probs, strict=True), 4096 - 4090
    same = [one == other for one, other in before]
    assert all(same[: after + 1])
    assert not all(same)


def test_gradients_with_splits_are_those_of_one_softmax() -> None:
    batch, _ = packed(alone("llama", "float32"))
    weights, found = torch.linspace(-1, 1, len(batch.targets)), []
    for split in (SPLIT, 4096):
        run = ExactForward(prepared(copy.deepcopy(model_of("llama"))), 0.8, max_context=CONTEXT, attention_split=split)
        (run(batch).log_probs * weights).sum().backward()
        found.append([parameter.grad for parameter in run.model.parameters()])
    for ours, others in zip(*found, strict=True):
        assert (ours - others).abs().max() <= 1e-4 * others.abs().max()


def test_the_scorer_gives_the_generators_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RunnerConfig", partial(scoring.RunnerConfig, attention_split=SPLIT))
    scorer = LogProbScorer(copy.deepcopy(model_of("llama")), temperature=0.8, max_context=CONTEXT)
    assert scorer.report.attention_split == SPLIT
    for chunk in (512, 7):
        scorer._rows._chunk_tokens = chunk
        for sample in alone("llama", "float32").values():
            assert scorer.log_probs(sample.prompt_token_ids, sample.token_ids) == list(sample.tempered_log_probs)


def test_reports_say_how_long_splits_are() -> None:
    assert engine_of("llama").reports["model"].attention_split == SPLIT
    model = prepared(copy.deepcopy(model_of("llama")))
    assert report_of(model).attention_split is None  # torch's attention
    ExactForward(model, 0.8, max_context=CONTEXT, attention_split=SPLIT)
    assert report_of(model).attention_split == SPLIT

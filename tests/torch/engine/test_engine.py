"""The engine's features: stop, stream, cancel, new weights, moves, and bad input."""

import copy
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from moving import TREE, VOCAB, drain, make as make_without, model, request

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import PLAIN, DraftPlan
from rlhfspec.errors import InvalidRequest
from rlhfspec.testing.engine import GainStreams
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

make = partial(make_without, tokenizer=hugging_face_tokenizer())


@pytest.fixture
def engine() -> Engine:
    return make()


def test_verifications_and_accepted_drafts_add_up_to_the_tokens(engine: Engine) -> None:
    [free] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30), seeds=[7])
    assert free.stats.num_verifications + free.stats.num_accepted == 30
    assert free.stats.tokens_per_verification == 30 / free.stats.num_verifications
    params = SamplingParams(max_tokens=30, stop_token_ids=(free.token_ids[11],))
    [stopped] = engine.generate([[1, 2, 3]], params, seeds=[7])
    assert stopped.stats.num_verifications + stopped.stats.num_accepted == len(stopped.token_ids)


def test_stop_strings_end_at_the_first_token_that_completes_one() -> None:
    for speculation in ("off", TREE):
        engine = make(speculation=speculation)
        [free] = engine.generate(["ab"], SamplingParams(max_tokens=40), seeds=[3])
        text = engine.state.tokenizer.decode(list(free.token_ids))
        stop = next(letter for letter in text[8:] if letter.isascii() and letter.isprintable())
        [stopped] = engine.generate(["ab"], SamplingParams(max_tokens=40, stop=(stop,)), seeds=[3])
        assert stopped.finish_reason == "stop"
        assert stopped.text == text[: text.index(stop)]
        kept = len(stopped.token_ids)
        assert stopped.token_ids == free.token_ids[:kept]
        assert stop in engine.state.tokenizer.decode(list(free.token_ids[:kept]))
        assert stop not in engine.state.tokenizer.decode(list(free.token_ids[: kept - 1]))


def test_generate_keeps_completions_of_other_requests_for_their_caller(engine: Engine) -> None:
    engine.submit(request("mine", max_tokens=9))
    streams = GainStreams()
    streams.take(engine.step())
    engine.generate([[4, 5]], SamplingParams(max_tokens=12), seeds=[1])
    done = []
    while engine.has_work:
        done += streams.take(engine.step()).finished
    [mine] = done
    streams.check(mine)


def test_a_speculation_mode_keeps_its_selector_until_the_weights_change(engine: Engine) -> None:
    engine.set_speculation("adaptive")
    adaptive = engine.speculation.selector
    engine.set_speculation("off")
    engine.set_speculation("adaptive")
    assert engine.speculation.selector is adaptive
    engine.set_speculation("off")
    engine.load_weights(model().state_dict(), version=1)
    engine.set_speculation("adaptive")
    assert engine.speculation.selector is not adaptive


def test_a_completion_says_under_which_strategies_it_decoded() -> None:
    """The expected counts follow step reports over a preemption and a move; the first token has none."""
    engine, other, steps = make(), make(), Counter[str]()
    engine.submit(request("x", max_tokens=60))
    plans = [PLAIN, TREE, DraftPlan(drafter="suffix", depth=2)]
    for step in range(12):
        engine.set_speculation(plans[step // 2 % 3])
        report = engine.step()
        steps[report.strategy] += report.num_decoding
        if step == 6:
            assert engine.preempt("x")
            other.import_sequence(engine.export_sequence("x"))
            assert engine.cancel("x")
            engine = other
    engine.set_speculation(TREE)
    while engine.has_work:
        report = engine.step()
        steps[report.strategy] += report.num_decoding
    assert report.finished[0].stats.strategies == tuple(sorted(steps.items()))
    assert len(steps) == 3
    engine.submit(request("next", (4, 5, 6), max_tokens=1))
    assert drain(engine)["next"].stats.strategies == (), "a row starts from nothing"


def test_any_number_of_strategies_is_counted(engine: Engine) -> None:
    engine.submit(request("x", max_tokens=60))
    for depth in range(1, 21):
        engine.set_speculation(DraftPlan(drafter="suffix", depth=depth))
        engine.step()
    assert len(drain(engine)["x"].stats.strategies) >= 19


def test_a_text_prompt_gives_a_text_completion(engine: Engine) -> None:
    [done] = engine.generate(["2 + 2 ="], SamplingParams(max_tokens=5), seeds=[1])
    assert done.prompt_token_ids == tuple(engine.state.tokenizer.encode("2 + 2 ="))
    assert done.text == engine.state.tokenizer.decode(list(done.token_ids), skip_special_tokens=True)


def test_new_weights_end_requests_pinned_to_other_weights(engine: Engine) -> None:
    engine.submit(replace(request("pinned", (1,), max_tokens=40), weights_version=0))
    engine.submit(request("free", (1,), max_tokens=40))
    engine.step()
    engine.load_weights(model().state_dict(), version=3)
    done = drain(engine)
    assert done["pinned"].finish_reason == "error"
    assert "weights_version" in done["pinned"].error
    assert done["free"].finish_reason == "length"


def test_weights_with_missing_or_unknown_names_are_refused(engine: Engine) -> None:
    state = dict(model().state_dict())
    missing = {name: value for name, value in state.items() if "layers.0.mlp.gate_proj" not in name}
    with pytest.raises(ValueError, match=r"gate_proj"):
        engine.load_weights(missing, version=1)
    with pytest.raises(ValueError, match="surprise"):
        engine.load_weights(state | {"surprise": torch.zeros(1)}, version=1)
    assert engine.weights_version == 0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("prompt_token_ids", {"prompt": (1,) * 500}), ("max_tokens", {"max_tokens": 500}),
     ("stop_token_ids", {"stop_token_ids": (VOCAB,)})],
)  # fmt: skip
def test_a_bad_request_names_its_field_and_harms_nobody(engine: Engine, field: str, arguments: dict[str, Any]) -> None:
    engine.submit(request("good", max_tokens=4))
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(request("bad", **arguments))
    assert caught.value.field == field
    assert set(drain(engine)) == {"good"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_k", 1.5),
     ("top_p", 0), ("top_p", 1.1), ("max_tokens", 0), ("stop", ("",)), ("stop_token_ids", (-1,))],
)  # fmt: skip
def test_impossible_sampling_parameters_name_their_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: must"):
        SamplingParams(**{field: value})


def test_nan_logits_end_one_sequence_with_an_error() -> None:
    poisoned = copy.deepcopy(model())
    poisoned.get_input_embeddings().weight.data[200] = math.nan
    engine = make(model=poisoned, draft=perturbed(poisoned, 0.1))
    sound = make(speculation="off")
    prompts = [[1, 2, 3], [1, 200, 3], [9, 8]]
    params = SamplingParams(max_tokens=12, stop_token_ids=(200,))
    first, broken, last = engine.generate(prompts, params, seeds=[1, 2, 3])
    assert broken.finish_reason == "error"
    assert broken.error.startswith("logits:")
    assert broken.token_ids == ()
    for done, wanted in zip((first, last), sound.generate([prompts[0], prompts[2]], params, seeds=[1, 3]), strict=True):
        assert done.token_ids == wanted.token_ids
    engine.check_integrity()


def test_unknown_path_option_and_strategy_are_named(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequest, match="path: no such folder"):
        Engine.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"^path: not a loadable"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="did you mean max_sequences"):
        Engine.from_pretrained(tmp_path, max_sequence=3)


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^drafter: vocabulary size must equal"):
        make(draft=random_model("llama", seed=1, vocab_size=VOCAB + 1))


def test_model_speculation_needs_a_draft() -> None:
    with pytest.raises(InvalidRequest, match=r"^speculation: needs a draft model"):
        make_engine(copy.deepcopy(model()), EngineConfig(max_context=64, profile=False, speculation="model"))
    with pytest.raises(InvalidRequest, match=r"^speculation: must be one of adaptive"):
        make(speculation="fastest")


def test_from_pretrained_with_tokenizer_and_drafter(tmp_path: Any) -> None:
    model().save_pretrained(tmp_path / "target")
    perturbed(model(), 0.1).save_pretrained(tmp_path / "draft")
    hugging_face_tokenizer().save_pretrained(tmp_path / "target")
    engine = Engine.from_pretrained(
        tmp_path / "target", drafter=tmp_path / "draft", dtype=torch.float32, max_context=64, max_sequences=2,
        profile=False, speculation="model",
    )  # fmt: skip
    [done] = engine.generate(["hello"], SamplingParams(max_tokens=6), seeds=[1])
    [same] = make(speculation="off").generate(["hello"], SamplingParams(max_tokens=6), seeds=[1])
    assert (done.token_ids, done.text) == (same.token_ids, same.text)


def test_room_is_limited_by_rows_and_by_blocks() -> None:
    """Nothing is admitted without room, and as many sequences as stated with it."""
    wide = make(speculation="off", max_sequences=4)
    assert wide.stats().room == 4
    for index in range(6):
        wide.submit(request(f"{index}", (index, 2, 3)))
    wide.step()
    assert (wide.stats().num_running, wide.stats().num_waiting, wide.stats().room) == (4, 2, 0)
    tight = make(speculation="off", kv_cache_tokens=256)  # of context 128: two sequences
    assert tight.stats().room == 2
    for index in range(8):
        tight.submit(request(f"{index}", tuple(range(index, index + 60)), max_tokens=60))
    tight.step()
    assert tight.stats().num_waiting > 0
    assert tight.stats().room == 0

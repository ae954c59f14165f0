"""Reward models: the raw output of one label, each sample as if alone, on the CPU and a device."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import reward_desks
import torch
from hypothesis import given, strategies as st
from on_device import BY_COMPANY
from reward_desks import Desk, sample
from scorers import classifying_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from rlhfspec.errors import InvalidRequest, RewardError
from rlhfspec.job.rewards import Rewards
from rlhfspec.messages.records import Sample, Score
from rlhfspec.tiny.random_models import GROUPED, random_model
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer
from rlhfspec.training.scoring.rewards.classifier import Batches, Classifier
from rlhfspec.training.scoring.rewards.model import ModelRewards
from rlhfspec.training.scoring.rewards.sources import RewardSources


def run(folder: Path, source: dict[str, Any], *samples: Sample) -> list[Score]:
    return reward_desks.run(Desk(folder).sources({"type": "model", "dtype": "float32", **source}), list(samples))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return random classifiers: `one` with one output, `three` with three, `none` without a head."""

    folder = tmp_path_factory.mktemp("judges")
    tokenizer = hugging_face_tokenizer()
    torch.manual_seed(0)
    for name, num_labels in (("three", 3), ("one", 1)):
        shape = {**GROUPED, "vocab_size": len(tokenizer), "num_labels": num_labels}
        AutoModelForSequenceClassification.from_config(LlamaConfig(**shape)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    random_model("llama", seed=0, vocab_size=len(tokenizer)).save_pretrained(folder / "none")
    tokenizer.save_pretrained(folder / "none")
    return folder


def by_hand(folder: Path, text: str, label: int) -> float:
    return output(folder, AutoTokenizer.from_pretrained(folder)(text)["input_ids"], label)


def output(folder: Path, token_ids: list[int], label: int) -> float:
    with torch.inference_mode():
        logits = AutoModelForSequenceClassification.from_pretrained(folder).eval()(torch.tensor([token_ids])).logits
    return float(logits[0, label])


@pytest.mark.on_the_cpu(BY_COMPANY)
def test_a_reward_model_gives_the_raw_output_of_its_label(judge: Path) -> None:
    (one,) = run(judge, {"path": "one"}, sample(text="5"))
    (three,) = run(judge, {"path": "three", "label": 2}, sample(text="5"))
    assert one.components == (("one", by_hand(judge / "one", "2+2=5", 0)),)
    assert three.components == (("three", by_hand(judge / "three", "2+2=5", 2)),)
    assert one.values != three.values


@pytest.mark.on_the_cpu(BY_COMPANY)
def test_a_reward_model_scores_each_sample_as_if_alone(judge: Path) -> None:
    samples = [sample(prompt, text="x" * (1 + 7 * prompt)) for prompt in range(6)]
    together = run(judge, {"path": "one"}, *samples)
    assert together == [run(judge, {"path": "one", "concurrency": 1}, one)[0] for one in samples]
    assert len({score.values for score in together}) == 6


@pytest.mark.parametrize(
    ("source", "field", "problem"),
    [
        ({"path": "three"}, "label", "the model has 3 outputs: set the index of the reward"),
        ({"path": "three", "label": 3}, "label", "must be < 3: the model has 3 outputs, counted from 0"),
        ({"path": "nowhere"}, "path", "is not a sequence-classification model with a tokenizer"),
        ({"path": "none"}, "path", "has no trained classification head: score.weight missing"),
        ({"path": "one", "chatTemplate": True}, "chatTemplate", "the reward model's tokenizer has no template"),
    ],
)
def test_a_model_that_cannot_judge_is_refused(judge: Path, source: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        RewardSources(Rewards.model_validate({"sources": [{"type": "model", **source}]}), judge)
    assert error.value.field == f"spec.rewards.sources[0].{field}"
    assert problem in error.value.problem


def test_a_damaged_checkpoint_is_refused_at_the_start(judge: Path, tmp_path: Path) -> None:
    shutil.copytree(judge / "one", tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidRequest, match="is not a sequence-classification model with a tokenizer"):
        RewardSources(Rewards.model_validate({"sources": [{"type": "model", "path": "torn"}]}), tmp_path)


def test_a_text_too_long_for_the_model_is_an_error_and_not_cut(judge: Path) -> None:
    with pytest.raises(RewardError, match="the text has 517 tokens; the reward model takes 1 to 512"):
        run(judge, {"path": "one"}, sample(text="x" * 512))


@pytest.mark.on_the_cpu(BY_COMPANY)
def test_the_chat_template_of_the_reward_model_is_used_when_asked_for(judge: Path, tmp_path: Path) -> None:
    shutil.copytree(judge / "one", tmp_path / "chat")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    (score,) = run(tmp_path, {"path": "chat", "chatTemplate": True}, sample())
    assert score.values == (output(judge / "one", list(b"[user]2+2=[assistant]4"), 0),)


def classifier(kind: str, **options: Any) -> Classifier:
    return Classifier(classifying_model(kind, num_labels=2, **options), keep_prompts=True, name=kind)


def tokens(seed: int, count: int) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(1, 300, (count,), generator=drawn).tolist()  # type: ignore[no-any-return]


PROMPTS = [tokens(1, 90), tokens(2, 64), tokens(1, 89), tokens(3, 20)]
ANSWERS = [tokens(4, 30), tokens(5, 1), [7, 0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("kind", "options"), [("llama", {}), ("mistral", {"sliding_window": 20, "num_key_value_heads": 2}), ("gpt2", {})]
)
def test_a_kept_prompt_gives_the_bits_of_a_fresh_one(kind: str, options: dict[str, Any]) -> None:
    """The order does not matter, and the numbers equal Hugging Face's own forward of the whole text."""
    kept, fresh = classifier(kind, **options), classifier(kind, **options)
    assert kept._keeps_prompts
    for _ in range(2):
        for answer in ANSWERS:
            for prompt in PROMPTS:
                fresh.clear()
                found = kept.logits(prompt + answer, len(prompt))
                assert torch.equal(found, fresh.logits(prompt + answer, len(prompt)))
                with torch.inference_mode():
                    whole = fresh._model(torch.tensor([prompt + answer])).logits[0]
                torch.testing.assert_close(found, whole, atol=2e-5, rtol=1e-5)
    assert list(kept._caches) == [tuple(prompt) for prompt in PROMPTS[:3]]


def test_a_prompt_is_run_once_and_the_longest_unused_goes_first() -> None:
    model = classifier("llama")
    run: list[int] = []
    model._model.register_forward_pre_hook(lambda _, arguments: run.append(arguments[0].shape[1]))
    for prompt in (0, 1, 0, 1):
        model.logits(PROMPTS[prompt] + ANSWERS[0], len(PROMPTS[prompt]))
    assert run == [90, 30, 64, 30, 30, 30]
    model._most_bytes = 2 * 2 * 64 * 4 * (90 + 89)  # layers, keys and values, width, float32
    model.logits(PROMPTS[2] + ANSWERS[0], 89)
    assert list(model._caches) == [tuple(PROMPTS[1]), tuple(PROMPTS[2])]


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = classifier("llama")
    expected = model.logits(PROMPTS[0] + ANSWERS[0], 90)
    with pytest.raises(IndexError):
        model.logits([*PROMPTS[0], 300], 90)
    assert not model._caches
    assert torch.equal(model.logits(PROMPTS[0] + ANSWERS[0], 90), expected)


def test_a_class_that_looks_ahead_runs_every_text_whole_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        model = classifier("bert")
        (said,) = [record.message for record in caplog.records if record.name.endswith("classifier")]
        assert said.startswith(
            "bert: every answer runs its prompt again, because the model cannot continue from a cached one: "
        )
        assert torch.equal(model.logits(PROMPTS[0] + ANSWERS[0], 90), model._whole(PROMPTS[0] + ANSWERS[0]))
        assert len([record for record in caplog.records if record.name.endswith("classifier")]) == 1


def test_answers_of_a_long_prompt_share_it_whatever_the_tokenizer_makes_of_the_border(judge: Path) -> None:
    prompt = "What is the sum of two and two, if nothing is carried and nobody asks for the reason? "
    samples = [replace(sample(text=text), prompt_text=prompt, id=f"sums/1/0/{text}") for text in "456"]
    together = run(judge, {"path": "one", "concurrency": 3}, *samples)
    assert [score.values for score in together] == [run(judge, {"path": "one"}, one)[0].values for one in samples]
    for one, score in zip(samples, together, strict=True):
        assert score.values[0] == pytest.approx(by_hand(judge / "one", prompt + one.text, 0), abs=1e-5)


DEVICE = "second:1"
CLASSES = ("llama", "gpt2", "bert")
TEXTS = [[1 + (7 * row + place) % 299 for place in range(5 + 9 * row)] for row in range(8)]


def at_once(ask: Callable[[list[int]], torch.Tensor], texts: list[list[int]]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(texts)) as threads:
        return [*threads.map(ask, texts)]


@pytest.mark.parametrize("kind", CLASSES)
def test_waiting_texts_are_scored_together_with_the_numbers_of_each_alone(second: ModuleType, kind: str) -> None:
    alone = Classifier(classifying_model(kind), keep_prompts=True, name=kind)
    together = Classifier(there := classifying_model(kind).to(DEVICE), keep_prompts=True, name=kind)
    rows: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def held(_: Any, arguments: tuple[torch.Tensor]) -> None:
        rows.append(len(arguments[0]))
        begun.set()
        assert go_on.wait(60.0)

    there.register_forward_pre_hook(held)
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(together.logits, TEXTS[0], 0)]
        assert begun.wait(60.0)  # the others come while the first is run
        answers += [threads.submit(together.logits, text, 0) for text in TEXTS[1:]]
        while len(together._batches._waiting) < 7:  # type: ignore[union-attr]
            time.sleep(0.01)
        go_on.set()
        found = [answer.result(60.0) for answer in answers]
    assert rows == [1, 7]
    for text, row in zip(TEXTS, found, strict=True):
        torch.testing.assert_close(row, alone.logits(text, 0), atol=2e-5, rtol=1e-5)


def test_a_class_that_cannot_tell_padding_runs_each_alone(second: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    model = classifying_model("bert")
    forward = model.forward
    model.forward = lambda rows, attention_mask=None, **options: forward(rows, **options)
    with caplog.at_level("INFO"):
        blind = Classifier(model.to(DEVICE), keep_prompts=True, name="blind")
    assert "blind: every answer runs alone, because the model ignores that shorter ones beside it are padded" in (
        caplog.text
    )
    expected = Classifier(classifying_model("bert"), keep_prompts=True, name="bert")
    for text, row in zip(TEXTS, at_once(lambda text: blind.logits(text, 0), TEXTS), strict=True):
        torch.testing.assert_close(row.cpu(), expected.logits(text, 0), atol=2e-5, rtol=1e-5)


def test_a_job_puts_its_model_on_the_device_in_its_precision(second: ModuleType, tmp_path: Path) -> None:
    tokenizer = hugging_face_tokenizer()
    classifying_model("llama", head_dim=16).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")

    def loaded(device: str, dtype: str = "auto") -> Any:
        source = Rewards.model_validate({"sources": [{"type": "model", "path": "judge", "dtype": dtype}]})
        sources = RewardSources(source, tmp_path, device=device)
        assert sources.concurrency == (4 if device == "cpu" else 64), "so many that there is something to run together"
        model = sources._attempts[0].source
        assert isinstance(model, ModelRewards)
        return model.load()[0]._model

    there = loaded(DEVICE)
    assert (str(there.device), there.dtype) == (DEVICE, torch.bfloat16)
    assert there.model.rotary_emb.inv_freq.dtype == torch.float32, "angles are never rounded"
    assert loaded(DEVICE, "float32").dtype == torch.float32
    assert loaded("cpu").dtype == torch.float32


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 40))
def test_each_text_gets_its_own_row_and_forwards_are_bounded(texts: list[list[int]], most: int) -> None:
    sizes: list[tuple[int, int]] = []

    def sums(sequences: list[list[int]]) -> torch.Tensor:
        sizes.append((len(sequences), max(map(len, sequences))))
        return torch.tensor([[sum(each), len(each)] for each in sequences])

    found = at_once(Batches(sums, most).ask, texts)
    assert [row.tolist() for row in found] == [[sum(text), len(text)] for text in texts]
    assert sum(count for count, _ in sizes) == len(texts)
    assert all(count == 1 or count * longest <= most for count, longest in sizes)


def test_a_failing_forward_fails_only_the_text_that_causes_it() -> None:
    go_on = threading.Event()

    def sums(sequences: list[list[int]]) -> torch.Tensor:
        assert go_on.wait(60.0)
        if [0] in sequences:
            raise RuntimeError("index out of range")
        return torch.tensor([[sum(each)] for each in sequences])

    batches = Batches(sums)
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(batches.ask, [number]) for number in (1, 2, 0, 3, 4, 5)]
        go_on.set()
        others = [answer.result(60.0).tolist() for answer in answers if answer is not answers[2]]
        assert others == [[1], [2], [3], [4], [5]]
        with pytest.raises(RuntimeError, match="index out of range"):
            answers[2].result(60.0)

"""Reward models run on the device, and waiting samples are batched."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scorers import classifying_model

from rlhfspec.job.rewards import Rewards
from rlhfspec.training.scoring.rewards.classifier import Batches, Classifier
from rlhfspec.training.scoring.rewards.model import ModelRewards
from rlhfspec.training.scoring.rewards.sources import RewardSources

DEVICE = "second:1"
CLASSES = ("llama", "gpt2", "bert")
TEXTS = [[1 + (7 * row + place) % 299 for place in range(5 + 9 * row)] for row in range(8)]


def at_once(ask: Callable[[list[int]], torch.Tensor], texts: list[list[int]]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(texts)) as threads:
        return [*threads.map(ask, texts)]


@pytest.mark.parametrize("kind", CLASSES)
def test_what_waits_is_run_together_to_the_numbers_of_each_alone(second: ModuleType, kind: str) -> None:
    alone = Classifier(classifying_model(kind), keep_prompts=True, name=kind)
    there = classifying_model(kind).to(DEVICE)
    together = Classifier(there, keep_prompts=True, name=kind)
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
    assert "blind: every answer runs alone, for the model does not see that shorter ones beside it are padded" in (
        caplog.text
    )
    expected = Classifier(classifying_model("bert"), keep_prompts=True, name="bert")
    for text, row in zip(TEXTS, at_once(lambda text: blind.logits(text, 0), TEXTS), strict=True):
        torch.testing.assert_close(row.cpu(), expected.logits(text, 0), atol=2e-5, rtol=1e-5)


def test_a_job_puts_its_model_on_the_device_in_its_precision(second: ModuleType, tmp_path: Path) -> None:
    from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

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
def test_each_gets_its_own_row_and_no_forward_is_larger_than_allowed(texts: list[list[int]], most: int) -> None:
    sizes: list[tuple[int, int]] = []

    def sums(sequences: list[list[int]]) -> torch.Tensor:
        sizes.append((len(sequences), max(map(len, sequences))))
        return torch.tensor([[sum(each), len(each)] for each in sequences])

    found = at_once(Batches(sums, most).ask, texts)
    assert [row.tolist() for row in found] == [[sum(text), len(text)] for text in texts]
    assert sum(count for count, _ in sizes) == len(texts)
    assert all(count == 1 or count * longest <= most for count, longest in sizes)


def test_a_forward_that_fails_is_told_to_the_sequence_that_makes_it_fail_and_to_no_other() -> None:
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

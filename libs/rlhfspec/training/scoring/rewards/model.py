"""Rewards from one label's raw output of a Hugging Face sequence classifier."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfspec.errors import InvalidRequest, first_line
from rlhfspec.messages.records import Sample
from rlhfspec.training.scoring.rewards.base import Around, CallFailed, Reward, number
from rlhfspec.training.scoring.rewards.user_code import in_daemon_thread

if TYPE_CHECKING:
    from rlhfspec.training.scoring.rewards.classifier import Classifier


class ModelRewards:
    """Source of one label's raw output. On the CPU, sequences run alone, so that bits do not depend on a batch.

    keep_prompts: run a prompt once for its responses, if the model class can.
    """

    grouped = False

    def __init__(
        self,
        path: str,
        *,
        label: int | None,
        chat_template: bool,
        base_folder: Path,
        field: str,
        device: str = "cpu",
        dtype: str = "auto",
        keep_prompts: bool = True,
    ) -> None:
        beside = base_folder / path
        self._path = str(beside) if beside.exists() else path
        self._label = label
        self._chat_template = chat_template
        self._field = field
        self._device = device
        self._dtype = ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype
        self._keep_prompts = keep_prompts
        self._lock = threading.Lock()
        self._loaded: tuple[Classifier, Any] | None = None

    async def start(self) -> None:
        outcome = await asyncio.wrap_future(in_daemon_thread(self.load))
        if outcome.error is not None:
            raise outcome.error

    async def rewards(self, samples: Sequence[Sample], around: Around = nullcontext) -> list[Reward]:
        (sample,) = samples

        def scored() -> float:
            with around():
                return self._score(sample)

        outcome = await asyncio.wrap_future(in_daemon_thread(scored))
        if isinstance(outcome.error, (CallFailed, InvalidRequest)):
            raise outcome.error
        if outcome.error is not None:
            error = outcome.error
            raise CallFailed(f"the model raised {type(error).__name__}: {error}", temporary=False, cause=error)
        return [number(outcome.value, "the model's output")]

    def _score(self, sample: Sample) -> float:
        model, tokenizer = self.load()
        token_ids = self._token_ids(sample, tokenizer)
        if not token_ids or (model.limit is not None and len(token_ids) > model.limit):
            problem = f"the text has {len(token_ids)} tokens; the reward model takes 1 to {model.limit}"
            raise CallFailed(problem, temporary=False)
        unanswered = self._token_ids(replace(sample, text=""), tokenizer)
        logits = model.logits(token_ids, _num_alike(token_ids, unanswered))
        return float(logits[self._label or 0])

    def _token_ids(self, sample: Sample, tokenizer: Any) -> list[int]:
        if not self._chat_template:
            return list(tokenizer(sample.prompt_text + sample.text)["input_ids"])
        messages = [{"role": "user", "content": sample.prompt_text}, {"role": "assistant", "content": sample.text}]
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    def load(self) -> tuple[Classifier, Any]:
        """Load model and tokenizer once. Raise InvalidRequest if they cannot give rewards."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._read()
            return self._loaded

    def _read(self) -> tuple[Classifier, Any]:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from rlhfspec.huggingface.loading import LOAD_ERRORS
        from rlhfspec.training.scoring.rewards.classifier import Classifier

        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self._path, dtype=getattr(torch, self._dtype), output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(self._path)
        except LOAD_ERRORS as error:
            problem = f"is not a sequence-classification model with a tokenizer: {first_line(error)}"
            raise InvalidRequest(f"{self._field}.path", self._path, problem) from error
        if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random
            problem = f"has no trained classification head: {', '.join(missing)} missing"
            raise InvalidRequest(f"{self._field}.path", self._path, problem)
        self._check_label(model.config.num_labels)
        if self._chat_template and tokenizer.chat_template is None:
            raise InvalidRequest(f"{self._field}.chatTemplate", True, "the reward model's tokenizer has no template")
        model = model.to(self._device).eval()
        return Classifier(model, keep_prompts=self._keep_prompts, name=self._path), tokenizer

    def _check_label(self, num_labels: int) -> None:
        if self._label is None and num_labels != 1:
            problem = f"the model has {num_labels} outputs: set the index of the reward"
            raise InvalidRequest(f"{self._field}.label", None, problem)
        if self._label is not None and self._label >= num_labels:
            problem = f"must be < {num_labels}: the model has {num_labels} outputs, counted from 0"
            raise InvalidRequest(f"{self._field}.label", self._label, problem)

    async def close(self) -> None:
        self._loaded = None


def _num_alike(token_ids: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    pairs = zip(token_ids, other, strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(token_ids), len(other)))

"""Benchmark of chats with a policy: alone, beside rollouts with and without priority, and against vLLM's server.

Each system serves from a process of its own, asleep between its turns. Clients use HTTP. Chats arrive at the same times
in every mode, and modes take turns within a repetition.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rlhfspec.bench.generating.results import published
from rlhfspec.bench.generating.run import find_vllm_python
from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, explanations
from rlhfspec.bench.processor import processor
from rlhfspec.bench.serving.client import answers_to
from rlhfspec.bench.serving.load import ArrivingChat, chats
from rlhfspec.bench.serving.results import (
    OURS,
    SERVE_MODES,
    ServeMode,
    ServeResults,
    ServeRow,
    ServeTurn,
    bars_of_serve,
)
from rlhfspec.bench.worker import Worker, WorkerFailed
from rlhfspec.errors import InvalidRequest

_ROWS = 64  # of an engine, so that chats find one beside the rollouts
_NUM_PROMPTS = 128
_WARM_UP = 5  # chats, one after another
# For a model without a chat template.
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}assistant:"

Report = Callable[[str], None]


class DifferentAnswers(RuntimeError):
    """Raised when a chat or rollout differs between two modes, although its seed is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of the benchmark. `ttft` and `tpot` are targets in seconds."""

    model: str
    draft: str | None
    modes: tuple[str, ...] = tuple(SERVE_MODES)
    rate: float = 1.0  # chats a second
    chats: int = 30  # in a repetition
    num_tokens: int = 48  # of the longest answer
    rollouts: int = 32  # that run beside chats
    rollout_tokens: int = 128  # of the longest
    ttft: float = 1.0
    tpot: float = 0.1
    repeats: int = 3
    num_threads: int = 1
    dtype: str = "bfloat16"
    vllm_python: str | None = None

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in SERVE_MODES:
                raise InvalidRequest("modes", mode, f"must be among {', '.join(SERVE_MODES)}")
        for name in ("rate", "ttft", "tpot"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(name, getattr(self, name), "must be > 0")

    def engine_options(self) -> dict[str, Any]:
        return {
            "drafter": self.draft, "speculation": "adaptive", "dtype": self.dtype, "num_threads": self.num_threads,
            "max_sequences": _ROWS, "max_context": MAX_CONTEXT, "target_tpot": self.tpot,
        }  # fmt: skip


class ServeBenchmark:
    def __init__(self, settings: ServeSettings, report: Report = print) -> None:
        self._settings = settings
        self._report = report
        self._skipped: tuple[str, ...] = ()
        self._digests: dict[str, tuple[str, str]] = {}  # by chat or rollout: the first mode, and its digest
        self._texts = explanations(_NUM_PROMPTS)

    def run(self) -> ServeResults:
        settings = self._settings
        turns: dict[str, list[ServeTurn]] = {mode: [] for mode in settings.modes}
        self._template, self._prompts = _rendered(settings.model, self._texts)
        with ExitStack() as stack:
            workers, arithmetic = self._start(stack)
            idle_ttft = {system: self._warm_up(worker) for system, worker in workers.items()}
            modes = [mode for mode in settings.modes if SERVE_MODES[mode].system in workers]
            for repetition in range(settings.repeats):
                for mode in random.Random(repetition).sample(modes, len(modes)):
                    self._report(f"repetition {repetition + 1}/{settings.repeats}: {mode}")
                    turns[mode].append(self._turn(workers[SERVE_MODES[mode].system], mode, repetition))
        results = ServeResults(
            machine=processor(arithmetic=arithmetic),
            settings=published(settings, "model", "draft", "vllm_python"),
            rows=tuple(ServeRow.of(mode, turns, ttft=settings.ttft, tpot=settings.tpot) for mode in modes),
            idle_ttft=idle_ttft,
            skipped=self._skipped,
        )
        return replace(results, bars=tuple(bars_of_serve(results)))

    def _start(self, stack: ExitStack) -> tuple[dict[str, Worker], str]:
        """Start the systems that the modes need; return their workers, and the arithmetic of ours."""
        settings, workers, arithmetic = self._settings, dict[str, Worker](), ""
        for system in dict.fromkeys(SERVE_MODES[mode].system for mode in settings.modes):
            self._report(f"starting {system}")
            try:
                worker = stack.enter_context(Worker.start(self._command(system), num_threads=settings.num_threads))
                loaded = worker.ask(
                    "load", model=settings.model, engine=settings.engine_options(), template=self._template
                )["loaded"]
            except WorkerFailed as failure:
                if system == OURS:
                    raise
                self._skipped = (f"{system}: {str(failure).splitlines()[0]}",)
            else:
                workers[system], arithmetic = worker, loaded.get("arithmetic", arithmetic)
        return workers, arithmetic

    def _command(self, system: str) -> list[str]:
        if system == OURS:
            return [sys.executable, "-m", "rlhfspec.bench.serving.ours"]
        python = find_vllm_python(self._settings.vllm_python)
        if python is None:
            raise WorkerFailed("no vLLM here (make setup-vllm, or --vllm-python)")
        return [sys.executable, "-m", "rlhfspec.bench.serving.vllm_server", str(python)]

    def _warm_up(self, worker: Worker) -> float:
        """Send chats one after another, and return their median time to the first token."""
        begun = self._begin(worker, ServeMode(), repetition=-1)
        answers = []
        for chat in self._chats(_WARM_UP, repetition=-1):
            answers += asyncio.run(answers_to([replace(chat, at=0.0)], **begun))
        worker.ask("end")
        return statistics.median(answer.ttft for answer in answers)

    def _turn(self, worker: Worker, mode: str, repetition: int) -> ServeTurn:
        settings, chosen = self._settings, SERVE_MODES[mode]
        begun = self._begin(worker, chosen, repetition)
        answers = []
        if chosen.chats:
            answers = asyncio.run(answers_to(self._chats(settings.chats, repetition), **begun))
        else:
            time.sleep(settings.chats / settings.rate)
        ended = worker.ask("end")
        if chosen.system == OURS:
            told = {f"chat {index}": answer.digest for index, answer in enumerate(answers)}
            told |= {f"rollout {name}": digest for name, digest in ended["digests"].items()}
            self.compare(mode, repetition, told)
        return ServeTurn(
            seconds=ended["seconds"],
            answers=tuple(answers),
            num_rollout_tokens=round(ended["num_tokens"]) - sum(answer.num_tokens for answer in answers),
            step_seconds=ended.get("step_seconds", 0.0),
        )

    def compare(self, mode: str, repetition: int, digests: dict[str, str]) -> None:
        """Raise DifferentAnswers if a chat or rollout differs from that of an earlier mode."""
        for name, digest in digests.items():
            first, known = self._digests.setdefault(f"{name} of repetition {repetition + 1}", (mode, digest))
            if known != digest:
                raise DifferentAnswers(f"{name}, repetition {repetition + 1}: {mode} gave other tokens than {first}")

    def _begin(self, worker: Worker, mode: ServeMode, repetition: int) -> dict[str, Any]:
        settings = self._settings
        planned = {"prompts": self._prompts, "num_tokens": settings.rollout_tokens, "repetition": repetition}
        count = settings.rollouts if mode.rollouts else 0
        return worker.ask("begin", rollouts=planned, count=count, equal=mode.equal)

    def _chats(self, count: int, repetition: int) -> list[ArrivingChat]:
        rate, num_tokens = self._settings.rate, self._settings.num_tokens
        return chats(self._texts, count, rate=rate, num_tokens=num_tokens, repetition=repetition)


def _rendered(model: str, texts: list[str]) -> tuple[str, list[list[int]]]:
    """Return the model's chat template, or one for all others, and the texts as prompts under it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    template = tokenizer.chat_template or _TEMPLATE
    conversations = [[{"role": "user", "content": text}] for text in texts]
    prompts = tokenizer.apply_chat_template(
        conversations, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    return template, prompts

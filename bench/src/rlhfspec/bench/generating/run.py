"""Benchmark of generation: all modes of a scenario take turns, so that noise hits all alike.

One process runs all modes of rlhfspec's engine; each baseline has its own, asleep between turns. Start-up, profiling
and one warm-up per scenario are not timed; prefill is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhfspec.bench.bars import bars_of_generation
from rlhfspec.bench.generating.results import ResultRow, Results, published
from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, PAIRS, SCENARIO_NAMES, BenchScenario, scenarios
from rlhfspec.bench.processor import processor
from rlhfspec.bench.worker import Worker, WorkerFailed, hf_command, our_command, vllm_command, vllm_engine_command
from rlhfspec.errors import InvalidRequest
from rlhfspec.job.choices.drafters import MADE_OF_THE_POLICY

_OURS, _STATIC, HF = ("plain", "adaptive"), "static", "hf"
VLLM_PLAIN, VLLM_DRAFT, VLLM_NGRAM = "vllm-plain", "vllm-draft", "vllm-ngram"
VLLM_ENGINE = "engine:vllm"  # only on request; its bar is in `bench/engines.py`
_MODES = (*_OURS, _STATIC, HF, VLLM_PLAIN, VLLM_DRAFT, VLLM_NGRAM)
_WARM_UP_TOKENS = 12

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a benchmark. No repetition starts after `budget_seconds`.

    The mode `static` stands for every static strategy of the grid, `static:NAME` for one of them.
    """

    target: str
    draft: str | None
    pair: str = PAIRS[0]
    modes: tuple[str, ...] = _MODES
    scenarios: tuple[str, ...] = SCENARIO_NAMES
    threads: tuple[int, ...] = (1, 2)
    repeats: int = 5
    num_tokens: int = 128
    temperature: float = 1.0
    dtype: str = "bfloat16"
    device: str = "cpu"  # of our engine
    vllm_python: str | None = None
    vllm_draft_tokens: int = 4
    budget_seconds: float | None = None

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in (*_MODES, VLLM_ENGINE) and not mode.startswith("static:"):
                known = ", ".join((*_MODES, VLLM_ENGINE))
                raise InvalidRequest("modes", mode, f"must be among {known} or static:NAME")
        if not set(self.modes).intersection((*_OURS, _STATIC)) and not any("static:" in mode for mode in self.modes):
            raise InvalidRequest("modes", self.modes, "must hold at least one of ours: plain, adaptive, static")
        scenarios(self.scenarios, num_tokens=self.num_tokens)  # an unknown name is refused before anything starts
        if self.repeats < 1:
            raise InvalidRequest("repeats", self.repeats, "must be >= 1")


@dataclass(slots=True)
class _Mode:
    name: str
    worker: Worker
    answers: list[dict[str, Any]] = field(default_factory=list)


class Benchmark:
    def __init__(
        self, settings: BenchSettings, report: Report = print, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._report = report
        self._clock = clock
        self._deadline = clock() + (settings.budget_seconds or float("inf"))
        self._skipped: dict[str, str] = {}

    def run(self) -> Results:
        rows: list[ResultRow] = []
        costs: dict[str, Any] = {}
        arithmetic = ""
        for index, num_threads in enumerate(self._settings.threads):
            with ExitStack() as stack:
                workers, loaded = self._start(stack, num_threads)
                costs[str(num_threads)], arithmetic = loaded["costs"], loaded["arithmetic"]
                rows += self._measure(workers, num_threads, self._share_of_time(index))
        results = Results(
            machine=processor(arithmetic=arithmetic),
            rows=tuple(rows),
            costs=costs,
            settings=published(self._settings, "target", "draft", "vllm_python"),
            skipped=tuple(f"{mode}: {reason}" for mode, reason in self._skipped.items()),
        )
        return replace(results, bars=bars_of_generation(results))

    def _share_of_time(self, index: int) -> float:
        """Return the deadline of the thread count at `index`; it and later ones share the time left equally."""
        now = self._clock()
        return now + (self._deadline - now) / (len(self._settings.threads) - index)

    def _start(self, stack: ExitStack, num_threads: int) -> tuple[dict[str, Worker], dict[str, Any]]:
        """Start all workers; return them by mode, and the load report of rlhfspec's engine."""
        self._report(f"{num_threads} thread(s): starting the engine and measuring its cost tables")
        ours = stack.enter_context(Worker.start(our_command(), num_threads=num_threads))
        loaded = ours.ask("load", **self._load_arguments(num_threads))["loaded"]
        workers = dict.fromkeys(self._our_modes(loaded["static"]), ours)
        for mode, command in self._rivals().items():
            self._report(f"{num_threads} thread(s): starting {mode}")
            drafting = {VLLM_DRAFT: "draft_model", VLLM_NGRAM: "ngram"}.get(mode)
            try:
                rival = stack.enter_context(Worker.start(command, num_threads=num_threads))
                rival.ask("load", **self._load_arguments(num_threads, drafting))
            except WorkerFailed as failure:
                self._skip(mode, str(failure).splitlines()[0])
            else:
                workers[mode] = rival
        return workers, loaded

    def _our_modes(self, grid: list[str]) -> list[str]:
        modes: list[str] = []
        for mode in self._settings.modes:
            if mode == _STATIC:
                modes += [f"static:{name}" for name in grid]
            elif mode in _OURS:
                modes.append(mode)
            elif mode.startswith("static:"):
                if mode.startswith("static:model") and self._settings.draft is None:
                    self._skip(mode, "the model has no draft")
                    continue
                if mode.removeprefix("static:") not in grid:
                    raise InvalidRequest("modes", mode, f"the grid holds {', '.join(grid)}")
                modes.append(mode)
        return list(dict.fromkeys(modes))

    def _rivals(self) -> dict[str, list[str]]:
        rivals: dict[str, list[str]] = {}
        python = find_vllm_python(self._settings.vllm_python)
        for mode in self._settings.modes:
            if mode == HF:
                rivals[mode] = hf_command()
            elif mode == VLLM_DRAFT and self._settings.draft in (None, *MADE_OF_THE_POLICY):
                self._skip(mode, "the model has no draft")
            elif mode in (VLLM_PLAIN, VLLM_DRAFT, VLLM_NGRAM, VLLM_ENGINE) and python is None:
                self._skip(mode, "no vLLM here (make setup-vllm, or --vllm-python)")
            elif mode in (VLLM_PLAIN, VLLM_DRAFT, VLLM_NGRAM) and python is not None:
                rivals[mode] = vllm_command(python)
            elif mode == VLLM_ENGINE and python is not None:
                rivals[mode] = vllm_engine_command(python)
        return rivals

    def _skip(self, mode: str, reason: str) -> None:
        if mode not in self._skipped:
            self._report(f"{mode} is left out: {reason}")
        self._skipped[mode] = reason

    def _load_arguments(self, num_threads: int, vllm_drafting: str | None = None) -> dict[str, Any]:
        return {
            "target": self._settings.target,
            "draft": self._settings.draft,
            "dtype": self._settings.dtype,
            "device": self._settings.device,
            "num_threads": num_threads,
            "max_context": MAX_CONTEXT,
            "max_sequences": 64,
            "drafting": vllm_drafting,
            "num_draft_tokens": self._settings.vllm_draft_tokens,
        }

    def _measure(self, workers: dict[str, Worker], num_threads: int, deadline: float) -> Iterator[ResultRow]:
        """Measure all scenarios in every repetition, so that none is missing when time runs out."""
        settings = self._settings
        todo = scenarios(settings.scenarios, num_tokens=settings.num_tokens, pair=settings.pair)
        modes = {scenario.name: [_Mode(name, worker) for name, worker in workers.items()] for scenario in todo}
        for repetition in range(settings.repeats):
            for scenario in todo:
                self._repeat(scenario, modes[scenario.name], repetition, num_threads, deadline)
        for scenario in todo:
            yield from (_row(mode, scenario, num_threads) for mode in modes[scenario.name] if mode.answers)

    def _repeat(
        self, scenario: BenchScenario, modes: list[_Mode], repetition: int, num_threads: int, deadline: float
    ) -> None:
        """Run every mode once, in random order except in the first repetition, which includes a warm-up."""
        for mode in random.Random(repetition).sample(modes, len(modes)) if repetition else modes:
            if self._clock() >= deadline:
                if repetition == 0:
                    self._skip(f"{mode.name} in {scenario.name}", "no time left")
                continue
            if repetition == 0:
                mode.worker.ask("run", mode=mode.name, **self._request(_shortened(scenario), repetition))
            mode.answers.append(mode.worker.ask("run", mode=mode.name, **self._request(scenario, repetition)))
        speeds = [f"{mode.name} {_speed(mode.answers[-1]):.0f}" for mode in modes if len(mode.answers) > repetition]
        if speeds:
            where = f"{num_threads} thread(s), {scenario.name}, repetition {repetition + 1}"
            self._report(f"{where}: {', '.join(speeds)} tokens/s")

    def _request(self, scenario: BenchScenario, repetition: int) -> dict[str, Any]:
        return {
            "scenario": scenario.name,
            "prompts": scenario.prompts,
            "max_tokens": scenario.max_tokens,
            "temperature": self._settings.temperature,
            "seeds": scenario.seeds(repetition),
        }


def find_vllm_python(given: str | None) -> Path | None:
    """Return the given interpreter, else that of .venv-vllm, or None."""
    if given is not None:
        path = Path(given)
        if not path.exists():
            raise InvalidRequest("vllm_python", given, "no such file")
        return path
    own = Path(".venv-vllm/bin/python")
    return own.absolute() if own.exists() else None


def _shortened(scenario: BenchScenario) -> BenchScenario:
    lengths = tuple(min(length, _WARM_UP_TOKENS) for length in scenario.max_tokens)
    return BenchScenario(name=scenario.name, prompts=scenario.prompts, max_tokens=lengths)


def _speed(answer: dict[str, Any]) -> float:
    return float(answer["num_tokens"] / answer["seconds"])


def _row(mode: _Mode, scenario: BenchScenario, num_threads: int) -> ResultRow:
    speeds = tuple(_speed(answer) for answer in mode.answers)
    return ResultRow(
        scenario=scenario.name,
        mode=mode.name,
        num_threads=num_threads,
        tokens_per_second=statistics.median(speeds),
        repeats=speeds,
        accepted_per_verification=statistics.fmean(answer["accepted_per_verification"] for answer in mode.answers),
        digests=tuple(answer["digest"] for answer in mode.answers if "digest" in answer),
        selector=mode.answers[-1].get("selector", {}),
    )

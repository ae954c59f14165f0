"""Benchmark worker for rlhfspec's engine, with all its modes in one process.

Replies to `run` carry a digest of the tokens, to check that no mode changes them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from typing import Any

from rlhfspec.bench.rivals.serve import serve
from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.drafting.fixed import static_grid

_MODES = {"plain": "off", "adaptive": "adaptive"}  # and static:NAME for every strategy of the grid


class OurWorker:
    """Worker that keeps its engine between requests. Tests pass an `engine_factory`."""

    def __init__(self, engine_factory: Any = None) -> None:
        self._engine_factory = engine_factory
        self._engine: Any = None
        self._num_runs = 0

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        factory = self._engine_factory or Engine.from_pretrained
        self._engine = factory(
            arguments["target"],
            drafter=arguments["draft"],
            dtype=arguments["dtype"],
            device=arguments["device"],
            num_threads=arguments["num_threads"],
            max_sequences=arguments["max_sequences"],
            max_context=arguments["max_context"],
            speculation="adaptive",
        )
        return {
            "loaded": {
                "arithmetic": self._engine.state.target.runner.config.arithmetic,
                "costs": {kind: table.to_dict() for kind, table in self._engine.speculation.costs.tables.items()},
                "static": [name for name in static_grid(("model", "suffix")) if arguments["draft"] or "suffix" in name],
            }
        }

    def run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        mode = arguments["mode"]
        self._engine.set_speculation(_MODES.get(mode) or mode.removeprefix("static:"))
        self._engine.speculation.selector.start_totals()
        self._num_runs += 1
        requests = requests_of(arguments, name=f"run-{self._num_runs}")
        began = time.perf_counter()
        completions = drain(self._engine, requests)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "num_tokens": sum(len(completion.token_ids) for completion in completions),
            "accepted_per_verification": accepted_per_verification(completions),
            "digest": digest(completions),
            "selector": self._selector(),
        }

    def _selector(self) -> dict[str, Any]:
        explanation = self._engine.speculation.selector.explain()
        return {
            "share_of_step": explanation.share_of_step,
            "cost_errors": explanation.cost_errors,
            "calibration_error": self._engine.speculation.acceptance.calibration_error(),
            "plans": _plan_counts(explanation.decisions),
        }


def requests_of(arguments: dict[str, Any], name: str) -> list[Request]:
    """Return a run's requests, in groups that start with `name` so that earlier runs do not help the suffix drafter."""
    temperature = arguments.get("temperature", 1.0)
    columns = zip(arguments["prompts"], arguments["max_tokens"], arguments["seeds"], strict=True)
    return [
        Request(
            id=f"{name}/{index}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True),
            seed=seed,
            group=f"{name}/{index}",
        )
        for index, (prompt, max_tokens, seed) in enumerate(columns)
    ]


def drain(engine: Any, requests: list[Request]) -> list[Completion]:
    """Run the requests with an empty prefix cache, and return their completions in order."""
    engine.forget_kept()
    for request in requests:
        engine.submit(request)
    finished: dict[str, Completion] = {}
    while len(finished) < len(requests):
        finished.update({completion.id: completion for completion in engine.step().finished})
    return [finished[request.id] for request in requests]


def accepted_per_verification(completions: list[Completion]) -> float:
    """Return the mean number of drafted tokens accepted per sequence and target forward, 0 without drafts."""
    verifications = sum(completion.stats.num_verifications for completion in completions)
    return sum(completion.stats.num_accepted for completion in completions) / max(verifications, 1)


def digest(completions: list[Completion]) -> str:
    """Return a hash of all tokens and log-prob bits."""
    content = repr([(completion.token_ids, completion.log_probs) for completion in completions])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _plan_counts(decisions: tuple[Any, ...]) -> dict[str, int]:
    return dict(Counter(decision.plan for decision in decisions))


if __name__ == "__main__":
    worker = OurWorker()
    serve({"load": worker.load, "run": worker.run})

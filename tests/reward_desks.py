"""Sources made from reward functions in a folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

from example_records import example_sample

from rlhfspec.job.rewards import Rewards
from rlhfspec.messages.records import Sample, Score
from rlhfspec.training.scoring.rewards import RewardSources


def sample(
    prompt: int = 0, replica: int = 0, *, text: str = "4", columns: dict[str, Any] | None = None, error: str = ""
) -> Sample:
    columns_json = json.dumps({"answer": "4"} if columns is None else columns)
    end = {"finish_reason": "error" if error else "stop", "error": error}
    return example_sample(prompt, replica, text=text, columns_json=columns_json, **end)


class Naps:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.naps = Naps()

    def write(self, code: str, module: str = "rewards") -> None:
        (self.folder / f"{module}.py").write_text(code)

    def sources(self, *sources: dict[str, Any], combine: str = "sum") -> RewardSources:
        given = [{"type": "function", "retries": 0, **source} for source in sources]
        rewards = Rewards.model_validate({"sources": given, "combine": combine})
        return RewardSources(rewards, self.folder, sleep=self.naps)

    def score(self, code: str, samples: Sample | list[Sample] | None = None, **source: Any) -> list[Score]:
        self.write(code)
        return run(self.sources({"function": "rewards:reward", **source}), samples)


def run(sources: RewardSources, samples: Sample | list[Sample] | None = None, **options: Any) -> list[Score]:
    async def go() -> list[Score]:
        given = [samples or sample()] if not isinstance(samples, list) else samples
        try:
            await sources.start()
            return await sources.score_many(given, **options)
        finally:
            await sources.close()

    return asyncio.run(go())


HANG = "import threading\ndef reward(completion): threading.Event().wait()"

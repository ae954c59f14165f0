"""Sources made from reward functions in a folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

from rlhfspec.job.rewards import Rewards
from rlhfspec.messages.records import Sample, Score
from rlhfspec.training.scoring.rewards import RewardSources


def sample(
    prompt: int = 0, replica: int = 0, *, text: str = "4", columns: dict[str, Any] | None = None, error: str = ""
) -> Sample:
    return Sample(
        id=f"sums/1/{prompt}/{replica}",
        job="sums",
        step=1,
        prompt=prompt,
        replica=replica,
        prompt_text="2+2=",
        prompt_token_ids=(50,),
        columns_json=json.dumps({"answer": "4"} if columns is None else columns),
        text=text,
        token_ids=(52,),
        log_probs=(-0.1,),
        tempered_log_probs=(-0.1,),
        weights_versions=(0,),
        finish_reason="error" if error else "stop",
        error=error,
    )


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

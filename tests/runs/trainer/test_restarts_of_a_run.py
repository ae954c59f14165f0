"""A real run's trainer is restarted alone; an engine that ignores new weights fails the run."""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import curve_of, invoke, lines_of, train, write_data, write_job, write_models
from stages import killed

from rlhfspec.cli import local
from rlhfspec.engine.core import Engine
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.stage.base import Service
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE
from rlhfspec.trainer.build import build


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("seed", range(4))
def test_a_trainer_killed_five_times_has_the_curve(job_file: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ["training.steps=9", "checkpoint.everySteps=3"]
    steps += ["evaluation.everySteps=4", "evaluation.numPrompts=3"] if seed % 2 else []
    whole = train(job_file, "whole", *steps)
    draw = random.Random(seed)
    deaths: list[int] = []

    class Immortal(Service):
        def __init__(self, job: Any, context: Any, first: Any) -> None:
            super().__init__("trainer", 0, context.vitals)
            self._make = lambda: build(job, context)
            self._release = lambda: context.bus._bus.release("trainer")
            self.inner = first

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        async def run(self) -> None:
            while True:
                task = asyncio.create_task(self.inner.run())
                if len(deaths) == 5:
                    return await task
                steps = draw.randint(1, 4)
                while not (task.done() or self.inner._learner.version >= min(self.inner._saved_at + steps, 8)):
                    await asyncio.sleep(0.001)
                if task.done():
                    return task.result()
                deaths.append(self.inner._learner.version)
                await killed(task, self.inner)
                await self._release()
                self.inner = self._make()

        async def stop(self) -> None:
            await self.inner.stop()

        def close(self) -> None:
            super().close()
            self.inner.close()

    monkeypatch.setattr("rlhfspec.trainer.build.build", lambda job, w: Immortal(job, w, build(job, w)))
    monkeypatch.setattr(local.LocalRun, "_trainer", property(lambda run: run._services[-1].inner))
    assert train(job_file, "killed", *steps) == whole
    assert len(deaths) == 5
    folders = [RunFolder(job_file.parent / name) for name in ("whole", "killed")]
    evaluations = [[replace(run, seconds=0.0) for run in folder.evaluations()] for folder in folders]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == (4 if seed % 2 else 0)
    answers = [list(folder.evaluation_samples()) for folder in folders]
    assert answers[0] == answers[1]
    manifest = json.loads((job_file.parent / "killed" / "manifest.json").read_text())
    assert (manifest["outcome"], manifest["num_steps"]) == ("completed", 9)
    assert curve_of(job_file, "killed") == whole


HEAD = "lm_head.weight"


def test_an_engine_that_keeps_its_old_head_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", seed=0, vocab_size=VOCAB_SIZE)
    write_models(tmp_path, model)
    write_data(tmp_path)
    job_file, head, load = write_job(tmp_path, tmp_path), model.state_dict()[HEAD], Engine.load_weights

    def load_all_but_the_head(engine: Engine, state_dict: Mapping[str, Any], *, version: int) -> None:
        load(engine, {**state_dict, HEAD: head}, version=version)

    monkeypatch.setattr(Engine, "load_weights", load_all_but_the_head)
    result = invoke(job_file, "run", "generation.speculation.mode=off", code=1)
    assert "own: step 2: its log-probs differ from the trainer's" in " ".join(result.output.split())
    assert len(lines_of(job_file, "run")) == 1

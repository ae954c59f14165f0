"""Our side of the step benchmark: a whole run in a process."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlhfspec.bench.stepping import step as bench_step
from rlhfspec.bench.stepping.step import StepSettings
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer

SETTINGS = StepSettings(model="m/target-1", draft="m/draft-1", steps=2, repeats=3, num_tokens=8)


def test_our_side_runs_a_job_and_generates_every_token_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model("llama", seed=0, vocab_size=VOCAB_SIZE).save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    settings = StepSettings(
        model=str(folder), draft=str(folder), num_tokens=8, steps=1, prompts_per_step=2, samples_per_prompt=2
    )
    warm_up, step = bench_step.measure_plain(replace(settings, num_threads=1))
    assert warm_up.num_tokens == step.num_tokens == 2 * 2 * 8
    assert 0 < step.seconds < warm_up.seconds + 60
    assert {"generation", "reference", "training"} <= {name for name, spent in step.by_stage.items() if spent > 0}


def test_our_side_says_why_a_run_failed(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model=str(tmp_path / "missing"), draft=str(tmp_path / "missing"))
    with pytest.raises(WorkerFailed, match="exit code 2"):
        bench_step.measure_plain(settings)

"""`rlhfspec validate`, `init` and `schema` print, write and start without torch."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job


def rlhfspec(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    return tmp_path


def init(folder: Path, *options: str) -> Path:
    job = folder / "job.yaml"
    code, output = rlhfspec("init", job, "--model", "./model", "--data", "./train.jsonl", *options)
    assert code == 0, output
    return job


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_init_writes_a_valid_job(folder: Path, algorithm: str) -> None:
    job = init(folder, "--algorithm", algorithm)
    code, output = rlhfspec("validate", job)
    assert code == 0, output
    assert f"algorithm   {algorithm}" in output
    assert "20 rows" in output


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_init_comments_out_is_what_is_left_out(folder: Path, algorithm: str) -> None:
    """Uncommenting all fields changes only blocks that are off by default."""
    job = init(folder, "--algorithm", algorithm)
    full = folder / "full.yaml"
    full.write_text(re.sub(r"(?m)^( *)#(?=[a-z])", r"\1", job.read_text()))
    both = [read_job(path).model_dump() for path in (job, full)]
    for resolved in both:
        resolved["spec"].pop("evaluation")
        resolved["spec"]["model"].pop("lora")
        resolved["spec"]["observability"].pop("wandb")
    assert both[0] == both[1]
    assert len(full.read_text().splitlines()) == len(job.read_text().splitlines())


def test_init_keeps_what_is_there(folder: Path) -> None:
    (folder / "rewards.py").write_text("def exact(completion): return 1.0\n")
    job = init(folder)
    assert "return 1.0" in (folder / "rewards.py").read_text()
    job.write_text("mine")
    code, output = rlhfspec("init", job)
    assert (code, job.read_text()) == (2, "mine")
    assert "--force" in output
    init(folder, "--force")
    assert "RLHFJob" in job.read_text()


def test_the_reward_that_init_writes(folder: Path) -> None:
    init(folder)
    scope: dict[str, object] = {}
    exec((folder / "rewards.py").read_text(), scope)
    exact = scope["exact"]
    assert callable(exact)
    assert [exact(completion="answer 12 ", answer=12), exact(completion="answer 3", answer="12")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "fix"), [(("--algorithm", "grop"), "must be one of ppo"), ((), "does not exist")]
)
def test_init_refuses(tmp_path: Path, arguments: tuple[str, ...], fix: str) -> None:
    code, output = rlhfspec("init", tmp_path / "none" / "job.yaml", *arguments)
    assert code == 2
    assert fix in output


def test_what_init_writes_by_itself_is_valid(tmp_path: Path) -> None:
    assert rlhfspec("init", tmp_path / "job.yaml")[0] == 0
    code, output = rlhfspec("validate", tmp_path / "job.yaml")
    assert code == 0, output
    assert "tiny:sums.jsonl (not read" in output
    code, output = rlhfspec("validate", tmp_path / "job.yaml", "--set", "model.drafter=tiny:sum")
    assert code == 2
    assert "spec.model.drafter: must be tiny: and one of" in output


def test_init_makes_a_name_of_the_file(folder: Path) -> None:
    odd = folder / "My Run_2.yaml"
    assert rlhfspec("init", odd, "--model", "./model", "--data", "./train.jsonl")[0] == 0
    assert read_job(odd).metadata.name == "my-run-2"


def test_validate_remarks_and_takes_overrides(folder: Path) -> None:
    job = init(folder)
    code, output = rlhfspec(
        "validate", job, "--set", "dataset.epochs=1", "--set", "training.steps=3", "--set", "generation.topK=5"
    )
    assert code == 0, output
    assert "training    3 steps" in output
    assert "remark: the data ends after step 1 of 3" in output
    assert "remark: generation.topK" in output


def test_schema() -> None:
    code, output = rlhfspec("schema")
    assert (code, json.loads(output)["properties"]["spec"]["additionalProperties"]) == (0, False)
    code, output = rlhfspec("schema", "--crd")
    assert (code, json.loads(output)["kind"]) == (0, "CustomResourceDefinition")

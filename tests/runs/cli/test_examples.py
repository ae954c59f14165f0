"""Every shipped job runs two small steps with a random model."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from places import ROOT
from runs import command, curve_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfspec.engine.scheduling.text import cut_at_stop
from rlhfspec.job.file import read_job
from rlhfspec.job.rewards import FunctionSource
from rlhfspec.training.scoring.rewards.imports import load_function

EXAMPLES = ROOT / "examples"
PRETRAINED = "smollm2.yaml"
JOBS = sorted({path.name for path in EXAMPLES.glob("*.yaml")} - {PRETRAINED})  # its data are for a model that chats


def small(job: Path) -> list[str]:
    spec = yaml.safe_load(job.read_text())["spec"]
    fields = {"training.steps": 2, "training.promptsPerStep": 2, "generation.maxTokens": 8}
    fields |= {"observability.view": "plain", "observability.sampleTexts": 1}
    if spec["algorithm"].get("samplesPerPrompt", 8) > 1:
        fields["algorithm.samplesPerPrompt"] = 2
    if "overlongBuffer" in spec["algorithm"]:
        fields["algorithm.overlongBuffer"] = 4
    return [argument for name, value in fields.items() for argument in ("--set", f"{name}={value}")]


@pytest.mark.draws
@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("name", JOBS)
def test_an_example_trains(name: str, models: Path, tmp_path: Path) -> None:
    model = ["--set", f"model.path={models / 'policy'}"]
    out = tmp_path / "out"
    command(["run", str(EXAMPLES / name), "--out", str(out), *small(EXAMPLES / name), *model], 0)
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["log_prob_difference"]["max"] < 1e-5
    assert json.loads((out / "manifest.json").read_text())["outcome"] == "completed"
    assert (out / "plots" / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_reward_of_the_own_data_example_reaches_1() -> None:
    """The reward sees text without the final stop string."""
    job = read_job(EXAMPLES / "own-data.yaml")
    (source,) = job.spec.rewards.sources
    assert isinstance(source, FunctionSource)
    reward = load_function(source.function, EXAMPLES, field="function")
    text = cut_at_stop("harbour. Ben", tuple(job.spec.generation.stop))
    assert reward(completion=text, place="harbour", finish_reason="stop") == 1.0
    assert reward(completion="harbour and so", place="harbour", finish_reason="length") == 0.5
    assert reward(completion=text, place="market", finish_reason="stop") == 0.0


def test_the_own_data_example_trains_from_a_checkpoint_beside_the_job(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    for name in ("own_rewards.py", "own-data.yaml"):
        shutil.copy(EXAMPLES / name, folder)
    rows = [{"prompt": f"¿Dónde está Zoë {number}? ", "place": "café"} for number in range(4)]
    (folder / "own_data.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    shutil.copytree(models / "policy", folder / "my-model")
    job = yaml.safe_load((folder / "own-data.yaml").read_text())
    job["spec"]["model"]["path"] = "./my-model"
    (folder / "own-data.yaml").write_text(yaml.safe_dump(job))
    monkeypatch.chdir(tmp_path)
    command(["run", "my project/own-data.yaml", "--out", "trained", *small(folder / "own-data.yaml")], 0)
    assert len(curve_of(tmp_path / "job.yaml", "trained")) == 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "trained" / "export")
    first = AutoModelForCausalLM.from_pretrained(folder / "my-model")
    pairs = zip(first.parameters(), exported.parameters(), strict=True)
    assert any(not theirs.equal(ours) for theirs, ours in pairs), "what was exported is what was trained"
    assert AutoTokenizer.from_pretrained(tmp_path / "trained" / "export")("é")["input_ids"]

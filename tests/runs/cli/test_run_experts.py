"""A whole job on a mixture of experts: all stages and drafters, and its run folder."""

import json
from pathlib import Path

import pytest
from runs import curve_of, invoke, lines_of, train, write_data, write_job, write_models

from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.sweep.classes import stirred, tiny_config
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

NUM_EXPERTS, CHOSEN, NUM_LAYERS = 6, 2, 4


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = tiny_config("mixtral", vocab_size=VOCAB_SIZE)
    model = stirred(AutoModelForCausalLM.from_config(config), vocab_size=VOCAB_SIZE)  # type: ignore[no-untyped-call]
    write_models(folder, model)
    return folder


@pytest.fixture
def experts_job(tmp_path: Path, experts: Path) -> Path:
    write_data(tmp_path)
    return write_job(tmp_path, experts, name="ppo")


def test_a_mixture_trains_exactly_on_policy_however_it_drafts(experts_job: Path) -> None:
    exact = "training.exactOnPolicy=true"
    plain = train(experts_job, "off", "generation.speculation.mode=off", exact)
    assert len({line["weights_digest"] for line in plain}) == 3
    assert train(experts_job, "model", "generation.speculation.mode=model", exact) == plain
    for out in ("off", "model"):
        steps = [StepMetrics.from_line(line) for line in lines_of(experts_job, out)]
        assert [step.log_prob_difference.max for step in steps] == [0.0] * 3


def test_steps_tell_each_experts_load(experts_job: Path) -> None:
    train(experts_job, "off")
    for line in lines_of(experts_job, "off"):
        step = StepMetrics.from_line(line)
        assert len(step.expert_rows) == NUM_LAYERS
        assert {len(counts) for counts in step.expert_rows.values()} == {NUM_EXPERTS}
        totals = {sum(counts) for counts in step.expert_rows.values()}
        assert len(totals) == 1, "every layer runs the same rows"
        prompts = 3 * len("0+0=")  # at least; the replicas of a prompt share its rows
        assert totals.pop() >= CHOSEN * (step.num_response_tokens - step.num_samples + prompts)


def test_the_manifest_says_how_every_model_was_found_right(experts_job: Path) -> None:
    result = invoke(experts_job, "run", "training.exactOnPolicy=true", "training.steps=1")
    assert result.exit_code == 0, result.output
    models = RunFolder(experts_job.parent / "run").manifest().models
    assert {role: report["path"] for role, report in models.items()} == {
        "generator": "layers", "drafter": "layers", "reference": "layers", "critic": "layers", "trainer": "exact",
    }  # fmt: skip
    for role, report in models.items():
        assert report["difference"] < 1e-5, role
        assert report["bits"] == "every row's own", role
        assert report["attentions"] == ["4 heads of 16 over 2, scale 0.25"]
        assert len(report["probes"]) >= 2


def test_a_manifest_of_an_older_run_has_no_models(experts_job: Path) -> None:
    train(experts_job, "run")
    folder = RunFolder(experts_job.parent / "run")
    content = json.loads(folder.manifest_file.read_text())
    del content["models"]
    folder.manifest_file.write_text(json.dumps(content))
    assert folder.manifest().models == {}
    train(experts_job, "run", "training.steps=4", resume=True)
    assert set(folder.manifest().models) >= {"generator", "trainer"}
    assert len(curve_of(experts_job, "run")) == 4

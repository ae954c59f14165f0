"""Combinations of ways to run a job work, or are refused before anything is written."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from runs import curve_of, invoke, lines_of, train, with_reward, with_spec, write_data, write_job, write_models
from shuffled import ShuffledTransport
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.sweep.classes import stirred, tiny_config
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

OFF = "generation.speculation.mode=off"
BFLOAT16 = "generation.dtype=bfloat16"
PATIENCE_SECONDS = 120.0


def steps_of(job_file: Path, out: str, *overrides: str) -> list[dict[str, Any]]:
    invoke(job_file, out, OFF, *overrides, code=0)
    return [json.loads(line) for line in lines_of(job_file, out)]


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ({"name": "grpo"}, ()),
        ({"name": "ppo"}, ()),
        ({"name": "dapo", "maxDemands": 2}, ()),
        ({"name": "gspo"}, ("training.miniBatches=2", "training.epochs=2")),
        ({"name": "grpo"}, ("model.lora={}", "training.exactOnPolicy=true")),
    ],
    ids=["grpo", "ppo", "dapo", "gspo", "lora"],
)
def test_drafts_workers_and_order_change_no_curve(
    job_file: Path, models: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    write_job(job_file.parent, models, **algorithm)
    if algorithm["name"] == "dapo":  # so coarse that many groups are all equal
        with_reward(job_file, "return float(completion[:1].isalpha())")
    plain = train(job_file, "plain", *overrides)
    if algorithm["name"] == "dapo":
        assert any(line["num_dropped"] for line in plain), "there were demands"
    two = [f"roles.{role}.workers=2" for role in ("generator", "reward", "reference", "critic")]
    assert train(job_file, "workers", *two, *overrides) == plain
    monkeypatch.setattr("rlhfspec.cli.local.MemoryTransport", ShuffledTransport)
    assert train(job_file, "other", "generation.speculation.mode=adaptive", *two, *overrides) == plain


def test_lora_resumes_and_is_merged_when_exported(job_file: Path) -> None:
    lora = ("model.lora={}", "checkpoint.export=true")
    whole = train(job_file, "whole", *lora)
    train(job_file, "parts", *lora, "training.steps=1")
    assert train(job_file, "parts", *lora, resume=True)[1:] == whole[1:]
    models = [AutoModelForCausalLM.from_pretrained(job_file.parent / out / "export") for out in ("whole", "parts")]
    one, other = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not any("lora" in name for name in one)


@pytest.mark.parametrize("overrides", [(), (BFLOAT16,), (BFLOAT16, "model.lora={}")])
def test_exact_on_policy_training_has_no_log_prob_difference(job_file: Path, overrides: tuple[str, ...]) -> None:
    result = invoke(job_file, "exact", OFF, "training.exactOnPolicy=true", *overrides, code=0)
    assert [json.loads(line)["log_prob_difference"]["max"] for line in lines_of(job_file, "exact")] == [0.0] * 3
    assert "log-prob difference max 0" in result.output


@pytest.mark.parametrize(
    ("overrides", "least", "most"),
    [((), 0.0, 1e-5), (("training.autocast=bfloat16",), 1e-4, 0.5), (("model.dtype=bfloat16",), 1e-4, 0.5)],
)
def test_rounded_arithmetic_shows_in_the_log_prob_difference(
    job_file: Path, overrides: tuple[str, ...], least: float, most: float
) -> None:
    assert all(least < step["log_prob_difference"]["max"] < most for step in steps_of(job_file, "rounded", *overrides))


def test_a_lower_generator_precision_is_corrected_unless_the_job_forbids_it(job_file: Path) -> None:
    """The correction is on where nothing is said, and off with 0 and where the precision is the same."""
    for out, overrides in (("by-default", [BFLOAT16]), ("off", [BFLOAT16, "algorithm.importanceCap=0"]), ("same", [])):
        steps = steps_of(job_file, out, *overrides, "training.steps=1")
        summary = RunFolder(job_file.parent / out).summary_file.read_text()
        assert ("importance_weight" in steps[0]["learning"]) == (out == "by-default")
        assert ("; corrected by importance weights, mean " in summary) == (out == "by-default")


def test_a_job_in_bfloat16_learns_as_one_in_float32(job_file: Path) -> None:
    def rewards(out: str, *overrides: str) -> list[float]:
        sizes = ("training.steps=16", "training.promptsPerStep=6", "training.optimizer.learningRate=3e-3")
        return [step["reward"]["mean"] for step in train(job_file, out, *sizes, *overrides)]

    wide = rewards("float32")
    for trainer in ("training.autocast", "model.dtype"):
        half = rewards(trainer, BFLOAT16, f"{trainer}=bfloat16")
        assert half[0] == pytest.approx(wide[0], abs=0.02), "the same policy, near-ties apart"
        assert min(wide[-1], half[-1]) > 3 * wide[0]
        assert fmean(half[-4:]) == pytest.approx(fmean(wide[-4:]), abs=0.1)


def test_steps_that_run_ahead_report_staleness_and_are_corrected(job_file: Path) -> None:
    ahead = ("training.maxStaleness=2", "training.steps=6", "algorithm.importanceCap=2.0")
    steps = steps_of(job_file, "stale", *ahead)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    staleness = [step["staleness_max"] for step in steps]
    assert staleness[0] == 0
    assert 1 <= max(staleness) <= 2
    weights = [step["learning"]["importance_weight"] for step in steps]
    assert weights[0] == pytest.approx(1.0, abs=1e-4), "the first step is on policy"
    assert any(abs(weight - 1.0) > 1e-3 for weight in weights[1:])


@pytest.mark.parametrize("mask", ["generation.topK=5", "generation.topP=0.9"])
def test_sampling_masks_are_corrected_by_importance_weights(job_file: Path, mask: str) -> None:
    steps = steps_of(job_file, "masked", mask, "algorithm.importanceCap=2.0")
    assert all(0.3 < step["learning"]["importance_weight"] < 1.0 for step in steps)
    assert all(step["log_prob_difference"]["max"] < 1e-4 for step in steps), "compared without the mask"


def test_groups_of_equal_rewards_are_trained_on_once_demands_are_used_up(job_file: Path, models: Path) -> None:
    with_reward(write_job(job_file.parent, models, name="dapo", maxDemands=2), "return 1.0")
    [step, *_] = steps_of(job_file, "equal", "training.steps=1")
    assert (step["num_samples"], step["num_dropped"]) == (9, 18), "two rounds of three prompts were left out"
    assert step["learning"]["advantage_abs_mean"] == 0.0


def test_chat_messages_use_the_template_of_another_tokenizer(job_file: Path, models: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"日本 {number} 🙂"}]} for number in range(6)]
    (job_file.parent / "chät.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(models / "policy")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(job_file.parent / "tokenizer")
    with_spec(job_file, dataset={"path": "chät.jsonl", "messagesColumn": "messages"}, model={"tokenizer": "tokenizer"})
    assert len(steps_of(job_file, "chat", "training.steps=1")) == 1
    sample = json.loads((job_file.parent / "chat" / "samples.jsonl").read_text().splitlines()[0])
    assert re.fullmatch(r"<user>日本 \d 🙂<assistant>", sample["prompt"])


def test_a_model_of_nan_is_named(job_file: Path, models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models / "policy")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    model.save_pretrained(job_file.parent / "nan")
    AutoTokenizer.from_pretrained(models / "policy").save_pretrained(job_file.parent / "nan")
    result = invoke(with_spec(job_file, model={"path": "nan"}), "out", OFF, code=1)
    assert "letters/1/0/0 was not generated" in result.output
    assert "NaN" in result.output


def test_rewards_of_any_size_are_shown_in_few_digits(job_file: Path) -> None:
    result = invoke(with_reward(job_file, "return 1e30 * len(completion)"), "huge", OFF, "training.steps=1", code=0)
    assert max(len(line) for line in result.output.splitlines() if line.startswith("step ")) < 200


def test_if_all_rewards_failed_the_first_failure_is_reported(job_file: Path) -> None:
    result = invoke(with_reward(job_file, "raise ValueError('no digits')", onError="drop"), "dropped", OFF, code=1)
    assert "all were dropped; the first, letters/1/0/0: reward 'reward': it raised ValueError: no digits" in " ".join(
        result.output.split()
    )


def test_a_run_tells_no_secret(job_file: Path) -> None:
    """Secrets appear only in job.yaml, which its owner alone can read."""
    secret = "s3cr3t"
    http = {"type": "http", "url": f"http://me:{secret}@127.0.0.1:9/?key={secret}", "retries": 0}
    header = f"rewards.sources[0].headers.key={secret}"
    result = invoke(with_spec(job_file, rewards={"sources": [http]}), "out", OFF, header, code=1)
    assert "the connection failed" in result.output
    assert "--set 'rewards.sources[0].headers.key=...'" in result.output
    files = [path for path in (job_file.parent / "out").rglob("*") if path.is_file()]
    telling = [path.name for path in files if secret.encode() in path.read_bytes()]
    assert (secret in result.output, telling) == (False, ["job.yaml"])
    assert (job_file.parent / "out" / "job.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("generation.maxTokens=600",), "spec.generation.maxTokens: the model has 512 positions"),
        (("generation.maxTokens=508",), "spec.generation.maxTokens: the longest prompt has 5 tokens"),
        (("observability.wandb={project: sums}",), "spec.observability.wandb: needs a package: pip install wandb"),
        (("observability.view=live",), "spec.observability.view"),
        (("observability.otlpEndpoint=localhost:4317",), "spec.observability.otlpEndpoint"),
        (("observability.otlpEndpoint=http://localhost:4317",), "pip install 'rlhfspec[processes]'"),
        (("training.stpes=3",), "did you mean steps"),
        (("evaluation.numPrompts=24",), "spec.evaluation.numPrompts: must be < 24, the rows of the dataset"),
        (
            ("roles.trainer.ranks=2",),
            "spec.roles.trainer.ranks: unknown key; set ranksPerNode, and nodes for more than one node",
        ),
        (
            ("roles.trainer.contextParallel=2",),
            "contextParallel: unknown key; is not supported: a whole sequence is on one rank, or on",
        ),
        (
            ("roles.trainer.ranksPerNode=4", "roles.trainer.tensorParallel=4"),
            "spec.roles.trainer.tensorParallel: must divide the model's num_key_value_heads (2) (got 4)",
        ),
        (
            ("roles.trainer.ranksPerNode=2",),
            "spec.roles.trainer.ranksPerNode: needs --processes, or torchrun --nproc-per-node 2",
        ),
        (
            ("roles.trainer.nodes=2", "roles.trainer.ranksPerNode=2"),
            "spec.roles.trainer.nodes: needs --processes, or torchrun --nnodes 2 --nproc-per-node 2",
        ),
        (("roles.generator.tensorParallel=2",), "spec.roles.generator.tensorParallel: needs --processes (got 2)"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    job_file: Path, overrides: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhfspec.runs.folder.trackers.find_spec", lambda name: None)
    assert said in invoke(job_file, "never", OFF, *overrides, code=2).output
    assert not (job_file.parent / "never").exists()


def test_a_prompt_longer_than_the_model_allows_is_refused(job_file: Path) -> None:
    (job_file.parent / "data.jsonl").write_text('{"prompt": "' + "1+" * 300 + '"}\n')
    result = invoke(job_file, "never", OFF, "dataset.maxPromptTokens=1000", code=2)
    assert (
        "spec.dataset.maxPromptTokens: the longest prompt has 601 tokens, and the model 512 positions" in result.output
    )


def test_ctrl_c_twice_in_the_live_view_gives_the_terminal_back(job_file: Path) -> None:
    """The first Ctrl-C finishes the step, which takes for ever here; the second leaves at once."""
    arguments = ["run", str(job_file), "--out", str(job_file.parent / "out"), "--set", "observability.view=live"]
    child, terminal = pty.fork()
    if child == 0:
        command = [sys.executable, "-m", "rlhfspec.cli.start", *arguments, "--set", OFF]
        _as_a_shell_does([*command, "--set", "training.epochs=1000000"])
    shown = _read_until(terminal, "learning from step 1", b"")
    os.write(terminal, b"\x03")
    shown = _read_until(terminal, "press Ctrl-C again to stop at once", shown)
    os.write(terminal, b"\x03")
    shown = _read_until(terminal, "the last checkpoint is kept", shown)
    os.write(terminal, b"\n")
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"\x1b[?25l" in shown, "the live view hides the cursor"
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l"), "and it is shown again"


def _as_a_shell_does(command: list[str]) -> None:
    """Run the command, and keep the terminal after it: Linux drops unread output when a session's leader ends."""
    view = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "LINES": "40", "COLUMNS": "100"}
    run = subprocess.Popen(command, env=os.environ | view)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = run.wait()
    os.read(0, 1)
    os._exit(code)


def _read_until(terminal: int, text: str, shown: bytes) -> bytes:
    end = time.monotonic() + PATIENCE_SECONDS
    while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode(errors="replace")):
        assert time.monotonic() < end, shown[-2000:].decode(errors="replace")
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 1 << 16)
    return shown


def test_the_curve_does_not_depend_on_the_working_directory(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in a job are relative to its file."""
    here = train(job_file, "here", "training.steps=1")
    (elsewhere := job_file.parent / "else where").mkdir()
    monkeypatch.chdir(elsewhere)
    train(job_file, "there", "training.steps=1")
    assert curve_of(job_file, "there") == here


def test_speculation_does_not_change_the_curve(job_file: Path) -> None:
    plain = train(job_file, "off")
    assert len(plain) == 3
    assert len({line["weights_digest"] for line in plain}) == 3, "every step changes the weights"
    for mode in ("suffix", "model", "adaptive"):
        assert train(job_file, mode, f"generation.speculation.mode={mode}") == plain
    drafted = [json.loads(line)["accepted_per_verification"] for line in lines_of(job_file, "model")]
    assert any(drafted), "the model drafter was really used"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resuming_at_every_step_continues_the_same_curve(job_file: Path, models: Path, algorithm: str) -> None:
    write_job(job_file.parent, models, name=algorithm)
    whole = train(job_file, "whole")
    for step in (1, 2, 3):
        train(job_file, "parts", f"training.steps={step}", resume=step > 1)
    assert curve_of(job_file, "parts") == whole


NUM_EXPERTS, CHOSEN, NUM_LAYERS = 6, 2, 4


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    invoke(experts_job, "run", "training.exactOnPolicy=true", "training.steps=1", code=0)
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

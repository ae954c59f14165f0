"""Malformed jobs and datasets exit with code 2, the field and the fix; checks of a job in a cluster."""

import copy
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hypothesis import given, strategies as st
from invalid_jobs import FUNCTION, HTTP, JOB, REMOVED, SOURCE, Wrong, all_wrong, edited
from pydantic import ValidationError
from runs import command
from safetensors.numpy import save_file
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.cluster import names
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.cluster.crd_rules import MUTABLE
from rlhfspec.errors import JobError
from rlhfspec.job import Dataset, RLHFJob
from rlhfspec.job.cluster import Role
from rlhfspec.job.file import read_job
from rlhfspec.job.file.checks import check
from rlhfspec.job.file.problems import explain
from rlhfspec.job.file.remarks import left_aside
from rlhfspec.job.file.yaml_text import dotted
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer
from rlhfspec.training.data import load_rows

LAPTOP_JOB = JOB | {
    "spec": {
        "model": {"path": "./model"},
        "dataset": {"path": "./train.jsonl"},
        "algorithm": {"name": "grpo"},
        "rewards": {"sources": [FUNCTION]},
        "training": {"steps": 2, "promptsPerStep": 2},
    }
}
HEAD = "apiVersion: rlhfspec.io/v1alpha1\nkind: RLHFJob\nmetadata: {name: sums}\n"
TWO = [{"type": "function", "function": "rewards:exact"}, {"type": "function", "function": "rewards:exact"}]
PPO = {"algorithm.name": "ppo"}
JUDGE = {"type": "model", "path": "./judge"}

# What is put where in spec (or from the top, with a leading "/"), the field that is named, and the fix that is named.
# Others are in invalid_jobs.py: what the schema alone refuses, and each rule.
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"/apiVersion": "rlhfspec.io/v2"}, "apiVersion", "must be rlhfspec.io/v1alpha1"),
    ({"/kind": "Job"}, "kind", "must be RLHFJob"),
    ({"/metadata": REMOVED}, "metadata", "is required"),
    ({"/metadata.name": "My Run"}, "metadata.name", "lower case letters, digits and inner dashes"),
    ({"/spec": REMOVED}, "spec", "is required"),
    ({"/spec": []}, "spec", "must be a block of fields"),
    ({"/sepc": {}}, "sepc", "did you mean spec?"),
    ({"trainig": {"steps": 3}}, "spec.trainig", "did you mean training?"),
    ({"steps": 3}, "spec.steps", "did you mean training.steps?"),
    ({"training.learning_rate": 1e-6}, "spec.training.learning_rate", "did you mean training.optimizer.learningRate?"),
    ({"training.optimizer": {"lr": 1e-6}}, "spec.training.optimizer.lr", "known here: name, learningRate, arguments"),
    ({"training.steps": "many"}, "spec.training.steps", "must be a whole number >= 1"),
    ({"training.steps": 0}, "spec.training.steps", "must be >= 1"),
    ({"training.steps": 2.5}, "spec.training.steps", "must be a whole number"),
    ({"training.steps": True}, "spec.training.steps", "must be a whole number"),
    ({"training.steps": None}, "spec.training.steps", "is empty here"),
    ({"training.seed": 1 << 64}, "spec.training.seed", "< 9223372036854775808"),
    ({"training.optimizer": {"learningRate": float("nan")}}, "spec.training.optimizer.learningRate", "finite number"),
    ({"training.optimizer": {"name": "Adam W"}}, "spec.training.optimizer.name", "class of torch"),
    ({"training.exactOnPolicy": "yes"}, "spec.training.exactOnPolicy", "true or false"),
    ({"training.miniBatches": 17}, "spec.training.miniBatches", "must be <= 16"),
    ({"training.autocast": "bf16"}, "spec.training.autocast", "must be one of auto, off, bfloat16"),
    ({"model.path": REMOVED}, "spec.model.path", "Hugging Face folder or hub id"),
    ({"model.path": "./modl"}, "spec.model.path", "did you mean ./model?"),
    ({"model.path": "modl"}, "spec.model.path", "no such folder; did you mean model?"),
    ({"model.tokenizer": "confg-only"}, "spec.model.tokenizer", "no such folder; did you mean config-only?"),
    ({"model.path": "/no/such/place"}, "spec.model.path", "no such file or folder"),
    ({"model.path": "./train.jsonl"}, "spec.model.path", "must be a folder"),
    ({"model.drafter": "./empty"}, "spec.model.drafter", "has no config.json"),
    ({"model.critic": "./model"}, "spec.model.critic", "use algorithm.name: ppo"),
    ({"dataset.path": "./trian.jsonl"}, "spec.dataset.path", "did you mean ./train.jsonl?"),
    ({"dataset.path": "./rewards.py"}, "spec.dataset.path", ".jsonl, .json or .csv"),
    ({"dataset.path": "./empty"}, "spec.dataset.path", "save_to_disk"),
    ({"dataset.promptColumn": "question"}, "spec.dataset.promptColumn", "this row has prompt, answer"),
    ({"algorithm.name": "grop"}, "spec.algorithm.name", "did you mean grpo?"),
    ({"algorithm.name": ["grpo"]}, "spec.algorithm.name", "must be one of ppo"),
    ({"algorithm.clipLow": 1.5}, "spec.algorithm.clipLow", "must be >= 0 and <= 1"),
    ({"algorithm.gaeLambda": 0.5}, "spec.algorithm.gaeLambda", "grpo has no critic"),
    ({"algorithm.overlongBuffer": 256}, "spec.algorithm.overlongBuffer", "generation.maxTokens (256)"),
    ({"generation.speculation": {"mode": "modle"}}, "spec.generation.speculation.mode", "did you mean model?"),
    (
        {"model": {"path": "./model", "drafter": "self"}, "generation.speculation": {"learning": "auto"}},
        "spec.generation.speculation.learning", "only EAGLE-3 drafters learn: make one with rlhfspec drafter train",
    ),
    (
        {"model": {"path": "./model", "drafter": "./draft"}, "generation.speculation": {"learning": "auto"}},
        "spec.generation.speculation.learning", "only EAGLE-3 drafters learn: make one with rlhfspec drafter train",
    ),
    ({"generation.temperature": 0}, "spec.generation.temperature", "must be >= 0.01"),
    ({"generation.temperature": 1e-30}, "spec.generation.temperature", "must be >= 0.01 and <= 100"),
    ({"generation.temperature": -1.0}, "spec.generation.temperature", "must be >= 0.01"),
    ({"generation.temperature": 1e30}, "spec.generation.temperature", "and <= 100"),
    ({"generation.temperature": float("nan")}, "spec.generation.temperature", "finite number >= 0.01"),
    ({"generation.temperature": float("inf")}, "spec.generation.temperature", "finite number >= 0.01"),
    ({"generation.stop": "\n"}, "spec.generation.stop", "must be a list"),
    ({"generation.kvCacheTokens": 100}, "spec.generation.kvCacheTokens", "must be >= dataset.maxPromptTokens"),
    ({f"{SOURCE}.type": "functon"}, f"spec.{SOURCE}", "type must be one of function, model, http"),
    ({f"{SOURCE}.function": ":"}, f"spec.{SOURCE}.function", "must be module:function"),
    ({f"{SOURCE}.function": "__main__:x"}, f"spec.{SOURCE}.function", "__main__ is the program that runs"),
    ({f"{SOURCE}.function": "__main__.x:x"}, f"spec.{SOURCE}.function", "__main__ is the program that runs"),
    ({f"{SOURCE}.function": "rewards:exakt"}, f"spec.{SOURCE}.function", "did you mean exact?"),
    ({f"{SOURCE}.function": "reward:exact"}, f"spec.{SOURCE}.function", "did you mean rewards?"),
    ({f"{SOURCE}.function": "broken:f"}, f"spec.{SOURCE}.function", "broken.py is not Python"),
    ({f"{SOURCE}.timeoutSeconds": 300}, f"spec.{SOURCE}.timeoutSeconds", "roles.reward.deadlineSeconds"),
    (
        {f"{SOURCE}.batched": True, "roles.reward": {"workers": 2}}, f"spec.{SOURCE}.batched",
        "or roles.reward.workers must be 1",
    ),
    ({"rewards.sources": TWO}, f"spec.{SOURCE}.name", "give each its own name"),
    ({"rewards.sources": [HTTP | {"url": "http://host:port/"}]}, f"spec.{SOURCE}.url", "must be a URL such as"),
    ({"rewards.sources": [HTTP | {"url": "http://[/"}]}, f"spec.{SOURCE}.url", "must be a URL such as"),
    ({"rewards.sources": [HTTP | {"url": "http://${NO_SUCH}/"}]}, f"spec.{SOURCE}.url", "variable NO_SUCH is not set"),
    ({"rewards.sources": [HTTP | {"headers": {"a b": "x"}}]}, f"spec.{SOURCE}.headers", "is not a valid header name"),
    ({"rewards.sources": [HTTP | {"headers": {"key": "\n"}}]}, f"spec.{SOURCE}.headers.key", "printable ASCII"),
    ({"dataset.path": "https://me:pw@host/d.jsonl"}, "spec.dataset.path", "is a URL: download it"),
    ({"training.promptsPerStep": 10**8}, "spec.training.promptsPerStep", "800,000,000 samples are in flight at once"),
    ({"roles.generator": {"workers": 10**4}}, "spec.roles.generator.workers", "each holds its own model"),
    ({f"{SOURCE}.function": "wants:anser"}, f"spec.{SOURCE}.function", "did you mean answer?"),
    ({f"{SOURCE}.function": "raising:f"}, f"spec.{SOURCE}.function", "importing 'raising' raised OSError: no disk"),
    ({"rewards.sources": [JUDGE | {"path": "./short"}]}, f"spec.{SOURCE}.path", "LlamaForCausalLM is not a sequence-"),
    ({"rewards.sources": [JUDGE]}, f"spec.{SOURCE}.label", "the model has 3 outputs: set the index of the reward"),
    ({"rewards.sources": [JUDGE | {"label": 3}]}, f"spec.{SOURCE}.label", "must be < 3: the model has 3 outputs"),
    ({"model": {"path": "./short", "drafter": "./draft"}, "generation.maxTokens": 9}, "spec.model.drafter", "9 entr"),
    ({"model": {"path": "./short", "drafter": "mtp"}}, "spec.model.drafter", "checkpoint has no MTP layers"),
    ({"model.path": "./short", "generation.maxTokens": 128}, "spec.generation.maxTokens", "must be < 128"),
    ({"model": {"path": "./short", "lora": {"targetModules": ["q_prj"]}}}, "spec.model.lora.targetModules", "q_proj?"),
    ({"training.optimizer": {"name": "AdamX"}}, "spec.training.optimizer.name", "did you mean Adam"),
    ({"training.optimizer": {"arguments": {"bettas": 1}}}, "spec.training.optimizer.arguments", "bettas"),
    ({"training.schedule": {"name": "cosin"}}, "spec.training.schedule.name", "did you mean cosine?"),
    (PPO | {"training.criticOptimizer": {"name": "LBFGS"}}, "spec.training.criticOptimizer.name", "fit"),
    ({"dataset.epochs": 1, "training.promptsPerStep": 9}, "spec.training.promptsPerStep", "fewer than the first step"),
    ({"observability.wandb": {}}, "spec.observability.wandb.project", "is required"),
]  # fmt: skip

# The file's bytes and what is said of it.
FILES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "file", "is empty"),
    "comments-only": (b"# nothing\n", "file", "is empty"),
    "list": (b"- spec\n", "file", "must be a mapping"),
    "text": (b"hello\n", "file", "must be a mapping"),
    "tab": (HEAD.encode() + b"spec:\n\tmodel: m\n", "line 5: file", "spaces only"),
    "open-quote": (HEAD.encode() + b'spec: "\n', "file", "is not YAML"),
    "colon": (HEAD.encode() + b"spec: a: b\n", "line 4: file", "needs quotes"),
    "duplicate": (HEAD.encode() + b"kind: RLHFJob\n", "line 4: kind", "keep one"),
    "two-documents": (HEAD.encode() + b"---\n" + HEAD.encode(), "file", "one file is one job"),
    "latin-1": (HEAD.encode() + "# Grüße\n".encode("latin-1"), "line 4: file", "must be UTF-8"),
    "tag": (HEAD.encode() + b"spec: !!python/object:os.system {}\n", "spec", "remove it"),
    "scalar-tag": (HEAD.encode() + b"spec: {model: {path: !secret x}}\n", "spec.model.path", "remove it"),
    "merge": (HEAD.encode() + b"spec: {<<: {a: 1}}\n", "spec.<<", "write the fields out"),
    "bomb": (b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n".encode() for old, new in zip("abcdefg", "bcdefgh", strict=True)
    ), "file", "aliases"),
    "circle": (HEAD.encode() + b"spec: &s {model: *s}\n", "spec.model", "contains itself"),
    "deep": (b"[" * 5000, "file", "nested too deeply"),
    "huge": (b"#" * 300_000, "file", "at most 262144"),
    "nothing-in-spec": (HEAD.encode() + b"spec:\n", "spec", "is empty here"),
}  # fmt: skip

# The data, what else the job says, and what is said of it. Through the tokenizer too.
ROW = b'{"prompt": "1+1=", "answer": "2"}\n'
CHAT = {"dataset.messagesColumn": "m"}
MESSAGES = "spec.dataset.messagesColumn"
DATA: dict[str, tuple[bytes, dict[str, Any], str, str]] = {
    "bad-line": (ROW + b'{"prompt": "1+1=",}\n', {}, "line 2: spec.dataset.path", "is not JSON"),
    "nothing": (b"", {}, "spec.dataset.path", "holds no rows"),
    "array": (b'[{"prompt": "a"}]\n', {}, "line 1: spec.dataset.path", "must be an object"),
    "nan": (ROW + b'{"prompt": "a", "x": NaN}\n', {}, "line 2: spec.dataset.path", "NaN is not a JSON number"),
    "latin-1": (ROW + b'{"prompt": "\xfc"}\n', {}, "line 2: spec.dataset.path", "must be UTF-8"),
    "missing-column": (ROW + b'{"promt": "a"}\n', {}, "line 2: spec.dataset.promptColumn", "did you mean promt?"),
    "number": (b'{"prompt": 3}\n', {}, "line 1: spec.dataset.promptColumn", "must be text, not a number"),
    "null": (b'{"prompt": null}\n', {}, "line 1: spec.dataset.promptColumn", "must be text, not null"),
    "blank": (b'{"prompt": ""}\n', {}, "line 1: spec.dataset.promptColumn", "is empty; remove the row"),
    "half-a-pair": (b'{"prompt": "a\\ud83d"}\n', {}, "line 1: spec.dataset.promptColumn", "half of a character"),
    "half-pair-said": (b'{"m": [{"role": "user", "content": "\\udc00"}]}\n', CHAT, f"line 1: {MESSAGES}", "half of a"),
    "half-a-pair-in-a-name": (b'{"\\ud83d": 1}\n', {}, "line 1: spec.dataset.promptColumn", "this row has \\ud83d"),
    "row-without-argument": (ROW + b'{"prompt": "a"}\n', {}, f"spec.{SOURCE}.function", "line 2 of the data lacks it"),
    "messages-text": (b'{"m": "hi"}\n', CHAT, f"line 1: {MESSAGES}", "must be a list"),
    "messages-role": (b'{"m": [{"content": "hi"}]}\n', CHAT, MESSAGES, "role must be text"),
    "messages-answered": (b'{"m": [{"role": "assistant", "content": "hi"}]}\n', CHAT, MESSAGES, "one to answer"),
    "no-template": (b'{"m": [{"role": "user", "content": "hi"}]}\n', CHAT, MESSAGES, "no chat template"),
    "all-long": (ROW, {"dataset.maxPromptTokens": 4}, "spec.dataset.maxPromptTokens", "the shortest of 1 has 5"),
    "too-few": (ROW, {"dataset.epochs": 1}, "spec.training.promptsPerStep", "fewer than the first step needs"),
    "no-tokenizer": (ROW, {"model.tokenizer": "./config-only"}, "spec.model.tokenizer", "no tokenizer"),
}  # fmt: skip


CONFIGS = {
    "judge": {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
    "short": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "vocab_size": 8},
    "draft": {"vocab_size": 9},
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield f"{path}{key}", child
        yield from leaves(child, f"{path}{key}.")


def laptop(folder: Path, edits: dict[str, Any]) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(edited(edits, LAPTOP_JOB)))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    hugging_face_tokenizer().save_pretrained(folder / "model")
    for name in ("model", "config-only"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "train.jsonl").write_bytes(ROW * 3)
    (folder / "rewards.py").write_text("def exact(completion, answer):\n    return float(completion == answer)\n")
    (folder / "wants.py").write_text("def anser(completion, anser):\n    return 0.0\n")
    (folder / "raising.py").write_text("raise OSError('no disk')\ndef f(completion): pass\n")
    (folder / "hanging.py").write_text("import threading\nthreading.Event().wait()\ndef f(completion): pass\n")
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros(1)}, folder / "short" / "model.safetensors")
    (folder / "broken.py").write_text("def f(:\n")
    return folder


def assert_refused(file: Path, field: str, fix: str, *options: str) -> None:
    result = command(["validate", str(file), *options], 2)
    assert isinstance(result.exception, SystemExit)
    said = next((line for line in result.output.splitlines() if f"{field}: " in line), result.output)
    assert f"{field}: " in said, result.output
    assert fix in said, result.output
    assert "Traceback" not in result.output


def test_the_unspoiled_job_is_valid(folder: Path) -> None:
    job = str(laptop(folder, {}))
    assert "3 of 5 to 5 tokens, 0 too long" in command(["validate", job, "--prompts"], 0).output


@pytest.mark.parametrize(("edits", "field", "fix"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_malformed_field_is_refused_with_a_fix(folder: Path, edits: dict[str, Any], field: str, fix: str) -> None:
    assert_refused(laptop(folder, edits), field, fix)


def test_a_reward_function_without_a_name_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert_refused(laptop(Path(), {f"{SOURCE}.function": ":"}), f"spec.{SOURCE}.function", "must be module:function")


@pytest.mark.parametrize(("content", "field", "fix"), FILES.values(), ids=list(FILES))
def test_a_malformed_job_file_is_refused(folder: Path, content: bytes, field: str, fix: str) -> None:
    file = folder / "text.yaml"
    file.write_bytes(content)
    assert_refused(file, field, fix)


@pytest.mark.parametrize(("content", "edits", "field", "fix"), DATA.values(), ids=list(DATA))
def test_malformed_data_is_refused(folder: Path, content: bytes, edits: dict[str, Any], field: str, fix: str) -> None:
    (folder / "data.jsonl").write_bytes(content)
    assert_refused(laptop(folder, {"dataset.path": "./data.jsonl"} | edits), field, fix, "--prompts")


def test_a_malformed_parquet_file_is_refused(folder: Path) -> None:
    file = laptop(folder, {"dataset.path": "./data.parquet"})
    (folder / "data.parquet").write_bytes(b"PAR1 and no more")
    assert_refused(file, "spec.dataset.path", "not a readable Parquet file")
    table = pyarrow.table({"prompt": ["a", "b"], "answer": ["a", "b"], "score": [1.0, float("nan")]})
    pyarrow.parquet.write_table(table, folder / "data.parquet")
    assert CliRunner().invoke(app, ["validate", str(file)]).exit_code == 0, "a reward gets null"


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        ("training.stps=3", "--set training.stps=3: spec.training.stps", "did you mean steps?"),
        ("trainig.steps=3", "--set trainig.steps=3: spec.trainig", "did you mean training?"),
        ("training.steps=0", "--set training.steps=0: spec.training.steps", "must be >= 1"),
        ("training.steps", "--set", "must look like training.steps=3"),
        ("rewards.sources.4.weight=2", "spec.rewards.sources[4].weight", "not a block"),
        ("training.steps.more=2", "spec.training.steps.more", "not a block"),
        ("model.path=[", "spec.model.path", "is not YAML"),
    ],
)
def test_a_malformed_override_is_refused(folder: Path, override: str, field: str, fix: str) -> None:
    assert_refused(laptop(folder, {}), field, fix, "--set", override)


@pytest.mark.parametrize(
    ("name", "fix"), [("gone.yaml", "beside it: "), ("empty", "this is a folder"), ("no/job.yaml", "rlhfspec init")]
)
def test_a_path_that_is_no_job_file_is_refused(folder: Path, name: str, fix: str) -> None:
    (folder / "good.yaml").touch()
    assert_refused(folder / name, "file", fix)


@pytest.mark.timeout(20)  # what reads a pipe waits for its writer
def test_a_pipe_is_refused_as_job_and_as_data(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    assert_refused(folder / "pipe.jsonl", "file", "must be a regular file")
    assert_refused(laptop(folder, {"dataset.path": "./pipe.jsonl"}), "spec.dataset.path", "must be a regular file")
    with pytest.raises(JobError, match=r"must be a regular file"):
        load_rows(Dataset(path=str(folder / "pipe.jsonl")))


def test_a_hanging_import_of_a_reward_is_refused_and_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlhfspec.training.scoring.rewards.imports.IMPORT_SECONDS", 0.05)
    path = list(sys.path)
    file = laptop(folder, {f"{SOURCE}.function": "hanging:f"})
    assert_refused(file, f"spec.{SOURCE}.function", "importing 'hanging' took longer than 0.05 s")
    assert f"spec.{SOURCE}.function: still importing 'hanging'; it may take 0.05 s" in caplog.text
    monkeypatch.setattr(sys, "path", path)


def test_a_slow_import_of_a_reward_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(step=2.5).__next__)
    monkeypatch.setattr("rlhfspec.training.scoring.rewards.imports.time", clock)
    (folder / "slow.py").write_text("def f(completion): return 1.0\n")
    command(["validate", str(laptop(folder, {f"{SOURCE}.function": "slow:f"}))], 0)
    assert caplog.messages == [f"spec.{SOURCE}.function: importing 'slow' took 2.5 s"]


def test_a_missing_package_is_refused_with_its_pip_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec.runs.folder.trackers.find_spec", lambda name: None)
    file = laptop(folder, {"observability.wandb": {"project": "p"}})
    assert_refused(file, "spec.observability.wandb", "needs a package: pip install wandb")


SECRET = "s3cr3t"
ENDPOINT = f"http://me:{SECRET}@host/?key={SECRET}"
WITH_SECRETS: list[tuple[dict[str, Any], list[str]]] = [
    ({"rewards.sources": [HTTP | {"headers": {"key": [SECRET]}}]}, []),
    ({"rewards.sources": [HTTP | {"headers": f"key: {SECRET}"}]}, []),
    ({"rewards.sources": [HTTP | {"headers": {"key": f"{SECRET}\n"}}]}, []),
    ({"rewards.sources": [HTTP | {"url": f"htp://me:{SECRET}@host/"}]}, []),
    ({"rewards.sources": [HTTP | {"url": f"me:{SECRET}@host/"}]}, []),
    ({"rewards.sources": [HTTP | {"url": ENDPOINT}] * 2}, []),
    ({"dataset.path": ENDPOINT}, []),
    ({"model.path": ENDPOINT}, []),
    ({}, [f"dataset.path={ENDPOINT}"]),
    ({}, [f"rewards.sources[0].url=ftp://me:{SECRET}@host"]),
    ({}, [f"rewards.sources[0].headers={{key: 3, other: {SECRET}}}"]),
    ({}, [f"rewards.sources=[{{type: http, url: '{ENDPOINT}', headers: {{k: {SECRET}}}, weight: x}}]"]),
    ({}, [f"rewards.sources=[{{type: http, url: 'me:{SECRET}@host'}}]"]),
    ({}, [f"rewards.sources[0].headers.key:{SECRET}"]),
]


@pytest.mark.parametrize(("edits", "overrides"), WITH_SECRETS)
def test_no_refusal_repeats_a_secret(folder: Path, edits: dict[str, Any], overrides: list[str]) -> None:
    sets = [word for override in overrides for word in ("--set", override)]
    assert SECRET not in command(["validate", str(laptop(folder, edits)), *sets], 2).output


def test_every_problem_is_said_at_once(folder: Path) -> None:
    edits = {
        "/metadata.name": "My Run", "training.steps": 0, "algorithm.clipHigh": 0, "dataset.path": "./gone.jsonl",
        "model.pth": "x", "model.drafter": None, "generation.speculation": {"mode": "model"},
    }  # fmt: skip
    output = CliRunner().invoke(app, ["validate", str(laptop(folder, edits))]).output
    for field in ("metadata.name", "training.steps", "clipHigh", "dataset.path", "model.pth", "speculation.mode"):
        assert f"{field}: " in output, output
    assert "6 problems" in output


def test_rules_that_depend_on_a_wrong_field_are_skipped(folder: Path) -> None:
    file = laptop(folder, {"algorithm.name": "reinforce+", "algorithm.samplesPerPrompt": 1})
    output = CliRunner().invoke(app, ["validate", str(file)]).output
    assert "algorithm.name" in output
    assert "samplesPerPrompt" not in output, "reinforce++ was meant, and needs no group"


FULL = RLHFJob.model_validate(LAPTOP_JOB).model_dump(mode="json", by_alias=True)
PLACES = ["apiVersion", "kind", "metadata", "spec", *(path for path, _ in leaves(FULL))]
ODD = st.sampled_from([None, True, -1, 0, 3, 1e300, float("nan"), "", "x", "a:b", "../x\0", [], [None], {}, {"a": {}}])


@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=3))
def test_any_values_give_a_job_or_a_problem(folder: Path, changes: list[tuple[str, Any]]) -> None:
    job = copy.deepcopy(FULL)
    for path, value in changes:
        *keys, last = path.split(".")
        holder: Any = job
        for key in keys:
            first = holder[0] if isinstance(holder, list) and holder else None
            holder = holder.get(key) if isinstance(holder, dict) else first
        if isinstance(holder, dict):
            holder[last] = value
    file = folder / "odd.yaml"
    file.write_text(yaml.safe_dump(job))
    with suppress(JobError):
        read_job(file)


CLUSTER = {
    "roles.generator": {
        "workers": 2,
        "replicas": {"min": 1, "max": 4},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
        "image": "registry.example/rlhfspec:cuda",
        "podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"nodeSelector": {"gpu": "h200"}}},
    },
    "failurePolicy.rules": [
        {"roles": ["reward"], "exitCodes": [75], "action": "Ignore"},
        {"exitCodes": [75, 3], "action": "FailJob"},
    ],
    "activeDeadlineSeconds": 3600,
    "podTemplate": {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}},
    "scheduling": {"gang": "kueue", "queue": "team-a", "topologyKey": "kubernetes.io/hostname"},
    "storage": {"claim": "data", "runFolder": "runs/mine"},
    "restart": {"id": "2", "roles": ["reward", "control"]},
}


def fields_refused(manifest: dict[str, Any]) -> list[str]:
    try:
        job = RLHFJob.model_validate(manifest)
    except ValidationError as error:
        return [dotted(path) for path in explain(error, manifest, {})[1]]
    return [finding.field for finding in check(job)]


WRONG = all_wrong()


def test_there_are_more_than_400_wrong_manifests() -> None:
    assert len(WRONG) > 400
    assert not fields_refused(JOB)
    assert not fields_refused(edited(CLUSTER))


@pytest.mark.parametrize("wrong", [each for each in WRONG if each.by != "server"], ids=str)
def test_each_wrong_manifest_is_refused_by_its_field(wrong: Wrong) -> None:
    refused = fields_refused(wrong.manifest)
    assert any(field.startswith(wrong.field) for field in refused), refused


def test_the_api_server_alone_refuses_only_overlong_values() -> None:
    """Local jobs need no bounds on length; nothing else may pass only there."""
    for wrong in WRONG:
        if wrong.by == "server":
            assert len(next(iter(reversed(wrong.edits.values())))) > 64


def test_fields_ignored_outside_a_cluster_are_named(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    manifest = edited(CLUSTER | {"model.path": "tiny:sums", "dataset.path": "train.jsonl"})
    manifest["spec"]["rewards"]["sources"] = [{"type": "function", "function": "rlhfspec.tiny.sums:correct"}]
    file.write_text(json.dumps(manifest))
    line = left_aside(read_job(file))
    assert line == (
        "ignored outside a cluster: activeDeadlineSeconds, scheduling, podTemplate, storage, restart, "
        "failurePolicy.rules, "
        "roles.generator.resources, roles.generator.image, roles.generator.podTemplate, roles.generator.replicas"
    )
    served = read_job(file, ["roles.gateway.workers=1"])
    assert str(left_aside(served)).endswith("roles.gateway.workers; --serve PORT is the gateway here")
    said = CliRunner().invoke(app, ["validate", str(file), "--set", "dataset.path=tiny:sums.jsonl"])
    assert f"remark: {line}" in said.output
    # What the run needs is missing, and only then refused: the line comes first.
    said = command(["run", str(file), "--resume", "--out", str(tmp_path / "none")], 2)
    assert line in said.output.replace("\n", "")


def test_every_role_of_the_schema_has_a_pod() -> None:
    assert set(get_args(Role)) == set(names.ROLES)


SCHEMA: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def test_the_definition_bounds_everything() -> None:
    """Otherwise the API server counts the cost of a rule as endless."""

    def walk(node: dict[str, Any], path: str) -> None:
        kind = node.get("type")
        if kind == "string":
            assert {"maxLength", "enum", "format"} & set(node), path
        if kind == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        for name, child in node.get("properties", {}).items():
            walk(child, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                walk(node[key], f"{path}[]")

    walk(SCHEMA, "")


def test_every_rule_names_a_field_that_exists() -> None:
    def exists(node: dict[str, Any], path: str) -> bool:
        for name in path.split(".")[1:]:
            node = node["properties"].get(name, {})
        return bool(node)

    assert all(exists(SCHEMA, rule["fieldPath"]) for rule in SCHEMA["x-kubernetes-validations"])
    assert all(exists(SCHEMA, f".spec.{path}") for path in MUTABLE)


def test_schema_crd_prints_the_custom_resource_definition() -> None:
    assert json.loads(CliRunner().invoke(app, ["schema", "--crd"]).output) == custom_resource_definition()

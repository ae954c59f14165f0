"""Reading a job: YAML traps, overrides, paths, algorithm defaults, and both schemas."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from small_job import a_job

from rlhfspec.errors import InvalidRequest, JobError
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job, resolve
from rlhfspec.job.file.files import check_files
from rlhfspec.job.file.memory import check_memory, free_bytes
from rlhfspec.job.file.paths import input_paths, with_resolved_paths
from rlhfspec.job.file.remarks import remarks
from rlhfspec.job.file.schema import json_schema, structural_schema
from rlhfspec.job.file.yaml_text import parse
from rlhfspec.prepare.hub import with_hub_models

JOB = """apiVersion: rlhfspec.io/v1alpha1
kind: RLHFJob
metadata: {name: sums}
spec:
  model: {path: ./model}
  dataset: {path: train.jsonl}
  algorithm: {name: grpo}
  rewards:
    sources:
      - {type: function, function: "rewards:exact"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "rewards.py").write_text("def exact(completion): return 0.0\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_scalars_mean_what_they_look_like() -> None:
    text = "[1e-6, 1E3, off, yes, 2024-01-01, 1:30, 010, 1_000, true, ~, .inf, -3, '3']"
    expected = [1e-6, 1e3, "off", "yes", "2024-01-01", "1:30", "010", "1_000", True, None, float("inf"), -3, "3"]
    value = parse(text, source="job.yaml").value
    assert value == expected
    assert [type(item) for item in value] == [type(item) for item in expected]


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@given(st.dictionaries(st.from_regex(r"\A[a-z]{1,8}\Z"), values, min_size=1, max_size=4))
def test_json_reads_as_itself(value: dict[str, Any]) -> None:
    document = parse(json.dumps(value, ensure_ascii=False), source="job.json")
    if document.problems:  # a key that YAML would merge, or one that is empty
        assert any(problem.field.endswith("<<") for problem in document.problems)
    else:
        assert document.value == value


@given(st.text(max_size=60))
def test_any_text_is_a_document_or_a_problem(text: str) -> None:
    with suppress(JobError):
        parse(text, source="job.yaml")


def test_json_with_tabs(file: Path) -> None:
    as_json = file.with_suffix(".json")
    as_json.write_text(json.dumps(yaml.safe_load(JOB), indent="\t"))
    assert read_job(as_json) == read_job(file)


def test_paths_start_at_the_job_file(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    spec = read_job(Path("../job.yaml")).spec
    assert spec.model.path == str(file.parent / "model")
    assert spec.dataset.path == str(file.parent / "train.jsonl")


def test_a_job_as_resolved_reads_back(file: Path) -> None:
    for algorithm in ("ppo", *ALGORITHMS):
        job = read_job(file, [f"algorithm.name={algorithm}"])
        resolved = file.with_name("resolved.yaml")
        resolved.write_text(yaml.safe_dump(job.model_dump(mode="json", by_alias=True), sort_keys=False))
        assert read_job(resolved) == job


@pytest.mark.parametrize(
    ("written", "hub"),
    [
        ("gpt2", True), ("owner/name", True), ("tiny:sums", True), ("model", False), ("model/sub", False),
        ("./owner", False), ("a/b/c", False), ("x.jsonl", False), ("~/m", False), ("/m", False), ("m/", False),
    ],
)  # fmt: skip
def test_hub_ids_and_paths(file: Path, written: str, hub: bool) -> None:
    resolved = resolve(written, file.parent)
    assert (resolved == written and not Path(written).is_absolute()) is hub
    assert resolve(resolved, Path("/other")) == resolved or hub


def test_overrides(file: Path) -> None:
    given = [
        "training.steps=3", "spec.training.seed=7", "training.optimizer.learningRate=1e-4", "model.lora.rank=4",
        "rewards.sources.0.weight=3", "rewards.sources[0].weight=2", 'generation.stop=["\\n"]',
        "generation.speculation.mode=off", "training.steps=5",
    ]  # fmt: skip
    spec = read_job(file, given).spec
    assert (spec.training.steps, spec.training.seed, spec.training.optimizer.learning_rate) == (5, 7, 1e-4)
    assert spec.model.lora is not None
    assert spec.model.lora.rank == 4
    assert (spec.rewards.sources[0].weight, spec.generation.stop) == (2.0, ["\n"])
    assert spec.generation.speculation.mode == "off"


def test_an_override_mends_what_the_file_has_wrong(file: Path) -> None:
    file.write_text(JOB.replace("{name: grpo}", "{name: grpo, samplesPerPrompt: 1}"))
    with pytest.raises(JobError, match=r"line 7: spec\.algorithm\.samplesPerPrompt"):
        read_job(file)
    assert read_job(file, ["algorithm.samplesPerPrompt=2"]).spec.algorithm.samples_per_prompt == 2


def test_problems_know_their_lines(file: Path) -> None:
    file.write_text(JOB + "  trainig:\n    steps: 1\n")
    with pytest.raises(JobError) as caught:
        read_job(file)
    assert [(p.where, p.field) for p in caught.value.problems] == [("line 11", "spec.trainig")]
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.field == "spec.trainig"


def test_aliases_are_read(file: Path) -> None:
    file.write_text(JOB + "  training: {optimizer: &o {learningRate: 1e-5}, criticOptimizer: *o}\n")
    assert read_job(file).spec.training.optimizer.learning_rate == 1e-5


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_an_algorithm_fills_in_its_defaults_and_keeps_what_is_given(file: Path, algorithm: str) -> None:
    block = read_job(file, [f"algorithm.name={algorithm}"]).spec.algorithm
    for name, value in ALGORITHMS[algorithm].defaults.items():
        assert getattr(block, name) == value
    given = read_job(file, [f"algorithm.name={algorithm}", "algorithm.clipHigh=0.5"]).spec.algorithm
    assert given.clip_high == 0.5


def test_messages_take_the_place_of_the_prompt_column(file: Path) -> None:
    dataset = read_job(file, ["dataset.messagesColumn=chat"]).spec.dataset
    assert (dataset.prompt_column, dataset.messages_column) == (None, "chat")


def test_what_no_machine_of_this_size_can_hold(file: Path) -> None:
    with (file.parent / "model" / "model.safetensors").open("wb") as weights:
        weights.truncate(1 << 30)
    free = 8 << 30

    def wrong(*overrides: str) -> list[str]:
        return [
            finding.field
            for finding in check_memory(read_job(file, overrides, runs_here=False), Path(), available_bytes=free)
        ]

    assert wrong("roles.generator.workers=7") == []
    assert wrong("roles.generator.workers=9") == ["spec.roles.generator.workers"]
    assert wrong("roles.generator.workers=9", "generation.dtype=bfloat16") == []
    assert wrong("training.promptsPerStep=900000") == []
    assert wrong("training.promptsPerStep=900000", "training.maxStaleness=1") == ["spec.training.promptsPerStep"]
    assert 0 < free_bytes() < 1 << 62


def test_remarks(file: Path) -> None:
    given = ["training.maxStaleness=1", "algorithm.klEstimator=k1", "training.schedule.warmupSteps=500"]
    said = list(remarks(read_job(file, given)))
    assert [text.partition(":")[0] for text in said] == [
        "training.maxStaleness", "algorithm.klEstimator", "training.schedule.warmupSteps",
    ]  # fmt: skip
    assert not list(remarks(read_job(file)))


def walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    children = [*schema.get("properties", {}).items()]
    children += [(key, schema[key]) for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return [(path, schema)] + [found for name, child in children for found in walk(child, f"{path}.{name}")]


def test_the_structural_schema_obeys_the_api_servers_rules() -> None:
    allowed = {
        "type", "properties", "items", "additionalProperties", "required", "enum", "minimum", "maximum", "nullable",
        "exclusiveMinimum", "exclusiveMaximum", "minLength", "minItems", "pattern", "description", "default",
        "maxLength", "maxItems", "maxProperties", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-validations",
    }  # fmt: skip
    for path, schema in walk(structural_schema()):
        assert set(schema) <= allowed, path
        untyped = {"x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"}
        assert "type" in schema or untyped & set(schema), path
        assert not ("properties" in schema and "additionalProperties" in schema), path
        assert isinstance(schema.get("exclusiveMinimum", True), bool), path
        assert set(schema.get("required", [])) <= set(schema.get("properties", {})), path


def test_the_structural_schema_has_every_field() -> None:
    def fields(schema: dict[str, Any]) -> set[str]:
        return {
            path
            for path, _ in walk(schema)
            if path.startswith(".spec") and not {".sources", ".additionalProperties"} & set(re.findall(r"\.\w+", path))
        }

    wanted = fields(json_schema())
    have = fields(structural_schema())
    assert {path for path in wanted if ".lora" not in path and ".wandb" not in path} <= have
    assert {".spec.model.lora.rank", ".spec.observability.wandb.project"} <= have


def test_no_schema_default_hides_an_algorithms_own() -> None:
    """An API server writes defaults into a job, so gspo would get grpo's clip range."""
    for schema in (json_schema(), structural_schema()):
        fields = schema["properties"]["spec"]["properties"]["algorithm"]["properties"]
        assert "default" not in fields["clipHigh"]
        assert "gspo 0.0004" in fields["clipHigh"]["description"]
        assert fields["gamma"]["default"] == 1.0


def test_every_field_says_what_it_is() -> None:
    for path, schema in walk(json_schema()["properties"]["spec"]):
        if path.count(".") > 1:
            assert schema.get("description") or path.endswith((".items", ".additionalProperties")), path


def test_the_job_is_frozen(file: Path) -> None:
    job: RLHFJob = read_job(file)
    with pytest.raises(ValueError, match="frozen"):
        job.spec.training.steps = 3  # type: ignore[misc]


def test_a_drafter_called_auto_is_looked_for_nowhere(tmp_path: Path) -> None:
    """The drafter is made of the policy, so neither folder nor hub is searched."""
    (tmp_path / "auto").mkdir()  # a folder of that name is another thing: it is written ./auto
    job = a_job()
    model = job.spec.model.model_copy(update={"path": str(tmp_path / "auto"), "drafter": "auto"})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
    for prepared in (with_resolved_paths(job, tmp_path), with_hub_models(job, print)):
        assert prepared.spec.model.drafter == "auto"
    assert not [each for each in check_files(job, tmp_path) if each.field == "spec.model.drafter"]
    named = {"model": {"path": "./policy", "drafter": "auto"}}
    assert input_paths(named, tmp_path) == ["policy"]

"""Reading a job: YAML traps, overrides, paths, defaults, both schemas, marks, and the table of rules."""

import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from invalid_jobs import all_wrong
from pydantic import ValidationError
from small_job import a_job

from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.errors import InvalidRequest, JobError
from rlhfspec.job import Model, RLHFJob, Spec
from rlhfspec.job.block import Block, Mark, marked
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job, resolve
from rlhfspec.job.file.files import check_files
from rlhfspec.job.file.memory import check_memory, free_bytes
from rlhfspec.job.file.paths import input_paths, with_resolved_paths
from rlhfspec.job.file.remarks import CLUSTER_ONLY, remarks
from rlhfspec.job.file.rules.condition import fields_of, info_of, to_cel, value_of
from rlhfspec.job.file.rules.sources import SOURCES_RULES
from rlhfspec.job.file.rules.table import RULES, JobRule
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


def test_yaml_scalars_get_the_types_they_look_like() -> None:
    text = "[1e-6, 1E3, off, yes, 2024-01-01, 1:30, 010, 1_000, true, ~, .inf, -3, '3']"
    expected = [1e-6, 1e3, "off", "yes", "2024-01-01", "1:30", "010", "1_000", True, None, float("inf"), -3, "3"]
    value = parse(text, source="job.yaml").value
    assert value == expected
    assert [type(item) for item in value] == [type(item) for item in expected]


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | finite | words
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@given(st.dictionaries(st.from_regex(r"\A[a-z]{1,8}\Z"), values, min_size=1, max_size=4))
def test_json_parses_to_the_same_value(value: dict[str, Any]) -> None:
    document = parse(json.dumps(value, ensure_ascii=False), source="job.json")
    if document.problems:  # a key that YAML would merge, or one that is empty
        assert any(problem.field.endswith("<<") for problem in document.problems)
    else:
        assert document.value == value


@given(st.text(max_size=60))
def test_arbitrary_text_parses_or_raises_a_job_error(text: str) -> None:
    with suppress(JobError):
        parse(text, source="job.yaml")


def test_json_indented_with_tabs_is_accepted(file: Path) -> None:
    as_json = file.with_suffix(".json")
    as_json.write_text(json.dumps(yaml.safe_load(JOB), indent="\t"))
    assert read_job(as_json) == read_job(file)


def test_paths_start_at_the_job_file(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    spec = read_job(Path("../job.yaml")).spec
    assert spec.model.path == str(file.parent / "model")
    assert spec.dataset.path == str(file.parent / "train.jsonl")


def test_a_resolved_job_reads_back_unchanged(file: Path) -> None:
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
def test_a_hub_id_is_kept_and_a_path_is_made_absolute(file: Path, written: str, hub: bool) -> None:
    resolved = resolve(written, file.parent)
    assert (resolved == written and not Path(written).is_absolute()) is hub
    assert resolve(resolved, Path("/other")) == resolved or hub


def test_overrides_set_fields_of_the_spec(file: Path) -> None:
    given = [
        "training.steps=3", "spec.training.seed=7", "training.optimizer.learningRate=1e-4", "model.lora.rank=4",
        "rewards.sources.0.weight=3", "rewards.sources[0].weight=2", 'generation.stop=["\\n"]',
        "generation.speculation.mode=off", "training.steps=5",
    ]  # fmt: skip
    spec = read_job(file, given).spec
    assert (spec.training.steps, spec.training.seed, spec.training.optimizer.learning_rate) == (5, 7, 1e-4)
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
    assert read_job(file, [f"algorithm.name={algorithm}", "algorithm.clipHigh=0.5"]).spec.algorithm.clip_high == 0.5


def test_a_messages_column_replaces_the_prompt_column(file: Path) -> None:
    dataset = read_job(file, ["dataset.messagesColumn=chat"]).spec.dataset
    assert (dataset.prompt_column, dataset.messages_column) == (None, "chat")


def test_a_job_that_does_not_fit_in_memory_names_the_field(file: Path) -> None:
    with (file.parent / "model" / "model.safetensors").open("wb") as weights:
        weights.truncate(1 << 30)
    free = 8 << 30

    def wrong(*overrides: str) -> list[str]:
        return [f.field for f in check_memory(read_job(file, overrides, runs_here=False), Path(), available_bytes=free)]

    assert wrong("roles.generator.workers=7") == []
    assert wrong("roles.generator.workers=9") == ["spec.roles.generator.workers"]
    assert wrong("roles.generator.workers=9", "generation.dtype=bfloat16") == []
    assert wrong("training.promptsPerStep=900000") == []
    assert wrong("training.promptsPerStep=900000", "training.maxStaleness=1") == ["spec.training.promptsPerStep"]
    assert 0 < free_bytes() < 1 << 62


def test_remarks_name_the_doubtful_fields(file: Path) -> None:
    given = ["training.maxStaleness=1", "algorithm.klEstimator=k1", "training.schedule.warmupSteps=500"]
    said = list(remarks(read_job(file, given)))
    assert [text.partition(":")[0] for text in said] == [each.partition("=")[0] for each in given]
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


def test_a_policy_drafts_for_itself_unless_told_otherwise() -> None:
    drafters = [Model.model_validate({"path": "m", **given}).drafter
                for given in ({}, {"drafter": None}, {"drafter": "none"}, {"drafter": "./none"})]  # fmt: skip
    assert drafters == ["auto", None, None, "./none"]


@pytest.mark.parametrize("drafter", ["auto", "self", "mtp"])
def test_a_drafter_made_of_the_policy_is_not_searched_in_folders_or_hub(tmp_path: Path, drafter: str) -> None:
    """The drafter is made of the policy, so neither folder nor hub is searched."""
    (tmp_path / drafter).mkdir()  # a folder of that name is another thing: it is written ./auto
    job = a_job()
    model = job.spec.model.model_copy(update={"path": str(tmp_path / drafter), "drafter": drafter})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
    for prepared in (with_resolved_paths(job, tmp_path), with_hub_models(job, print)):
        assert prepared.spec.model.drafter == drafter
    assert not [each for each in check_files(job, tmp_path) if each.field == "spec.model.drafter"]
    assert input_paths({"model": {"path": "./policy", "drafter": drafter}}, tmp_path) == ["policy"]


ROLES = (
    "prompts", "generator", "reward", "reference", "critic", "trainer", "rebalancer", "gateway", "prepare", "control"
)  # fmt: skip
OF_PODS = {f"roles.{role}.{name}" for role in ROLES for name in ("resources", "image", "podTemplate")}
OF_PODS |= {f"roles.gateway.{name}" for name in ("workers", "tokenSecret")}
ENDS = {"suspend", "restart", "deletionPolicy", "activeDeadlineSeconds", "preRunningDeadlineSeconds",
        "ttlSecondsAfterFinished"}  # fmt: skip


def test_only_listed_fields_may_change_while_a_job_runs() -> None:
    assert set(marked(Spec, Mark.MUTABLE)) == {*ENDS, "roles.generator.workers", "roles.generator.replicas"}


def test_only_listed_fields_may_change_while_a_job_is_suspended() -> None:
    assert set(marked(Spec, Mark.MUTABLE_WHILE_SUSPENDED)) == {"podTemplate", *OF_PODS}


def test_cluster_only_fields_are_exactly_the_listed_ones() -> None:
    others = {"scheduling", "podTemplate", "storage", "failurePolicy.rules", "managedBy", "roles.generator.replicas"}
    assert set(CLUSTER_ONLY) == {*ENDS, *others, *OF_PODS}
    first_of_a_role = next(place for place, path in enumerate(CLUSTER_ONLY) if path.startswith("roles."))
    assert all(path.startswith("roles.") for path in CLUSTER_ONLY[first_of_a_role:])


def test_only_listed_fields_may_differ_when_a_run_resumes() -> None:
    of_spec = {
        "model.drafter", "dataset.epochs", "generation.speculation", "generation.maxSequences",
        "generation.kvCacheTokens", "generation.gpuMemoryFraction", "shareGpus",
        "training.stopOnCollapse", "roles",
        "failurePolicy", "rebalance", "serving", "checkpoint",
        "observability", "scheduling", "storage", "managedBy",
    }  # fmt: skip
    of_sources = {"name", "concurrency", "timeoutSeconds", "retries", "headers"}
    assert set(marked(RLHFJob, Mark.RESUMABLE)) == {
        *(f"metadata.{name}" for name in ("labels", "annotations", "namespace")),
        *(f"spec.{path}" for path in of_spec),
        *(f"spec.rewards.sources.{name}" for name in of_sources),
    }


class Inner(Block):
    free: Annotated[int, Mark.MUTABLE] = 0
    fixed: int = 0


class Outer(Block):
    one: Inner = Inner()
    several: list[Inner] | None = None
    whole: Annotated[Inner, Mark.MUTABLE] = Inner()


@pytest.mark.parametrize("mark", Mark)
def test_a_mark_is_found_in_any_nested_block(mark: Mark) -> None:
    expected = ["one.free", "several.free", "whole"] if mark == Mark.MUTABLE else []
    assert list(marked(Outer, mark)) == expected


FIELDS = ("training.steps", "training.seed", "training.epochs")
numbers = st.recursive(
    st.sampled_from(FIELDS) | st.integers(0, 3).map(str),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+*"), inner),
    max_leaves=3,
)
signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
conditions = st.recursive(
    st.builds("({} {} {})".format, numbers, signs, numbers)
    | st.builds("({} <= {} < {})".format, numbers, numbers, numbers)
    | st.builds("({} {} {})".format, numbers, st.sampled_from(["in", "not in"]), st.lists(st.integers(0, 3)).map(str)),
    lambda x: st.builds("({} {} {})".format, x, st.sampled_from(["and", "or"]), x) | st.builds("(not {})".format, x),
    max_leaves=6,
)


def as_python(cel: str) -> str:
    """Translate CEL to Python. CEL's `!` binds tighter than `not`, so parentheses are required behind it."""
    assert all(found in "(s!" for found in re.findall(r"!(?!=)(.)", cel))
    named = re.sub(r"self\.spec\.\?training\.\?(\w+)\.orValue\(\d+\)", r"\1", cel)
    return re.sub(r"!(?!=)", " not ", named).replace("&&", "and").replace("||", "or")


@settings(max_examples=300)
@given(conditions, st.fixed_dictionaries({name.partition(".")[2]: st.integers(0, 3) for name in FIELDS}))
def test_a_rule_in_cel_gives_the_result_of_python(condition: str, values: dict[str, int]) -> None:
    spec: Any = SimpleNamespace(training=SimpleNamespace(**values))
    assert bool(eval(as_python(to_cel(condition)), {}, values)) == bool(value_of(condition, spec))
    assert set(fields_of(condition)) == {name for name in FIELDS if name in condition}


@pytest.mark.parametrize(
    ("condition", "cel"),
    [
        ("generation.maxTokens > 1", "self.spec.?generation.?maxTokens.orValue(256) > 1"),
        ("model.lora is None or model.lora.dropout == 0.0",
         "!self.spec.?model.?lora.hasValue() || self.spec.model.lora.dropout == 0.0"),
        ("size(restart.roles) == 0", "self.spec.?restart.?roles.orValue([]).size() == 0"),
        ("matches(restart.id, 'a.')", 'self.spec.?restart.?id.orValue("").matches("a.")'),
        ("starts_with(restart.id, '/')", 'self.spec.?restart.?id.orValue("").startsWith("/")'),
        ("has_part(restart.id, '/', '..')",
         'self.spec.?restart.?id.orValue("").split("/").exists(part, part == "..")'),
    ],
)  # fmt: skip
def test_cel_reads_a_field_with_its_default_unless_compared_with_none(condition: str, cel: str) -> None:
    assert to_cel(condition) == cel


def violates(manifest: dict[str, Any]) -> list[str]:
    """Return the fields whose rules a job breaks, or all for one that is invalid earlier."""
    try:
        job = RLHFJob.model_validate(manifest)
    except ValidationError:
        return [rule.field for rule in RULES]
    return [rule.field for rule in RULES if not rule.is_kept(job.spec)]


BROKEN = {field for wrong in all_wrong() if len(found := violates(wrong.manifest)) < len(RULES) for field in found}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_every_rule_is_broken_by_some_job(rule: JobRule) -> None:
    assert rule.field in BROKEN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_a_rule_is_of_fields_and_its_message_shows_no_value(rule: JobRule) -> None:
    assert all(info_of(path) is not None for path in (rule.field, *fields_of(rule.holds)))
    assert "{" not in rule.message
    assert rule.message


def test_the_definition_has_every_rule() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    said = [(each["rule"], each["message"]) for each in schema["x-kubernetes-validations"]]
    ours = [(to_cel(rule.holds), rule.message) for rule in RULES]
    ours += [(rule.cel, rule.message) for rule in SOURCES_RULES]
    assert said[: len(ours)] == ours

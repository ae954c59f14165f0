"""Choices of a job by name come from one table each."""

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from pydantic import ValidationError
from small_job import a_job

from rlhfspec import job as job_module
from rlhfspec.engine.base import MovableByTokens
from rlhfspec.job import Algorithm, Roles, generation as job_generation, roles as job_roles
from rlhfspec.job.choices import CHOICES
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.choices.drafters import DRAFTERS, SPECULATION_MODES, may_run_draft_model
from rlhfspec.job.choices.engines import ENGINES, EngineEntry
from rlhfspec.job.choices.links import LINKS, LINKS_OF_A_JOB
from rlhfspec.job.choices.registry import Entry, Registry
from rlhfspec.job.choices.weight_stores import BETWEEN_PROCESSES, WEIGHT_STORES
from rlhfspec.job.file.schema import json_schema
from rlhfspec.messages.access.connections import Connections, WeightStoreName
from rlhfspec.messages.loop import scoring_stages

ENTRIES = [entry for registry in (*CHOICES, WEIGHT_STORES) for entry in registry.values()]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_loads_and_has_a_description(entry: Entry) -> None:
    assert callable(entry.load())
    assert entry.about
    assert "\n" not in entry.about


def test_two_entries_never_share_a_name() -> None:
    one = Entry(name="one", about="", make="builtins:int")
    with pytest.raises(AssertionError, match="two entries"):
        Registry("field", one, one)


def test_the_job_allows_what_the_tables_hold() -> None:
    assert get_args(job_module.AlgorithmName) == ALGORITHMS.names
    assert get_args(job_generation.SpeculationMode) == SPECULATION_MODES == ("off", "suffix", "model", "adaptive")
    assert get_args(job_generation.EngineName) == ENGINES.names == ("own", "vllm")
    assert get_args(job_roles.LinkName) == LINKS_OF_A_JOB == ("auto", "shm", "tcp", "nixl", "torch")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_critic_scores_exactly_where_the_table_says_so(name: str) -> None:
    assert ("critic" in scoring_stages(Algorithm(name=name))) == ALGORITHMS[name].has_critic


def test_the_tables_import_neither_torch_nor_numpy() -> None:
    modules = sorted({type(entry).__module__ for entry in ENTRIES})
    asked = f"import sys; import {', '.join(modules)}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_only_the_modes_model_and_adaptive_may_run_the_draft_model() -> None:
    assert [mode for mode in SPECULATION_MODES if may_run_draft_model(mode)] == ["model", "adaptive"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_has_the_name_of_its_table_entry(name: str) -> None:
    assert DRAFTERS[name].load().name == name


@pytest.mark.parametrize("name", LINKS)
def test_every_link_loads_its_connect_function(name: str) -> None:
    assert callable(LINKS[name].load_connect())


def test_fields_named_by_choices_exist_in_the_job() -> None:
    paths = {r.field for r in CHOICES} | {need for r in CHOICES for entry in r.values() for need in entry.needs}
    assert {path for path in paths if exists_in_spec(path)} == paths


def exists_in_spec(path: str) -> bool:
    block = json_schema()["properties"]["spec"]
    for name in path.split("."):
        block = block["properties"].get(name, {})
    return block != {}


def test_a_missing_requirement_is_reported_with_the_choices_without_one() -> None:
    assert DRAFTERS.missing("model.drafter") == "needs model.drafter; without one use suffix or adaptive"


def test_connections_name_a_weight_store_and_the_fields_it_needs() -> None:
    assert get_args(WeightStoreName) == BETWEEN_PROCESSES == ("file", "grpc")
    given = {"uid": "1", "job_file": "j", "base_folder": "b", "folder": "f", "nats_url": "nats://127.0.0.1:1"}
    assert {need for entry in WEIGHT_STORES.values() for need in entry.needs} <= set(Connections.model_fields)
    assert Connections.model_validate({**given, "weights": "grpc"}).weights == "grpc"
    with pytest.raises(ValidationError, match="weights_folder must be set where weights is file"):
        Connections.model_validate(given)


def test_samples_move_only_between_engines_that_support_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_job().spec
    several = spec.model_copy(update={"roles": Roles.model_validate({"generator": {"workers": 2}})})
    assert (spec.moves_samples, several.moves_samples) == (False, True)
    parts = {"generator": {"workers": 2, "tensorParallel": 2}}
    assert spec.model_copy(update={"roles": Roles.model_validate(parts)}).moves_samples
    fixed = EngineEntry(name="own", about="", make="")
    monkeypatch.setattr(job_module, "ENGINES", Registry("generation.engine.name", fixed))
    assert not several.moves_samples


def test_the_engine_table_agrees_with_the_engines_on_moves() -> None:
    for entry in ENGINES.values():
        assert entry.is_movable == issubclass_of_movable(get_type_hints(entry.load())["return"])


def issubclass_of_movable(kind: type) -> bool:
    wanted = {name for name in dir(MovableByTokens) if not name.startswith("_")}
    assert {"submit", "step", "manifest", "import_sequence"} <= wanted
    return wanted <= set(dir(kind))

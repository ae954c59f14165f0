"""A run resumes with its own job, even one written before newer fields existed."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec.job import RLHFJob, Spec
from rlhfspec.job.block import Mark, marked
from rlhfspec.runs.folder.run_folder import RunFolder, example_job
from rlhfspec.runs.folder.same_job import as_content, first_difference, with_new_fields


def test_a_run_from_before_the_engine_was_named_goes_on(tmp_path: Path) -> None:
    job = example_job()
    with RunFolder(tmp_path) as folder:
        folder.begin(job, resume=False)
    content = as_content(job)
    del content["spec"]["generation"]["engine"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(content))
    with RunFolder(tmp_path) as folder:
        folder.check(job, resume=True)  # raises, where it is of another


@given(st.data())
def test_a_field_that_was_not_there_had_its_default(data: st.DataObject) -> None:
    """This holds for every block whose fields all have defaults."""
    content = as_content(example_job())
    before = copy.deepcopy(content)
    block = before["spec"][data.draw(st.sampled_from(["generation", "training", "checkpoint", "observability"]))]
    del block[data.draw(st.sampled_from(sorted(block)))]
    assert first_difference(with_new_fields(before), content) is None


CHANGED: dict[str, Any] = {
    "suspend": True, "activeDeadlineSeconds": 7200, "preRunningDeadlineSeconds": 60, "ttlSecondsAfterFinished": 9,
    "deletionPolicy": {"failed": "delete"}, "restart": {"id": "2"}, "workers": 3, "replicas": {"min": 1, "max": 8},
    "resources": {"limits": {"cpu": 2}}, "image": "other", "podTemplate": {"metadata": {"labels": {"team": "other"}}},
}  # fmt: skip


@pytest.mark.parametrize("path", [*marked(Spec, Mark.MUTABLE), *marked(Spec, Mark.MUTABLE_WHILE_SUSPENDED)])
def test_a_run_goes_on_whichever_mutable_field_changed(tmp_path: Path, path: str) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin(example_job(), resume=False)
    content = as_content(example_job())
    *blocks, field = path.split(".")
    block = functools.reduce(dict.__getitem__, blocks, content["spec"])
    assert block[field] != CHANGED[field]
    block[field] = CHANGED[field]
    with RunFolder(tmp_path) as folder:
        folder.begin(RLHFJob.model_validate(content), resume=True)
        assert folder.manifest().resumed, "it is the same run"


def test_what_this_release_cannot_read_is_compared_as_it_is() -> None:
    assert with_new_fields({"spec": {"gone": 1}}) == {"spec": {"gone": 1}}

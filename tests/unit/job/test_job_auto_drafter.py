"""`model.drafter: auto` names no model: nothing is looked for under that name, beside the job or at the hub."""

from __future__ import annotations

from pathlib import Path

from small_job import a_job

from rlhfspec.job.file.files import check_files
from rlhfspec.job.file.paths import input_paths, with_resolved_paths
from rlhfspec.prepare.hub import with_hub_models


def test_auto_is_looked_for_nowhere(tmp_path: Path) -> None:
    (tmp_path / "auto").mkdir()  # a folder of that name is another thing: it is written ./auto
    job = a_job()
    model = job.spec.model.model_copy(update={"path": str(tmp_path / "auto"), "drafter": "auto"})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
    for prepared in (with_resolved_paths(job, tmp_path), with_hub_models(job, print)):
        assert prepared.spec.model.drafter == "auto"
    assert not [each for each in check_files(job, tmp_path) if each.field == "spec.model.drafter"]
    named = {"model": {"path": "./policy", "drafter": "auto"}}
    assert input_paths(named, tmp_path) == ["policy"]

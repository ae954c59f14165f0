"""Marks of a field are declared at the field alone."""

from typing import Annotated

import pytest

from rlhfspec.job import RLHFJob, Spec
from rlhfspec.job.block import Block, Mark, marked
from rlhfspec.job.file.remarks import CLUSTER_ONLY

ROLES = ("prompts", "generator", "reward", "reference", "critic", "trainer", "rebalancer", "prepare", "control")
OF_PODS = {f"roles.{role}.{name}" for role in ROLES for name in ("resources", "image", "podTemplate")}
ENDS = {"suspend", "restart", "deletionPolicy", "activeDeadlineSeconds", "preRunningDeadlineSeconds",
        "ttlSecondsAfterFinished"}  # fmt: skip


def test_what_may_change_while_a_job_runs() -> None:
    assert set(marked(Spec, Mark.MUTABLE)) == {*ENDS, "roles.generator.workers", "roles.generator.replicas"}


def test_what_may_change_while_it_is_suspended() -> None:
    assert set(marked(Spec, Mark.MUTABLE_WHILE_SUSPENDED)) == {"podTemplate", *OF_PODS}


def test_what_means_something_to_a_cluster_alone() -> None:
    others = {"scheduling", "podTemplate", "storage", "failurePolicy.rules", "managedBy", "roles.generator.replicas"}
    assert set(CLUSTER_ONLY) == {*ENDS, *others, *OF_PODS}
    first_of_a_role = next(place for place, path in enumerate(CLUSTER_ONLY) if path.startswith("roles."))
    assert all(path.startswith("roles.") for path in CLUSTER_ONLY[first_of_a_role:])


def test_what_may_differ_when_a_run_is_resumed() -> None:
    of_spec = {
        "model.drafter", "dataset.epochs", "generation.speculation", "generation.maxSequences",
        "generation.kvCacheTokens", "generation.gpuMemoryFraction", "shareGpus", "training.steps", "roles",
        "failurePolicy", "rebalance", "checkpoint",
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
def test_a_mark_is_found_wherever_its_block_is(mark: Mark) -> None:
    expected = ["one.free", "several.free", "whole"] if mark == Mark.MUTABLE else []
    assert list(marked(Outer, mark)) == expected

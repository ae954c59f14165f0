"""THE MAP is whole: everybody who waits can be unblocked, and everything produced has a reader or needs none."""

from __future__ import annotations

from typing import get_args

import pytest

from rlhfspec import loop
from rlhfspec.job import Roles
from rlhfspec.records import Load, Record, Sample, StepReport, Weights
from rlhfspec.transport.dead_letters import dead_letter_subject

PRODUCED = {record for stage in loop.STAGES for record in stage.produces}


def test_names_are_unique_and_are_what_a_consumer_name_can_be_made_of() -> None:
    names = [stage.name for stage in (*loop.STAGES, *loop.OBSERVERS)]
    assert len(set(names)) == len(names)
    assert all(name.isalpha() and name.islower() for name in names), "a dash divides stage and worker"


def test_every_record_is_produced_and_what_no_stage_reads_is_for_eyes() -> None:
    assert set(get_args(Record)) == PRODUCED
    assert {record for record in PRODUCED if not loop.consumers_of(record)} == {Load, StepReport}
    assert all(any(record in o.consumes for o in loop.OBSERVERS) for record in (Load, StepReport))


@pytest.mark.parametrize("stage", loop.STAGES, ids=lambda stage: stage.name)
def test_who_unblocks_a_stage_produces_what_it_consumes(stage: loop.Stage) -> None:
    producers = {other.name for other in loop.STAGES if set(other.produces) & set(stage.consumes)}
    assert set(stage.unblocked_by) == producers


@pytest.mark.parametrize("observer", loop.OBSERVERS, ids=lambda stage: stage.name)
def test_observers_only_look_on(observer: loop.Stage) -> None:
    assert observer.produces == ()
    assert all(observer.name not in stage.unblocked_by for stage in loop.STAGES)
    assert set(observer.unblocked_by) <= {s.name for s in loop.STAGES if set(s.produces) & set(observer.consumes)}


def test_every_stage_has_a_role_in_the_job() -> None:
    assert set(Roles.model_fields) == {stage.name for stage in loop.STAGES}


def test_subjects_are_one_a_record_and_beside_the_dead_letters() -> None:
    subjects = {loop.subject("sums", record) for record in get_args(Record)}
    assert len(subjects | {loop.dead_letters("sums")}) == len(get_args(Record)) + 1
    assert {dead_letter_subject(subject) for subject in subjects} == {loop.dead_letters("sums")}


def test_workers_compete_but_for_what_each_of_them_needs() -> None:
    assert loop.consumer_name(Sample, "critic", 0) == loop.consumer_name(Sample, "critic", 1) == "critic"
    assert loop.consumer_name(Weights, "critic", 0) != loop.consumer_name(Weights, "critic", 1)

"""THE MAP is complete: every wait can be unblocked, and every product has a reader or needs none."""

from typing import get_args

import pytest
from small_job import a_job

from rlhfspec.job.roles import Roles
from rlhfspec.messages import loop
from rlhfspec.messages.records import DraftWeights, Record
from rlhfspec.messages.transport.dead_letters import dead_letter_subject

PRODUCED = {record for stage in loop.STAGES for record in stage.produces}


def test_names_are_unique_and_are_what_a_consumer_name_can_be_made_of() -> None:
    names = [stage.name for stage in (*loop.STAGES, *loop.OBSERVERS)]
    assert len(set(names)) == len(names)
    assert all(name.isalpha() and name.islower() for name in names), "a dash divides stage and worker"


def test_every_record_has_a_producer_and_a_reader() -> None:
    assert set(get_args(Record)) == PRODUCED | set(loop.OF_A_PROCESS)
    signals = {record for record, kind in loop.KINDS.items() if kind == "signal"}
    unread = {record for record in get_args(Record) if not loop.consumers_of(record)}
    assert unread == signals | set(loop.SEEN_BY_ALL) | {DraftWeights}, "no stage needs signals, or a better drafter"
    seen = {record for stage in loop.STAGES for record in stage.watches}
    seen |= {record for observer in loop.OBSERVERS for record in observer.consumes}
    assert signals <= seen, "somebody reads it"


def test_every_record_has_a_kind() -> None:
    assert set(loop.KINDS) == set(get_args(Record))


@pytest.mark.parametrize("stage", loop.STAGES, ids=lambda stage: stage.name)
def test_unblocked_by_lists_the_producers_of_what_a_stage_consumes(stage: loop.Stage) -> None:
    producers = {other.name for other in loop.STAGES if set(other.produces) & set(stage.consumes)}
    assert set(stage.unblocked_by) == producers


@pytest.mark.parametrize("observer", loop.OBSERVERS, ids=lambda stage: stage.name)
def test_observers_produce_nothing_and_block_no_stage(observer: loop.Stage) -> None:
    assert observer.produces == ()
    assert all(observer.name not in stage.unblocked_by for stage in loop.STAGES)
    assert set(observer.unblocked_by) <= {s.name for s in loop.STAGES if set(s.produces) & set(observer.consumes)}


def test_every_stage_has_a_role_in_the_job() -> None:
    assert set(Roles.model_fields) == {stage.name for stage in loop.SUPERVISED} | {"prepare", "control"}


def test_subjects_are_one_a_record_and_beside_the_dead_letters() -> None:
    subjects = {loop.subject("sums", "3f2a", record) for record in get_args(Record)}
    assert len(subjects | {loop.dead_letters("sums", "3f2a")}) == len(get_args(Record)) + 1
    assert {dead_letter_subject(subject) for subject in subjects} == {loop.dead_letters("sums", "3f2a")}


def test_a_crash_of_the_trainer_uses_up_no_delivery() -> None:
    """Each crash counts as a delivery of everything that the trainer holds."""
    assert loop.work_consumer(loop.BY_NAME["trainer"]).max_deliveries is None


def test_the_stages_that_run_follow_from_the_algorithm() -> None:
    assert set(loop.workers_of(a_job())) == {"prompts", "generator", "reward", "trainer"}
    ppo = a_job(algorithm={"name": "ppo", "klCoefficient": 0.1}, roles={"generator": {"workers": 2}})
    assert set(loop.workers_of(ppo)) == {stage.name for stage in loop.STAGES}
    assert loop.workers_of(ppo)["generator"] == 2

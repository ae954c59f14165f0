"""The number of weight versions kept on a process's host."""

from small_job import a_job

from rlhfspec.stage.context import kept_versions


def test_only_the_trainer_keeps_more_versions_with_staleness() -> None:
    """Receivers take the newest version and are asked for at most the newest two."""
    jobs = [a_job(training={"maxStaleness": staleness}) for staleness in (0, 3)]
    assert [kept_versions(job) for job in jobs] == [2, 5]
    assert [kept_versions(jobs[1], stage) for stage in ("generator", "critic")] == [2, 2]

"""A job's processes as in pods: prepare, control and all stages, over a release's servers."""

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from control_place import Operator
from pods import Job, Pod
from runs import curve_of, train, with_spec
from scraping import samples_of
from shared_servers import SharedServers
from started import eventually, hold_rewards

from rlhfspec.cluster import names
from rlhfspec.worker import exits

STAGES = ("prompts", "generator", "reward", "trainer")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path / "token"


def show(control: Pod, *how: str) -> "subprocess.Popen[bytes]":
    connections = str(control.place / "connections.json")
    command = [sys.executable, "-m", "rlhfspec.control.show", "--connections", connections, *how]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def shown_once(control: Pod, holds: Callable[[set[str]], bool]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        shown: dict[str, Any] = json.loads(show(control, "--json").communicate(timeout=60)[0])
        return shown if holds({worker["name"] for worker in shown["workers"]}) else None

    return dict(eventually(look, "these workers are shown"))


def test_control_waits_for_run_and_survives_a_nats_that_lost_all(tmp_path: Path, job_file: Path, token: Path) -> None:
    with (
        SharedServers(tmp_path / "release") as servers,
        closing(Operator(servers)) as operator,
        Job(job_file, servers, token=token) as job,
    ):
        prepare = job.start("prepare", opened=False)
        assert prepare.ended()[0] == exits.DONE, prepare.log
        control = job.start("control", opened=False, report_url=operator.url)
        operator.until(lambda report: not report.troubles, "a control that waits")
        assert "the run is open" not in control.log
        job.open()
        until_said(control, "the run is open")
        servers.kill_nats()
        shutil.rmtree(servers.folder / "store")
        until_said(control, "the broker does not answer")
        control.process.send_signal(signal.SIGSTOP)  # else it may look before the run is opened again
        servers.start_nats()
        job.open()
        control.process.send_signal(signal.SIGCONT)
        until_said(control, "the broker answers again")
        assert control.stopped()[0] == exits.DONE


def until_said(pod: Pod, what: str) -> None:
    eventually(lambda: what in pod.log, f"it says: {what}")


@pytest.fixture
def job(job_file: Path, servers: SharedServers, token: Path) -> Iterator[Job]:
    with Job(job_file, servers, token=token) as job:
        yield job


def test_control_reports_a_run_from_beginning_to_end(job: Job, job_file: Path) -> None:
    """After the first step control is killed and the broker stopped, without effect."""
    hold = hold_rewards(job_file, "1 storage/run")
    changed = {"training": {"steps": 12}, "algorithm": {"klCoefficient": 0}}
    whole = train(with_spec(job_file, **changed, generation={"speculation": {"mode": "off"}}), "one")
    with closing(Operator(job.servers)) as operator:
        prepare = job.start("prepare")
        assert prepare.ended()[0] == exits.DONE, prepare.log
        control = job.start("control", report_url=operator.url)
        operator.until(lambda report: report.total_steps == 12, "a run that nobody works at yet")
        stages = {stage: job.start(stage) for stage in STAGES}
        first = operator.until(lambda report: report.step >= 1, "the first step")
        if job.servers.redis_url is not None:
            wanted = {f"{stage}-0" for stage in STAGES}
            assert shown_once(control, lambda names: names >= wanted)["steps"][0]["step"] == 1
        with show(control, "--view") as viewing:
            try:
                assert b"12 steps of" in viewing.stdout.readline()
                control.killed()
                control = job.start("control", report_url=operator.url)
                again = operator.until(lambda report: report.step >= first.step, "the run after control was killed")
                assert not again.troubles
                job.servers._nats.send_signal(signal.SIGSTOP)
                try:
                    away = operator.until(lambda report: report.troubles, "a broker that is away").troubles
                finally:
                    job.servers._nats.send_signal(signal.SIGCONT)
                assert [trouble.reason for trouble in away] == ["BrokerUnavailable"]
                check_what_control_counts(job, control)
                hold.unlink()
                assert any(b"step " in line for line in viewing.stdout), "it shows steps as they come"
                viewing.send_signal(signal.SIGTERM)
                assert viewing.wait(60) == exits.DONE
            finally:
                viewing.kill()
        last = operator.until(lambda report: report.checkpoint_step == 12, "the last checkpoint")
        assert stages["trainer"].ended()[0] == exits.DONE
        assert not last.troubles
        assert last.step == 12
        assert control.stopped() == (exits.DONE, "left: it was asked to")
    assert curve_of(job_file, "storage/run") == whole


def check_what_control_counts(job: Job, control: Pod) -> None:
    with urllib.request.urlopen(f"http://{control.host}:{names.HTTP_PORT}/metrics", timeout=60) as answer:
        told = samples_of(answer.read().decode(), {})
    servers = {dict(labels).get("server") for labels in told if dict(labels)["__name__"] == "rlhfspec_reconnects_total"}
    assert servers == {"nats"} | ({"redis"} if job.servers.redis_url is not None else set())

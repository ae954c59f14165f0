"""A job's processes as in pods: prepare, control and all stages, over a release's servers."""

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_place import PATIENCE_SECONDS, Job, stopped
from runs import curve_of, train
from scraping import samples_of
from shared_servers import SharedServers
from started import hold_rewards

from rlhfspec.worker import exits

STAGES = ("prompts", "generator", "reward", "trainer")


@pytest.fixture
def job(tmp_path: Path, servers: SharedServers, job_file: Path) -> Iterator[Job]:
    pods = tmp_path / "pods"
    pods.mkdir()
    with Job(pods, servers, job_file) as job:
        yield job


def shown_once(job: Job, holds: Callable[[set[str]], bool]) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        shown: dict[str, Any] = json.loads(job.show("--json").communicate(timeout=60)[0])
        if holds({worker["name"] for worker in shown["workers"]}):
            return shown
        assert time.monotonic() < end, shown


def test_control_waits_for_the_run_and_lives_on_where_nats_lost_all(tmp_path: Path, job_file: Path) -> None:
    (tmp_path / "pods").mkdir()
    with SharedServers(tmp_path / "release") as servers, Job(tmp_path / "pods", servers, job_file) as job:
        assert job.start("prepare", opened=False).wait(100) == exits.DONE, job.words("prepare").read_text()
        control = job.start("control", opened=False)
        job.operator.until(lambda report: not report.troubles, "a control that waits")
        assert not said(job, "the run is open")
        job.open()
        until_said(job, "the run is open")
        servers.kill_nats()
        shutil.rmtree(servers.folder / "store")
        until_said(job, "the broker does not answer")
        control.send_signal(signal.SIGSTOP)  # else it may look before the run is opened again
        servers.start_nats()
        job.open()
        control.send_signal(signal.SIGCONT)
        until_said(job, "the broker answers again")
        assert stopped(control) == 0


def said(job: Job, what: str) -> bool:
    return any(what in line.get("message", "") for line in job.log("control"))


def until_said(job: Job, what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not said(job, what):
        assert time.monotonic() < end, job.log("control")
        time.sleep(0.05)


def test_a_run_is_told_of_from_beginning_to_end(job: Job, job_file: Path) -> None:
    """After the first step control is killed and the broker stopped, without effect."""
    hold = hold_rewards(job_file, "1 run")
    changed = ("training.steps=12", "algorithm.klCoefficient=0", "generation.speculation.mode=off")
    whole = train(job_file, "one", *changed)
    job.job["spec"]["training"]["steps"] = 12
    job.job["spec"]["algorithm"]["klCoefficient"] = 0
    job.job["spec"]["generation"]["speculation"] = {"mode": "off"}
    job.job["spec"]["rewards"]["sources"][0]["timeoutSeconds"] = 170.0
    operator = job.operator
    assert job.start("prepare").wait(100) == exits.DONE, job.words("prepare").read_text()
    control = job.start("control")
    operator.until(lambda report: report.total_steps == 12, "a run that nobody works at yet")
    stages = job.start_stages(*STAGES)
    first = operator.until(lambda report: report.step >= 1, "the first step")
    if job.servers.redis_url is not None:
        assert shown_once(job, lambda names: names >= {f"{stage}-0" for stage in STAGES})["steps"][0]["step"] == 1
    viewing = job.show("--view")
    assert b"12 steps of" in viewing.stdout.readline()
    control.kill()
    control.wait()
    control = job.start("control")
    assert not operator.until(lambda report: report.step >= first.step, "the run after control was killed").troubles
    job.servers._nats.send_signal(signal.SIGSTOP)
    try:
        away = operator.until(lambda report: report.troubles, "a broker that is away").troubles
    finally:
        job.servers._nats.send_signal(signal.SIGCONT)
    assert [trouble.reason for trouble in away] == ["BrokerUnavailable"]
    check_what_control_counts(job)
    hold.unlink()
    assert any(b"step " in line for line in viewing.stdout), "it shows steps as they come"
    assert stopped(viewing) == exits.DONE
    last = operator.until(lambda report: report.checkpoint_step == 12, "the last checkpoint")
    assert stages.stdout.readline() == b"trainer 0\n"
    assert not last.troubles
    assert last.step == 12
    assert stopped(control) == exits.DONE
    assert job.words("control").read_text() == "left: it was asked to"
    assert curve_of(job_file, "run") == whole


def check_what_control_counts(job: Job) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{job.control_port}/metrics", timeout=60) as answer:
        told = samples_of(answer.read().decode(), {})
    servers = {dict(labels).get("server") for labels in told if dict(labels)["__name__"] == "rlhfspec_reconnects_total"}
    assert servers == {"nats"} | ({"redis"} if job.servers.redis_url is not None else set())

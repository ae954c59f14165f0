"""Stages' processes as in pods, with fixed ports and tokens, have the laptop's curve."""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from faults.processes import environment_of, is_alive, of_run
from pods import OFF, STAGES, Job, Pod
from runs import curve_of, lines_of, train, with_spec
from shared_servers import SharedServers, free_port
from started import eventually, hold_rewards

from rlhfspec.cluster import names
from rlhfspec.common.folder_lock import take_lock
from rlhfspec.errors import StageFailed, StorageError
from rlhfspec.messages.access.connections import Connections, client_token_file
from rlhfspec.runs.folder.run_folder import RunFolder, _append
from rlhfspec.worker.exits import code_of
from rlhfspec.worker.last_words import one_line

STEPS = 8
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="every pod has a loopback address of its own"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def job(job_file: Path, servers: SharedServers) -> Iterator[Job]:
    with Job(with_spec(job_file, generation={"speculation": OFF}), servers) as job:
        yield job


def prepared(job: Job) -> Pod:
    pod = job.start(names.PREPARE)
    assert pod.ended()[0] == 0, pod.log
    return pod


def answers(pod: Pod) -> int:
    try:
        with urllib.request.urlopen(f"http://{pod.host}:{names.HTTP_PORT}/readyz") as answer:
            return int(answer.status)
    except OSError:
        return 0


def steps_trained(job: Job) -> int:
    path = job.folder / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_run_in_pods_has_the_laptops_curve(job: Job) -> None:
    hold = hold_rewards(job.job_file, "0 storage/run")
    with_spec(job.job_file, training={"steps": STEPS})
    train(job.job_file, "one")
    prepared(job)
    pods = {stage: job.start(stage) for stage in STAGES}
    pods["elastic"] = job.start("generator", 4)
    pods["control"] = job.start(names.CONTROL)
    eventually(lambda: all(answers(pod) == 200 for pod in pods.values()), "all are ready")
    hold.write_text("2 storage/run")
    eventually(lambda: steps_trained(job) >= 2, "two trained steps")
    assert pods["trainer"].stopped() == (0, f"left: step {steps_trained(job)} is trained and saved")
    assert steps_trained(job) < STEPS
    manifest = json.loads((job.folder / "manifest.json").read_text())
    assert (manifest["outcome"], manifest["reason"]) == ("stopped", "the trainer was asked to stop")
    hold.unlink()
    assert pods.pop("elastic").stopped() == (0, "left: it was asked to")
    trainer = job.start("trainer")
    assert trainer.ended() == (0, f"completed: step {STEPS}"), trainer.log
    for pod in (pod for role, pod in pods.items() if role != "trainer"):
        assert pod.stopped() == (0, "left: it was asked to"), pod.log
    assert curve_of(job.job_file, "storage/run") == curve_of(job.job_file, "one")
    as_left_on_a_laptop(job)


def test_clients_of_a_gateway_in_a_pod_change_no_sample(job: Job) -> None:
    job.number += 2  # another run: the servers still have the weights of those before
    with_spec(job.job_file, training={"steps": 4})
    train(job.job_file, "one")
    with_spec(job.job_file, roles={"gateway": {"workers": 1}})
    prepared(job)
    serve = {"serve_port": free_port()}
    pods = {stage: job.start(stage, **serve) for stage in ("gateway", *STAGES, names.CONTROL)}
    connections = Connections.read(pods["gateway"].place / "connections.json")
    assert connections.credentials is not None
    token = client_token_file(connections.credentials).read_text()
    versions: set[int] = set()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    while pods["trainer"].process.poll() is None:
        body = json.dumps({"model": "policy", "prompt": "2+2=", "max_tokens": 9}).encode()
        url = f"http://{pods['gateway'].host}:{serve['serve_port']}/v1/completions"
        with (
            suppress(OSError),
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer,
        ):
            versions.update(json.load(answer)["choices"][0]["weights_versions"])
    assert versions, pods["gateway"].log
    assert pods["trainer"].ended() == (0, "completed: step 4"), pods["trainer"].log
    assert curve_of(job.job_file, "storage/run") == curve_of(job.job_file, "one")
    samples = [(job.job_file.parent / run / "samples.jsonl").read_bytes() for run in ("storage/run", "one")]
    assert samples[0] == samples[1]


def as_left_on_a_laptop(job: Job) -> None:
    one, many = job.job_file.parent / "one", job.folder
    left = {path.name for path in many.iterdir()} - {path.name for path in one.iterdir()}
    assert left <= {"processes", "logs"}, left
    assert {path.name for path in one.iterdir()} <= {path.name for path in many.iterdir()}
    assert [path.name for path in (many / "plots").iterdir()] == ["training.png"]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, many)]
    assert [each["outcome"] for each in manifests] == ["completed", "completed"]
    assert manifests[1]["reason"] == ""
    loaded = [{role: told | {"seconds": 0} for role, told in each["models"].items()} for each in manifests]
    assert loaded[1] == loaded[0]
    assert "completed after 8 steps" in (many / "summary.md").read_text()
    RunFolder(many).job()
    assert lines_of(job.job_file, "one")


def test_a_generator_of_two_processes_is_one_pod(job: Job) -> None:
    job.number += 1  # another run: the servers still have the weights of the one before
    with_spec(job.job_file, training={"steps": 2})
    train(job.job_file, "one")
    with_spec(job.job_file, roles={"generator": {"tensorParallel": 2}})
    prepared(job)
    pods = {stage: job.start(stage) for stage in (*STAGES, names.CONTROL)}
    assert pods["trainer"].ended() == (0, "completed: step 2"), pods["trainer"].log
    of_the_group = [pid for pid in of_run(job.uid) if environment_of(pid).get("RANK") == "1"]
    assert len(of_the_group) == 1
    assert pods["generator"].stopped() == (0, "left: it was asked to"), pods["generator"].log
    assert not any(map(is_alive, of_the_group))
    assert curve_of(job.job_file, "storage/run") == curve_of(job.job_file, "one")


def test_an_absent_server_at_the_start_is_logged_with_its_address(job: Job) -> None:
    prepared(job)
    prompts = job.start("prompts", nats_url="tls://127.0.0.1:9")
    eventually(lambda: "tls://127.0.0.1:9: no server there (connection refused)" in prompts.log, "the address is said")
    assert prompts.stopped()[0] == 0


def test_a_folder_that_another_trainer_still_holds_is_no_fault_of_the_job(tmp_path: Path) -> None:
    held = take_lock(tmp_path / ".lock")
    try:
        with pytest.raises(StorageError, match=rf"another run is writing here \(process {os.getpid()}\)") as refused:
            RunFolder(tmp_path).hold()
    finally:
        os.close(held)
    assert code_of(refused.value) == 1


def test_a_full_disk_is_recognised_in_any_error_message(tmp_path: Path) -> None:
    (full := tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError) as written:
        _append(full, "line\n")
    assert one_line(written.value).startswith(f"storage full: {full}: cannot be written")
    said_by_safetensors = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert one_line(StorageError(full, said_by_safetensors)).startswith("storage full: ")
    assert not one_line(StageFailed("trainer", 0, "NaN")).startswith("storage full: ")

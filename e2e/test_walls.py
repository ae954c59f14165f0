"""Walls within a claim that jobs share: all pods but `prepare`, thus the user's code, write their run folder alone."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from installed import IMAGES, NAMESPACE, Installed, Job, example

from rlhfspec.cluster import names

CLUSTER = {"images": IMAGES}


def raid() -> dict[str, str]:
    """Try to write everywhere; return the error of each file, or that there was none."""
    from pathlib import Path

    told = {}
    for root in (Path("/storage"), Path("/mine")):
        in_cache = (root / "cache" / "models").glob("*/config.json")
        theirs = [root / "runs/theirs/steps.jsonl", root / "runs/theirs/new", root / "theirs.jsonl", root / "raider.py"]
        for path in (*theirs, *in_cache, root / "cache" / "new", root / "new", root / "runs" / "new"):
            try:
                path.parent.mkdir(exist_ok=True)
                path.open("a").write("raided")
                told[str(path)] = "written"
            except OSError as error:
                told[str(path)] = str(error.strerror)
    return told


REWARD = f"""
import json
from pathlib import Path

{inspect.getsource(raid)}

def reward(completion):
    told = Path("/storage/runs/raider/told.json")
    if not told.exists():
        told.write_text(json.dumps(raid()))
    return float(len(completion) % 2)
"""


@pytest.fixture(scope="module")
def job(installed: Installed) -> Job:
    """With another claim at /mine, asked for as writable."""
    storage, other = installed.storage, installed.cluster.volume("other", NAMESPACE)
    (storage / "raider.py").write_text(REWARD)
    for root in (storage, other):
        (root / "runs" / "theirs").mkdir(parents=True)
        for path in (root / "theirs.jsonl", root / "runs" / "theirs" / "steps.jsonl"):
            path.write_text("theirs")
            path.chmod(0o666)
        for path in (root / "runs", root / "runs" / "theirs"):
            path.chmod(0o777)
    (storage / "raider.py").chmod(0o666)
    installed.cluster.kubectl("label", "pvc/other", "-n", NAMESPACE, "rlhfspec.io/jobs-may-use=true")
    mine = {
        "volumes": [{"name": "mine", "persistentVolumeClaim": {"claimName": "other"}}],
        "containers": [{"name": "worker", "volumeMounts": [{"name": "mine", "mountPath": "/mine", "readOnly": False}]}],
    }
    shipped = example(
        "grpo", training={"steps": 500}, evaluation=None, storage={"runFolder": "runs/raider"},
        rewards={"sources": [{"type": "function", "function": "raider:reward"}]},
        roles={"reward": {"podTemplate": {"spec": mine}}, "generator": {"workers": 2}},
    )  # fmt: skip
    job = installed.submit(shipped | {"metadata": {"name": "raider"}})
    job.wait_for_step(2, seconds=300)
    return job


def contents(storage: Path) -> dict[str, bytes]:
    files = [*(storage / "cache").rglob("*"), *storage.glob("*"), *(storage / "runs" / "theirs").rglob("*")]
    return {str(path.relative_to(storage)): path.read_bytes() for path in files if path.is_file()}


def test_a_reward_function_writes_its_run_folder_alone(installed: Installed, job: Job) -> None:
    told = json.loads((job.folder / "told.json").read_text())
    assert {"/storage/theirs.jsonl", "/storage/runs/theirs/steps.jsonl", "/mine/theirs.jsonl"} < set(told)
    assert any("/cache/models/" in path for path in told)
    assert {path: error for path, error in told.items() if error != "Read-only file system"} == {}
    assert {path for path, content in contents(installed.storage).items() if content.endswith(b"raided")} == set()


def test_no_pod_can_write_outside_its_part_of_the_storage(installed: Installed, job: Job) -> None:
    before = contents(installed.storage)
    program = f"{inspect.getsource(raid)}\nimport json; print(json.dumps(raid()))"
    asked = set()
    for pod in job.pods():
        role = pod["metadata"]["labels"][names.ROLE]
        if pod["status"]["phase"] == "Running":
            asked.add(role)
            said = job.kubectl("exec", "-n", NAMESPACE, pod["metadata"]["name"], "--", "python", "-c", program)
            wrong = {path: error for path, error in json.loads(said).items() if error != "Read-only file system"}
            assert {path for path in wrong if path.startswith("/storage")} == set(), role
    assert asked >= {"control", "prompts", "generator", "reward", "reference", "trainer"}
    spans = job.folder / "traces" / "reward-0.jsonl"
    job.wait("traces", spans.exists, seconds=30)
    assert contents(installed.storage) == before

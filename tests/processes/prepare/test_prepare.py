"""`python -m rlhfspec.prepare` as a pod runs it makes a run folder or prints one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import World

from rlhfspec.common.folder_lock import take_lock
from rlhfspec.common.object_store import ObjectStore
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.prepare.folder import prepare
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.tiny.paths import model_folder
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer
from rlhfspec.worker import exits


class Place:
    def __init__(self, storage: Path, config: Path, job_file: Path) -> None:
        self.storage, self.folder = storage, storage / "runs" / "letters-6f1c"
        self.config = config
        self.job: dict[str, Any] = yaml.safe_load(job_file.read_text())
        self.job["metadata"] |= {"namespace": "team", "labels": {"who": "me"}}
        self.words = config / "termination-log"
        self.connections_file = config / "connections.json"
        self.connections = Connections(
            uid="c0e43711", job_file=self.folder / "processes" / "job.json", base_folder=storage, folder=self.folder,
            nats_url="nats://127.0.0.1:4222", weights="grpc",
        )  # fmt: skip
        config.mkdir(exist_ok=True)
        self.connections_file.write_text(self.connections.model_dump_json())

    def write(self) -> None:
        (self.config / "job.json").write_text(json.dumps(self.job))

    def run(self) -> int:
        self.write()
        self.words.unlink(missing_ok=True)
        environment = os.environ | {"TERMINATION_LOG": str(self.words), "RLHFSPEC_CACHE": str(self.storage / "cache")}
        command = [sys.executable, "-m", "rlhfspec.prepare", "--connections", str(self.connections_file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
        assert "Traceback (most" not in done.stdout, done.stdout
        return done.returncode

    def prepare(self) -> str:
        self.write()
        return str(prepare(self.connections, self.config / "job.json"))

    def said(self) -> str:
        text = self.words.read_text()
        assert "\n" not in text
        return text

    def resolved(self) -> dict[str, Any]:
        return json.loads(self.connections.job_file.read_text())


@pytest.fixture
def place(tmp_path: Path, job_file: Path) -> Place:
    return Place(tmp_path, tmp_path / "config", job_file)


def test_a_good_job_gets_a_folder_and_its_paths(place: Place) -> None:
    assert place.run() == exits.DONE
    assert place.said() == f"prepared: {place.folder} (new run)"
    assert place.resolved()["spec"]["dataset"]["path"] == str(place.storage / "data.jsonl")
    assert place.connections.job().metadata.namespace == "team"
    with RunFolder(place.folder) as folder:
        manifest = folder.manifest()
        assert manifest.processes == dict.fromkeys(("prompts", "generator", "reward", "reference", "trainer"), 1)
        assert not manifest.resumed
        os.close(take_lock(folder.path / ".lock"))  # whoever trains takes it


def test_all_problems_are_reported_in_one_line_starting_with_a_field(place: Place) -> None:
    place.job["spec"]["trainig"] = {"steps": 3}
    place.job["spec"]["algorithm"]["samplesPerPrompt"] = 0
    place.job["spec"]["dataset"]["path"] = "dtaa.jsonl"
    assert place.run() == exits.PERMANENT
    said = place.said()
    assert said.startswith("spec."), said
    for problem in ("samplesPerPrompt: must be", "did you mean training?", "did you mean data.jsonl?"):
        assert problem in said
    assert not place.folder.exists()


@pytest.mark.parametrize(
    ("function", "problem"),
    [("rewrds:letters", "did you mean rewards"), ("rewards:lettrs", "has no function lettrs; did you mean letters?")],
)
def test_a_wrong_reward_function_is_found_before_anything_starts(place: Place, function: str, problem: str) -> None:
    place.job["spec"]["rewards"]["sources"][0]["function"] = function
    with pytest.raises(Exception, match=r"spec\.rewards\.sources\[0\]\.function") as refused:
        place.prepare()
    assert exits.code_of(refused.value) == exits.PERMANENT
    assert problem in str(refused.value)
    assert not place.folder.exists()


@pytest.mark.parametrize("function", ["broken:reward", "asking:reward"])
def test_prepare_does_not_run_reward_functions(place: Place, function: str) -> None:
    """This pod alone reaches the Internet."""
    ran = place.storage / "it-ran"
    (place.storage / "broken.py").write_text(f"open({str(ran)!r}, 'w')\n1 / 0\ndef reward(completion): return 0.0\n")
    (place.storage / "asking.py").write_text(f"open({str(ran)!r}, 'w')\ndef reward(completion, awnser): return 0.0\n")
    place.job["spec"]["rewards"]["sources"][0]["function"] = function
    place.job["spec"]["training"]["optimizer"] = {"name": "asking:Optimizer"}
    assert place.run() == exits.DONE, place.said()
    assert not ran.exists()


def test_modules_in_the_storage_do_not_shadow_libraries(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod's working directory is the storage, which jobs write."""
    ran = place.storage / "it-ran"
    for library in ("yaml", "pydantic", "huggingface_hub", "transformers"):
        (place.storage / f"{library}.py").write_text(f"open({str(ran)!r}, 'w')")
    world = World()
    world.settle()
    variables = world.pods["sums-prepare-0"]["spec"]["containers"][0]["env"]
    monkeypatch.setenv(*next((each["name"], each["value"]) for each in variables if each["name"] == "PYTHONSAFEPATH"))
    monkeypatch.chdir(place.storage)
    assert place.run() == exits.DONE, place.said()
    assert not ran.exists()


def test_prepare_does_not_check_what_only_other_pods_have(place: Place) -> None:
    place.job["spec"]["rewards"]["sources"][0] = {"type": "http", "url": "${JUDGE}", "headers": {"key": "${KEY}"}}
    place.job["spec"]["roles"] = {"generator": {"workers": 10_000}}
    assert place.prepare().endswith("(new run)")


def test_prepare_goes_on_in_a_folder_with_trained_steps(place: Place) -> None:
    place.prepare()
    with RunFolder(place.folder) as folder:
        folder.go_on_after(0)
        folder.append_step(example_step(step=1))
    place.job["spec"]["training"]["steps"] = 9
    assert place.prepare().endswith(" (existing run with 1 steps)")
    assert place.resolved()["spec"]["training"]["steps"] == 9


def test_a_prepare_killed_half_way_can_be_repeated(place: Place) -> None:
    place.prepare()
    whole = {path.name for path in place.folder.iterdir()}
    for name in ("manifest.json", "job.yaml", "processes"):
        gone = place.folder / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        if name == "job.yaml":
            (place.folder / "manifest.json").unlink()  # it is written last
        assert place.prepare().endswith("(new run)")
        assert {path.name for path in place.folder.iterdir()} == whole


def test_a_folder_of_another_job_is_refused_by_the_field_that_names_it(place: Place) -> None:
    place.prepare()
    place.job["spec"]["training"]["seed"] = 5
    assert place.run() == exits.PERMANENT
    assert place.said().startswith("spec.storage.runFolder: holds the run of another job: spec.training.seed was 0")


@pytest.mark.parametrize("name", [".", "runs", "cache", "cache/mine", "runs/other/mine"])
def test_a_folder_that_other_jobs_share_is_refused(place: Place, name: str) -> None:
    """Pods of the job could write what is in it."""
    (place.storage / "runs" / "other").mkdir(parents=True)
    (place.storage / "runs" / "other" / "manifest.json").write_text("{}")
    folder = place.storage / name
    place.connections = place.connections.model_copy(update={"folder": folder})
    place.connections_file.write_text(place.connections.model_dump_json())
    assert place.run() == exits.PERMANENT
    assert place.said().startswith("spec.storage.runFolder: "), place.said()
    assert place.said().split(": ")[1].startswith(("is shared by all jobs", "is inside the run folder"))
    assert not (folder / "processes").exists()


@pytest.mark.parametrize("name", [".lock", "processes", "processes/job.json", ".job.yaml.tmp"])
def test_symbolic_links_in_the_run_folder_are_refused(place: Place, name: str) -> None:
    """Code of the user writes there; this pod writes the whole claim."""
    place.prepare()
    other = place.storage / "other"
    other.mkdir() if name == "processes" else other.write_text("mine")
    link = place.folder / name
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.symlink_to(other)
    assert place.run() == exits.PERMANENT
    assert place.said().startswith(f"spec.storage.runFolder: holds a symbolic link: {link}")
    assert list(other.iterdir()) == [] if name == "processes" else other.read_text() == "mine"


def test_a_cached_model_that_was_changed_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(place.storage / "cache"))
    place.job["spec"]["model"]["path"] = "tiny:sums"
    place.prepare()
    place.prepare()
    folder = model_folder("tiny:sums")
    (folder / "added.txt").write_text("a file more, as of a download that goes on")
    place.prepare()
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert place.run() == exits.ERROR
    assert place.said() == f"{folder}: model.safetensors was changed after it was cached; delete the folder"
    shutil.rmtree(folder)
    assert place.run() == exits.DONE, place.said()


def test_a_run_goes_on_with_another_template_of_its_pods(place: Place) -> None:
    place.prepare()
    place.job["spec"]["podTemplate"] = {"spec": {"tolerations": [{"operator": "Exists"}]}}
    assert place.prepare().endswith("(new run)")


def test_a_folder_locked_by_another_pod_is_no_fault_of_the_job(place: Place) -> None:
    place.prepare()
    held = take_lock(place.folder / ".lock")
    try:
        assert place.run() == exits.ERROR
        assert "another run is writing here" in place.said()
    finally:
        os.close(held)


def test_a_missing_connections_file_is_refused_in_one_line(place: Place) -> None:
    place.connections_file.unlink()
    assert place.run() == exits.PERMANENT
    assert "cannot be read" in place.said()


def test_tiny_models_and_data_are_made_in_the_storage(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(place.storage / "cache"))
    place.job["spec"]["dataset"]["path"] = "tiny:sums.jsonl"
    place.prepare()
    assert place.resolved()["spec"]["dataset"]["path"] == str(place.storage / "cache" / "data" / "sums.jsonl")
    place.job["spec"]["model"]["path"] = "tiny:smus"
    with pytest.raises(Exception, match=r"spec\.model\.path: must be tiny:"):
        place.prepare()


def test_a_model_of_the_hub_is_fetched_and_pods_read_its_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = place.storage / "cache" / "huggingface" / "hub" / "models--owner--name"
    monkeypatch.setenv("HF_HOME", str(place.storage / "cache" / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place.job["spec"]["model"] = {"path": "owner/name"}
    assert place.run() == exits.ERROR
    assert place.said().startswith("owner/name: spec.model.path is not a folder in the job's storage, and the hub ")
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("c0ffee")
    (cached / "snapshots" / "c0ffee").mkdir(parents=True)
    (cached / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    assert place.run() == 0
    assert place.resolved()["spec"]["model"]["path"] == str(cached / "snapshots" / "c0ffee")
    assert yaml.safe_load((place.folder / "job.yaml").read_text())["spec"]["model"]["path"] == "owner/name"


@pytest.mark.usefixtures("object_credentials")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a part"])
def test_a_model_is_fetched_from_the_object_store_only_if_sent_whole(
    place: Place, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    made: list[str] = []
    monkeypatch.setattr("rlhfspec.tiny.models.ensure_recipe", lambda recipe, report: made.append(recipe.name))
    monkeypatch.setenv("RLHFSPEC_CACHE", str(place.storage / "cache"))
    folder = model_folder("tiny:sums")
    folder.mkdir(parents=True)
    hugging_face_tokenizer().save_pretrained(folder)
    shutil.copy(models / "policy" / "config.json", folder)
    files = sorted(folder.iterdir())
    uri = f"s3://bucket/{tmp_path.name}"
    ObjectStore(uri, place.storage).push(files if whole else files[:-1])
    shutil.rmtree(folder)
    place.connections = place.connections.model_copy(update={"storage_uri": uri})
    place.job["spec"]["model"]["path"] = "tiny:sums"
    place.prepare()
    assert made == ([] if whole else ["sums"])
    assert folder.exists() == whole


def test_a_full_volume_is_named_and_is_no_fault_of_the_job(small_disk: Path, tmp_path: Path, job_file: Path) -> None:
    place = Place(small_disk, tmp_path / "config", job_file)
    for name in ("data.jsonl", "rewards.py"):
        shutil.copy(tmp_path / name, small_disk)
    fill = small_disk / "fill"
    fill.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    assert place.run() == exits.ERROR
    assert place.said() == f"storage full: {small_disk}: cannot be written: No space left on device"
    fill.unlink()
    assert place.run() == exits.DONE, place.said()

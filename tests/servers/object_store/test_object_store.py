"""Folders and prefixes of an object store, over a real S3 server (rclone)."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from rlhfspec.common.object_store import ObjectStore
from rlhfspec.errors import InvalidRequest, StorageError, StorageUnavailable
from rlhfspec.worker.exits import PERMANENT, TEMPORARY, code_of
from rlhfspec.worker.last_words import one_line

NAMES = st.text("abc-_ é%", min_size=1, max_size=6).map(str.strip).filter(bool)
TREES = st.dictionaries(st.lists(NAMES, min_size=2, max_size=3).map(lambda parts: f"{len(parts)}/{'/'.join(parts)}"),
                        st.binary(max_size=300), max_size=6)  # fmt: skip
pytestmark = pytest.mark.usefixtures("object_credentials")


def store_at(base: Path, prefix: str = "team") -> ObjectStore:
    return ObjectStore(f"s3://bucket/{prefix}", base)


def written(base: Path, files: dict[str, bytes]) -> list[Path]:
    for name, content in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)
    return [base / name for name in files]


def contents(base: Path) -> dict[str, bytes]:
    return {path.relative_to(base).as_posix(): path.read_bytes() for path in base.rglob("*") if path.is_file()}


@settings(max_examples=25, deadline=None)
@given(TREES)
def test_pushed_files_are_fetched_unchanged(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        here, there = Path(place, "here"), Path(place, "there")
        prefix = Path(place).name
        assert store_at(here, prefix).push(written(here, files)) == sum(map(len, files.values()))
        store = store_at(there, prefix)
        sizes = store.sizes("2", "3")
        assert sizes == {name: len(content) for name, content in files.items()}
        assert store.fetch(sizes) == sum(map(len, files.values()))
        assert contents(there) == files
        assert store.fetch(sizes) == 0, "what is there does not come again"
        store.remove(sizes)
        assert store.sizes("2", "3") == {}


def test_a_name_selects_the_object_or_those_below_it(tmp_path: Path) -> None:
    store = store_at(tmp_path, "beside")
    store.push(written(tmp_path, {"data/sums.jsonl": b"1", "data2/x": b"22", "data.txt": b"333", "rewards.py": b""}))
    assert store.sizes("data") == {"data/sums.jsonl": 1}
    assert store.sizes("data/sums.jsonl", "./data/"[2:], "nothing") == {"data/sums.jsonl": 1}
    assert store.at_the_top() == {"data.txt": 3, "rewards.py": 0}


def test_an_object_that_changes_during_the_fetch_is_not_kept(tmp_path: Path) -> None:
    store_at(tmp_path / "a", "shrinking").push(written(tmp_path / "a", {"x/y": b"12"}))
    other = store_at(tmp_path / "b", "shrinking")
    with pytest.raises(StorageUnavailable):
        other.fetch({"x/y": 2_000})
    with pytest.raises(StorageUnavailable, match="x/z was removed while it was read"):
        other.fetch({"x/z": 2})
    assert not (tmp_path / "b" / "x" / "y").exists()
    assert other.fetch(other.sizes("x")) == 2


def test_a_file_larger_than_one_part_round_trips(tmp_path: Path) -> None:
    content = bytes(range(256)) * (80 << 12)  # 80 MB
    store_at(tmp_path / "a", "large").push(written(tmp_path / "a", {"w/model.safetensors": content}))
    store = store_at(tmp_path / "b", "large")
    store.fetch(store.sizes("w"))
    assert (tmp_path / "b" / "w" / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize(
    ("uri", "variables", "problem"),
    [
        ("s3://nobucket/team", {}, "the bucket does not exist"),
        ("s3://bucket/team", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "the store refuses: "),
        ("s3://bucket/team", {"AWS_ACCESS_KEY_ID": ""}, "the store refuses: "),
        ("s3://bucket/team", {"AWS_SKIP_SIGNATURE": "perhaps"}, "the store refuses: "),
    ],
)
def test_a_refusal_of_the_store_is_a_permanent_error_that_names_the_field(
    uri: str, variables: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest) as refused:
        ObjectStore(uri, tmp_path).sizes("data")
    assert refused.value.field == "spec.storage.uri"
    assert refused.value.problem.startswith(problem)
    assert code_of(refused.value) == PERMANENT
    assert "wrong" not in str(refused.value)


def test_absent_store_is_reported_as_temporary_after_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable, match=r"^s3://bucket/team: ") as away:
        ObjectStore("s3://bucket/team", tmp_path, patience_seconds=0.5).sizes("data")
    assert code_of(away.value) == TEMPORARY
    assert one_line(away.value).startswith("storage away: s3://bucket/team: ")
    assert "\n" not in str(away.value)


def test_a_full_disk_during_a_fetch_is_named_as_such(tmp_path: Path) -> None:
    store = store_at(tmp_path, "full")
    store.push(written(tmp_path, {"x/y": b"12"}))
    with pytest.raises(StorageError, match=r"\.fetching-y: cannot be written: .*") as full:
        store.fetch({"x/y": 1 << 60})
    assert code_of(full.value) == 1


def test_the_shell_command_fetches_a_run_folder(tmp_path: Path) -> None:
    store_at(tmp_path, "shell").push(written(tmp_path, {"runs/mine/steps.jsonl": b"{}\n"}))
    there = tmp_path / "there"
    command = [sys.executable, "-m", "rlhfspec.common.object_store", "s3://bucket/shell", str(there)]
    done = subprocess.run([*command, str(there / "runs/mine")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 files, 3 bytes\n"), done.stderr
    assert contents(there) == {"runs/mine/steps.jsonl": b"{}\n"}
    none = subprocess.run([*command, str(there / "runs/none")], capture_output=True, text=True)
    assert (none.returncode, none.stderr) == (1, f"s3://bucket/shell: there is nothing at {there / 'runs/none'}\n")

"""A new start removes what a dead run left; live runs and other users' files stay."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import child_of

from rlhfspec.common.folder_lock import take_lock
from rlhfspec.errors import StorageError
from rlhfspec.messages.servers import room, scratch
from rlhfspec.messages.servers.guardian import UID, guardians_of
from rlhfspec.messages.servers.room import place_of_weights, refuse_full_disk
from rlhfspec.messages.servers.scratch import Scratch, end_dead_runs, end_run_in


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folders = [tmp_path / "memory", tmp_path / "temporary"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", folders[0])
    monkeypatch.setattr("tempfile.tempdir", str(folders[1]))
    return folders[0]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "processes"


DIES = """
import os, sys
from pathlib import Path
from rlhfspec.messages.servers import scratch
from rlhfspec.messages.servers.guardian import Guardians
memory, uid, place, guarded = sys.argv[1:]
scratch.SHARED_MEMORY = Path(memory)
made = scratch.Scratch(uid, Path(place))
if guarded == "True":
    Guardians(uid, remove=[Path(place), *made.paths]).start()
made.make()
os.kill(os.getpid(), 9)
"""


def dead(memory: Path, uid: str, place: Path, *, guarded: bool = False) -> Path:
    subprocess.run([sys.executable, "-c", DIES, str(memory), uid, str(place), str(guarded)], check=False)
    assert (memory / f"rlhfspec-{uid}").is_dir()
    assert (place / UID).read_text() == uid
    return memory / f"rlhfspec-{uid}"


def test_processes_memory_and_keys_of_a_dead_run_are_removed(memory: Path, place: Path) -> None:
    with child_of("d1") as worker:
        folder = dead(memory, "d1", place)
        assert end_dead_runs() == ["d1"]
        assert worker.wait() == -9
    assert not folder.exists()
    assert not place.exists()
    assert end_dead_runs() == []


def test_place_of_a_run_holds_its_uid_from_start(memory: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late guardian of an earlier run would otherwise remove the folder."""
    seen: list[bool] = []
    write = Path.write_text

    def wrote(path: Path, text: str) -> int:
        seen.append(place.exists())
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", wrote)
    Scratch("r1", place).make()
    assert seen[0] is False
    assert (place / UID).read_text() == "r1"
    assert sorted(path.name for path in place.parent.iterdir()) == [place.name]


def test_a_run_that_lives_is_left_alone(memory: Path, place: Path) -> None:
    living = Scratch("e2", place)
    living.make()
    assert living.path == memory / "rlhfspec-e2"
    assert end_dead_runs() == []
    assert living.path.exists()
    living.remove()
    assert not living.path.exists()


def test_a_folder_used_by_a_newer_run_is_left_alone(memory: Path, place: Path) -> None:
    folder = dead(memory, "d3", place)
    lock = take_lock(place.parent / ".lock")
    try:
        assert end_dead_runs() == ["d3"]
    finally:
        os.close(lock)
    assert not folder.exists()
    assert place.exists()


def test_only_folders_private_to_this_user_are_trusted(memory: Path, place: Path) -> None:
    folder = dead(memory, "d4", place)
    folder.chmod(0o755)
    (memory / "rlhfspec-faults-x").mkdir(mode=0o700)  # somebody's, who only has the name in common
    (memory / "rlhfspec-link").symlink_to(place.parent)
    assert end_dead_runs() == []
    folder.chmod(0o700)
    (folder / "place").write_text(str(place.parent))  # no RUN/processes
    assert end_dead_runs() == ["d4"]
    assert place.exists()


def test_scratch_is_in_tmp_without_shared_memory(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "missing")
    made = Scratch("e5", place)
    made.make()
    assert made.path == tmp_path / "temporary" / "rlhfspec-e5"
    made.remove()


def nowhere_to_write() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


@pytest.mark.parametrize("step", ["before", "no place", "nowhere", "taken"])
def test_a_scratch_that_was_never_made_removes_nothing(
    tmp_path: Path, memory: Path, place: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    thesis = tmp_path / "here" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.touch()
    monkeypatch.chdir(thesis.parent)
    of_another = [folder / "rlhfspec-e8" / "theirs" for folder in (memory, tmp_path / "temporary")]
    if step == "nowhere":
        monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "missing")
        monkeypatch.setattr("tempfile.gettempdir", nowhere_to_write)
    if step == "taken":
        for file in of_another:
            file.parent.mkdir()
            file.touch()
    made = Scratch("e8", tmp_path / "missing" / "processes" if step == "no place" else place)
    if step != "before":
        with pytest.raises((OSError, StorageError)):
            made.make()
    made.remove()
    assert thesis.exists()
    assert step != "taken" or all(file.exists() for file in of_another)


def test_a_new_run_in_a_folder_waits_for_the_guardians_of_the_old_run(memory: Path, place: Path) -> None:
    """The guardians would otherwise remove what the new run makes."""
    folder = dead(memory, "d6", place, guarded=True)
    end_run_in(place)
    assert guardians_of("d6") == []
    assert not place.exists()
    assert not folder.exists(), "they did their work"
    place.mkdir()
    end_run_in(place)
    assert not place.exists(), "nobody knows whose it was"


def test_a_full_disk_is_named_before_anything_is_written_to_it(small_disk: Path, tmp_path: Path) -> None:
    refuse_full_disk(small_disk, 512 << 10, "the run's servers")
    (small_disk / "filler").write_bytes(bytes(1900 << 10))
    with pytest.raises(
        StorageError, match=rf"{small_disk}: disk full: the run's servers need 0.5 MB, and 0.2 MB are free"
    ):
        refuse_full_disk(small_disk, 512 << 10, "the run's servers")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    with pytest.raises(StorageError, match="missing: cannot be written: No such file or directory"):
        refuse_full_disk(tmp_path / "missing", 1, "the run's servers")


def test_weights_that_do_not_fit_into_memory_go_to_the_disk(small_disk: Path, tmp_path: Path) -> None:
    memory = small_disk / "rlhfspec-e7"
    memory.mkdir()
    assert place_of_weights(memory, tmp_path, 1 << 19) == (memory, "")
    folder, told = place_of_weights(memory, tmp_path, 4 << 20)
    assert folder == tmp_path / "weights"
    assert told == (f"{small_disk} has 2.1 MB free, but the job's weights need 4.2 MB: using {tmp_path} instead")
    with pytest.raises(
        StorageError, match=rf"{small_disk}: disk full: the job's weights need 4.2 MB, and 2.1 MB are free"
    ):
        place_of_weights(memory, small_disk, 4 << 20)


def test_free_bytes_counts_only_what_this_user_may_use(small_disk: Path) -> None:
    assert 2_000_000 < room.free_bytes(small_disk) <= 2 << 20

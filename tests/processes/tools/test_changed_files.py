import subprocess
from pathlib import Path

from choose_tests import changed_files


def test_all_that_a_branch_changed_is_found(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    git("init", "--initial-branch", "main")
    for name in ("kept", "committed", "edited", "removed", "staged"):
        write(name, "before")
    write(".gitignore", "ignored\n")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_files(tmp_path) == set()
    git("checkout", "-b", "branch")
    write("committed", "after")
    git("commit", "-am", "second")
    git("checkout", "main")
    write("theirs", "after")  # what the default branch got meanwhile is no change of this one
    git("add", ".")
    git("commit", "-m", "third")
    git("checkout", "branch")
    for name in ("edited", "staged", "new", "ignored"):
        write(name, "after")
    git("add", "staged")
    (tmp_path / "removed").unlink()
    assert changed_files(tmp_path) == {Path(name) for name in ("committed", "edited", "staged", "removed", "new")}

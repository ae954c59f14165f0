import subprocess
import sys
from pathlib import Path

from run_folders import a_run


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A file size limit stands for the disk: a write that does not fit is undone and raises."""
    a_run(tmp_path, 2)
    code = (
        "import resource, sys; from rlhfspec.runs.folder.run_folder import *\n"
        "from rlhfspec.messages.records.metrics import *\n"
        "sys.path += sys.argv[2:]; from run_folders import example_job\n"
        "folder = RunFolder(sys.argv[1]); folder.begin(example_job(), resume=True); folder.go_on_after(2)\n"
        "size = folder.steps_file.stat().st_size + 100\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        "folder.append_step(example_step(step=3))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path), *sys.path], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "StorageError" in ended.stderr
    assert "steps.jsonl: cannot be written: File too large" in ended.stderr
    content = (tmp_path / "steps.jsonl").read_bytes()
    assert content.endswith(b"\n")
    assert content.count(b"\n") == 2

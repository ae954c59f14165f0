import subprocess
import sys
from pathlib import Path

import pytest

HEAD = "apiVersion: rlhfspec.io/v1alpha1\nkind: RLHFJob\nmetadata: {name: sums}\n"


@pytest.mark.parametrize("content", [b"spec: [", b"\xff\xfe", HEAD.encode() + b"spec: {trainig: {}}\n"])
def test_in_a_process_of_its_own(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    command = [sys.executable, "-m", "rlhfspec.cli.start", "validate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert str(file) in done.stderr

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warmed
from places import TESTS
from shared_servers import free_port

SET = [sys.executable, "-m", "rlhfspec.worker.ranks", "--nodes", "2", "--ranks-per-node", "2"]


def started(folder: Path, struck: int, *options: str, name: str = "words") -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERMINATION_LOG": str(folder / name)}
    command = [*SET, *options, "-m", "meeting_ranks", str(folder), str(struck)]
    return warmed.Popen(command, stderr=subprocess.PIPE, text=True, cwd=TESTS, env=environment)


def ended(process: Any) -> tuple[int, dict[str, Any]]:
    try:
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    return process.returncode, json.loads([line for line in said.splitlines() if line.startswith("{")][-1])


def nodes(folder: Path, struck: int) -> list[Any]:
    leader = f"127.0.0.1:{free_port()}"
    (folder / "secret").write_text("of this run")
    options = ("--leader", leader, "--secret", str(folder / "secret"))
    return [started(folder, struck, "--node", str(node), *options, name=f"words-{node}") for node in (1, 0)]


ALL = [[rank, rank % 2, rank // 2, 4, 2] for rank in range(4)]


def test_ranks_get_the_environment_variables_of_torchrun(tmp_path: Path) -> None:
    code, _ = ended(started(tmp_path, -1))
    assert code == 0
    assert json.loads((tmp_path / "told").read_text()) == ALL


def test_ranks_of_two_nodes_meet_at_the_node_of_rank_0(tmp_path: Path) -> None:
    assert [ended(process)[0] for process in nodes(tmp_path, -1)] == [0, 0]
    assert json.loads((tmp_path / "told").read_text()) == ALL
    assert (tmp_path / "words-1").read_text() == "left: rank 0 released its ranks"


def test_a_killed_rank_is_named_and_the_set_ends(tmp_path: Path) -> None:
    code, last = ended(started(tmp_path, 3))
    said = "killed by SIGKILL (rank 3 of 4 on node 1)"
    assert (code, last) == (128 + signal.SIGKILL, {"level": "error", "message": said, "exit_code": -signal.SIGKILL})
    assert (tmp_path / "words").read_text() == said


def test_a_killed_rank_ends_the_ranks_of_other_nodes(tmp_path: Path) -> None:
    there, here = nodes(tmp_path, 3)
    assert ended(there) == (
        128 + signal.SIGKILL,
        {"level": "error", "message": "killed by SIGKILL (rank 3 of 4 on node 1)", "exit_code": -signal.SIGKILL},
    )
    code, last = ended(here)
    assert code == 1
    assert "of 4 on node 0" in last["message"], "it names who missed it"


@pytest.mark.parametrize("option", [("--node", "0"), ("--leader", "here:1"), ("--node", "0", "--leader", "here:1")])
def test_a_node_needs_a_leader_and_a_secret(option: tuple[str, ...]) -> None:
    done = subprocess.run([*SET, *option, "-m", "meeting_ranks"], capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 2
    assert "--node, --leader and --secret must be given together" in done.stderr

"""Processes without the ranks' secret read nothing, take no seat and run no code."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import warmed
from faults.processes import is_listening
from places import TESTS
from rank_sets import run_ranks
from shared_servers import free_port
from started import eventually
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlhfspec.common.ranks import SECRET

Start = Callable[..., Any]


@pytest.fixture
def started() -> Iterator[Start]:
    processes = []

    def start(module: str, *arguments: str, **environment: str) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        processes.append(
            warmed.Popen(command, stderr=subprocess.PIPE, text=True, cwd=TESTS, env=os.environ | environment)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def rank_of_two(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), SECRET: "of these two", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def until_it_listens(port: int) -> None:
    eventually(lambda: is_listening(f"tcp://127.0.0.1:{port}"), "rank 0 listens")


def test_a_foreign_process_as_rank_1_gets_no_message_and_runs_no_code(tmp_path: Path, started: Start) -> None:
    port = free_port()
    first = started("meeting_ranks", str(tmp_path), "-1", **rank_of_two(0, port))
    until_it_listens(port)
    stranger = started("foreign_rank", str(port), str(tmp_path), OMP_NUM_THREADS="1")
    _, said = stranger.communicate(timeout=100)
    assert stranger.returncode != 0, said
    for rank in (first, started("meeting_ranks", str(tmp_path), "-1", **rank_of_two(1, port))):
        _, said = rank.communicate(timeout=100)
        assert rank.returncode == 0, said
    assert [path.name for path in tmp_path.iterdir()] == ["told"], "nobody else came in, got anything, or ran code"


def test_the_store_listens_on_loopback_and_reveals_no_address(tmp_path: Path, started: Start) -> None:
    port = free_port()
    started("meeting_ranks", str(tmp_path), "-1", **rank_of_two(0, port))
    until_it_listens(port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port))
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60.0))
    keys = eventually(
        lambda: [key for key in store.list_keys() if re.fullmatch("[0-9a-f]{64}", key)], "rank 0 says where it is"
    )
    assert not [key for key in store.list_keys() if re.search("rank|gloo|default|secret|these", key)]
    for key in keys:
        value = store.get(key)
        assert re.fullmatch(rb"[0-9a-f]+", value), "an address would be bytes"
        store.set(key, value[:-2] + b"00")
    _, said = started("meeting_ranks", str(tmp_path), "-1", **rank_of_two(1, port)).communicate(timeout=100)
    assert "without the ranks' secret wrote into their store" in said
    assert not (tmp_path / "told").exists()


def test_connections_of_strangers_to_gloo_ports_have_no_effect(tmp_path: Path) -> None:
    run_ranks("meeting_strangers", 2, str(tmp_path), "knock")
    for rank in ("0", "1"):
        assert json.loads((tmp_path / rank).read_text()) == {"hosts": ["127.0.0.1"], "gathered": [0, 1]}


def test_a_rank_without_the_secret_is_detected_before_anything_is_sent(tmp_path: Path) -> None:
    run_ranks("meeting_strangers", 2, str(tmp_path), "impostor")
    assert "what is connected as rank 1 does not know the ranks' secret" in (tmp_path / "0").read_text()

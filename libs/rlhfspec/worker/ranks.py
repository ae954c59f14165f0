"""`python -m rlhfspec.worker.ranks --nodes N --ranks-per-node G -m MODULE ...`: one worker as forked ranks.

Ranks get torchrun's environment variables. If a rank fails, the whole set ends; a request to leave goes to rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rlhfspec.common.interpreter import refuse_or_begin_anew
from rlhfspec.common.ranks import SECRET
from rlhfspec.worker import exits
from rlhfspec.worker.last_words import TERMINATION_LOG, write_last_words
from rlhfspec.worker.process import end_with_the_supervisor, leave_when_asked_to

_OTHER_RANKS_SECONDS = 60  # for the others after rank 0 has left


class RankSet:
    def __init__(self, *, nodes: int, ranks_per_node: int, node: int | None = None) -> None:
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node
        first = (node or 0) * ranks_per_node
        self._ranks = range(first, first + ranks_per_node) if node is not None else range(self.num_ranks)
        self._words = [tempfile.TemporaryFile() for _ in self._ranks]  # noqa: SIM115  # each rank's last
        self._alive: dict[int, int] = {}  # pid -> rank
        self._num_killed_before = exits.num_killed_for_memory()

    @property
    def num_ranks(self) -> int:
        return self._nodes * self._ranks_per_node

    def start(self, module: str, arguments: list[str], gpus: list[str], leader: str, secret: str) -> None:
        """Fork this node's ranks. `gpus`: one per rank, or empty; `leader`: host:port of rank 0."""
        host, _, port = leader.rpartition(":")
        if "OMP_NUM_THREADS" not in os.environ:
            arguments = [*arguments, "--threads", "1"]  # torchrun's default
        for rank in self._ranks:
            pid = os.fork()
            if pid == 0:
                _become(
                    module,
                    [*arguments, *gpu_of(rank, gpus)],
                    {"MASTER_ADDR": host, "MASTER_PORT": port, SECRET: secret, **self._environment(rank)},
                )
            self._alive[pid] = rank
            _write({"level": "info", "message": f"{self._name(rank)} begins", "rank": rank, "pid": pid})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._ask(number))  # none on a node without rank 0
        signal.signal(signal.SIGALRM, lambda *_: self._kill())

    def _environment(self, rank: int) -> dict[str, str]:
        node, local = divmod(rank, self._ranks_per_node)
        return {
            "RANK": str(rank), "WORLD_SIZE": str(self.num_ranks), "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self._ranks_per_node), "GROUP_RANK": str(node),
            TERMINATION_LOG: f"/dev/fd/{self._words[rank - self._ranks.start].fileno()}",
        }  # fmt: skip

    def wait(self) -> int:
        while self._alive:
            pid, status = os.wait()
            rank = self._alive.pop(pid, None)  # PID 1 of a container also reaps orphans
            code = os.waitstatus_to_exitcode(status)
            if rank is not None and code != exits.DONE:
                return self._failed(rank, code)
            if rank == self._ranks.start:
                signal.alarm(_OTHER_RANKS_SECONDS)
        write_last_words(self._said_by(0) if 0 in self._ranks else "left: rank 0 released its ranks")
        return exits.DONE

    def _failed(self, rank: int, code: int) -> int:
        self._kill()
        while self._alive:
            self._alive.pop(os.wait()[0], None)
        said = self._said_by(rank) or f"{exits.said(code)}{self._for_memory(code)}"
        if code != exits.PERMANENT:  # a permanent error is the same on every rank
            said += f" ({self._name(rank)})"
        _write({"level": "error", "message": said, "exit_code": code})
        write_last_words(said)
        return code if code > 0 else 128 - code  # as in a shell

    def _name(self, rank: int) -> str:
        node = f" on node {rank // self._ranks_per_node}" if self._nodes > 1 else ""
        return f"rank {rank} of {self.num_ranks}{node}"

    def _for_memory(self, code: int) -> str:
        ran_out = code == -signal.SIGKILL and exits.num_killed_for_memory() > self._num_killed_before
        return " as memory ran out" if ran_out else ""

    def _said_by(self, rank: int) -> str:
        words = self._words[rank - self._ranks.start]
        words.seek(0)
        return words.read().decode(errors="replace")

    def _ask(self, number: int) -> None:
        _send(number, [pid for pid, rank in self._alive.items() if rank == 0])

    def _kill(self) -> None:
        _send(signal.SIGKILL, list(self._alive))


def gpu_of(rank: int, gpus: Sequence[str]) -> list[str]:
    """Return the arguments that select a rank's GPU of `gpus`, or [] without any."""
    return ["--gpus", gpus[rank % len(gpus)]] if gpus else []


def _write(line: Mapping[str, object]) -> None:
    print(json.dumps(line), file=sys.stderr, flush=True)


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _become(module: str, arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    refuse_or_begin_anew()
    leave_when_asked_to()
    end_with_the_supervisor()
    parser = argparse.ArgumentParser(
        prog="python -m rlhfspec.worker.ranks", description="Run one worker as a set of ranks.", allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    parser.add_argument("--ranks-per-node", type=int, required=True, metavar="G")
    parser.add_argument("--node", type=int, metavar="I", help="run only this node, from 0 (default: all nodes, here)")
    parser.add_argument("--leader", metavar="HOST:PORT", help="address of rank 0")
    parser.add_argument("--gpus", default="", metavar="LIST", help="one for each rank, in order")
    parser.add_argument("-m", dest="module", required=True, metavar="MODULE", help="what each rank runs")
    parser.add_argument("--secret", type=Path, metavar="FILE", help="secret that the ranks of all nodes share")
    told, arguments = parser.parse_known_args()
    if len({each is None for each in (told.node, told.leader, told.secret)}) > 1:
        parser.error("--node, --leader and --secret must be given together")
    secret = secrets.token_hex(32) if told.secret is None else told.secret.read_text().strip()
    ranks = RankSet(nodes=told.nodes, ranks_per_node=told.ranks_per_node, node=told.node)
    gpus = [gpu for gpu in told.gpus.split(",") if gpu]
    ranks.start(told.module, arguments, gpus, told.leader or f"127.0.0.1:{_free_port()}", secret)
    sys.exit(ranks.wait())


if __name__ == "__main__":
    main()

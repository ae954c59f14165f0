"""Learner across ranks: rank 0 leads, and the others execute its commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhfspec.common.ranks.group import STOP, Ranks
from rlhfspec.errors import StorageError
from rlhfspec.training.checkpoint.folders import Writes, verify
from rlhfspec.training.checkpoint.shares import LEARNER, Written, write_part
from rlhfspec.training.learning.learner import Learner, LearnReport
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling.stored import Piece, StoredTensor
from rlhfspec.training.weights.group.shares import Told

_STORED = "stored tensor"

# Sends one rank's share of the policy and returns its digests, or raises RuntimeError.
Send = Callable[[Told, dict[str, Tensor], int], list[str]]


class Command(StrEnum):
    LEARN = auto()
    POLICY_STATE = auto()
    CRITIC_STATE = auto()
    LOAD_STATE = auto()
    WRITE = auto()
    VERIFY = auto()
    SEND = auto()


class Leader:
    """Rank 0's wrapper of its learner, which runs each method on all ranks."""

    def __init__(self, learner: Learner, ranks: Ranks) -> None:
        self._learner = learner
        self._ranks = ranks

    def learn(self, rollouts: Rollouts) -> LearnReport:
        self._ranks.command(Command.LEARN, rollouts=rollouts.fields())
        return self._learner.learn(rollouts)

    def policy_state(self) -> dict[str, Tensor]:
        self._ranks.command(Command.POLICY_STATE)
        return self._learner.policy_state()

    def critic_state(self) -> dict[str, Tensor]:
        self._ranks.command(Command.CRITIC_STATE)
        return self._learner.critic_state()

    def state(self) -> dict[str, Any] | Writes:
        """Return the state if there is one rank, else a function that writes all ranks' states to a folder."""
        return self._learner.state() if self._ranks.num_ranks == 1 else self._write

    def _write(self, folder: Path) -> list[Written]:
        self._ranks.command(Command.WRITE, folder=str(folder))
        return _written(self._learner, self._ranks, folder)

    def send(self, send: Send, told: Told) -> list[list[str]]:
        """Call `send` with parameters `told` on all ranks. Return digests by rank; raise RuntimeError on failure."""
        self._ranks.command(Command.SEND, told=told.fields())
        return _sent(self._learner, self._ranks, send, told)

    @property
    def num_sharing(self) -> int:
        """Return the number of sending ranks, which is 1 if rank 0 sends everything."""
        shared = any(isinstance(tensor, DTensor) for tensor in self._learner.own_policy().values())
        return self._ranks.num_ranks if shared else 1

    def load_state(self, state: dict[str, Any]) -> None:
        self._ranks.command(Command.LOAD_STATE, state=_told(state))
        self._learner.load_state(state)

    def verify(self, folder: Path) -> None:
        self._ranks.command(Command.VERIFY, folder=str(folder))
        _verified(self._ranks, folder)

    def close(self) -> None:
        self._ranks.command(STOP)

    @property
    def version(self) -> int:
        return self._learner.version


def follow(learner: Learner, ranks: Ranks, send: Send | None = None) -> None:
    """Execute rank 0's commands until it stops, or raise StageStalled if none arrive."""

    def write(folder: str) -> None:  # rank 0 raises a rank's failure
        with suppress(StorageError):
            _written(learner, ranks, Path(folder))

    def look_at(folder: str) -> None:
        with suppress(StorageError):
            _verified(ranks, Path(folder))

    def send_own(told: dict[str, Any]) -> None:
        assert send is not None, "rank 0 has weights sent"
        with suppress(RuntimeError):
            _sent(learner, ranks, send, Told.of(told))

    table: dict[str, Callable[..., Any]] = {
        Command.LEARN: lambda rollouts: learner.learn(Rollouts(**rollouts)),
        Command.POLICY_STATE: lambda: learner.policy_state(),
        Command.CRITIC_STATE: lambda: learner.critic_state(),
        Command.LOAD_STATE: lambda state: learner.load_state(_restored(state)),
        Command.WRITE: write,
        Command.VERIFY: look_at,
        Command.SEND: send_own,
    }
    ranks.obey(table, stage="trainer")


def _written(learner: Learner, ranks: Ranks, folder: Path) -> list[Written]:
    def write() -> Any:
        written = write_part(folder, LEARNER, learner.state(), ranks=ranks, leads=learner.leads)
        return json.dumps(written.document), written.files  # as text, since `gather` would decode its $tensor keys

    told = _of_each(ranks, folder, write)
    return [Written(document=json.loads(document), files=files) for document, files in told]


def _verified(ranks: Ranks, folder: Path) -> None:
    _of_each(ranks, folder, lambda: verify(folder, ranks))


def _of_each(ranks: Ranks, folder: Path, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on all ranks and return the results; raise StorageError on all if one fails."""
    found, problem = None, ""
    try:
        found = work()
    except (OSError, StorageError) as error:
        why = error.problem if isinstance(error, StorageError) and error.place == str(folder) else str(error)
        problem = f"rank {ranks.rank}: {why}" if ranks.num_ranks > 1 else why
    told = ranks.gather([found, problem])
    for _, why in told:
        if why:
            raise StorageError(folder, why)
    return [each for each, _ in told]


def _sent(learner: Learner, ranks: Ranks, send: Send, told: Told) -> list[list[str]]:
    digests: list[str] = []
    problem = ""
    try:
        digests = send(told, learner.own_policy(), ranks.rank)
    except RuntimeError as error:
        problem = f"rank {ranks.rank}: {error}"
    found = ranks.gather([digests, problem])
    for _, why in found:
        if why:
            raise RuntimeError(why)
    return [each for each, _ in found]


def _told(state: Any) -> Any:
    if isinstance(state, StoredTensor):
        pieces = [[str(piece.path), piece.start, piece.shape] for piece in state.pieces]
        return {_STORED: [state.name, state.shape, pieces]}
    return {name: _told(each) for name, each in state.items()} if isinstance(state, dict) else state


def _restored(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    if _STORED in told:
        name, shape, pieces = told[_STORED]
        found = tuple(Piece(path=Path(path), start=start, shape=shape) for path, start, shape in pieces)
        return StoredTensor(name=name, shape=shape, pieces=found)
    return {name: _restored(each) for name, each in told.items()}

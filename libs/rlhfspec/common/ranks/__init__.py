"""Rank and secret of this process, read from torchrun's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfspec.errors import InvalidRequest

SECRET = "RLHFSPEC_RANKS_SECRET"  # authenticates ranks to each other
SECRET_FILE = "ranks.secret"  # among the credentials of a trainer of several nodes
# Variables by which ranks find and authenticate each other.
VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", SECRET)


@dataclass(frozen=True, slots=True)
class RankTold:
    rank: int
    num_ranks: int
    leader: str
    secret: bytes = field(default=b"", repr=False)


def rank_told(environment: Mapping[str, str]) -> RankTold:
    """Return the environment's rank, or raise InvalidRequest for a wrong or missing variable."""
    rank, num_ranks = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if not 0 <= rank < num_ranks:
        problem = f"the environment variable must be below WORLD_SIZE ({num_ranks}); unset both without torchrun"
        raise InvalidRequest("RANK", environment.get("RANK"), problem)
    if num_ranks == 1:
        return RankTold(0, 1, "")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise InvalidRequest(
                name, environment.get(name), f"must be set together with WORLD_SIZE ({num_ranks}), as torchrun does"
            )
    if not environment.get(SECRET):
        problem = f"must be set together with WORLD_SIZE ({num_ranks}): random text that only this run's ranks share"
        raise InvalidRequest(SECRET, None, problem)
    leader = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return RankTold(rank, num_ranks, leader, environment[SECRET].encode())


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Return this rank's number on its machine, or None for a single rank."""
    told = rank_told(environment)
    return _number(environment, "LOCAL_RANK", told.rank) if told.num_ranks > 1 else None


def set_of_ranks(ranks_per_node: int, *, nodes: int = 1) -> list[str]:
    """Return the Python arguments that start a worker as several ranks per node."""
    return ["-m", "rlhfspec.worker.ranks", "--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(name, text, "the environment variable must be a whole number") from None

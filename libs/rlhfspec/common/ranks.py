"""Which of several ranks this process is, as torchrun tells it by the environment.

Example:
    >>> rank_told({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    RankTold(rank=1, num_ranks=2, leader='10.0.0.1:29500')
    >>> rank_told({"RANK": ""})
    RankTold(rank=0, num_ranks=1, leader='')
    >>> rank_told({"RANK": "abc", "WORLD_SIZE": "2"})
    Traceback (most recent call last):
        ...
    rlhfspec.errors.InvalidRequest: RANK: in the environment, must be a whole number (got 'abc')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest

# All that torchrun sets for its processes to find each other by.
VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankTold:
    rank: int
    num_ranks: int
    leader: str  # where rank 0 is; empty: there is no other


def rank_told(environment: Mapping[str, str]) -> RankTold:
    """InvalidRequest names the variable that cannot be."""
    rank, num_ranks = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if not 0 <= rank < num_ranks:
        problem = f"in the environment, must be below WORLD_SIZE ({num_ranks}); torchrun sets both, others unset it"
        raise InvalidRequest("RANK", environment.get("RANK"), problem)
    if num_ranks == 1:
        return RankTold(0, 1, "")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise InvalidRequest(
                name, environment.get(name), f"must be set beside WORLD_SIZE ({num_ranks}), as torchrun does"
            )
    return RankTold(rank, num_ranks, f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Which of this machine's ranks this is; None where there are no several.

    >>> local_rank({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
    1
    """
    told = rank_told(environment)
    return _number(environment, "LOCAL_RANK", told.rank) if told.num_ranks > 1 else None


def set_of_ranks(ranks_per_node: int, *, nodes: int = 1) -> list[str]:
    """Arguments of python that come before those of a worker, to start it as several ranks (`worker.ranks`).

    >>> [*set_of_ranks(2), "-m", "rlhfspec.trainer"]
    ['-m', 'rlhfspec.worker.ranks', '--nodes', '1', '--ranks-per-node', '2', '-m', 'rlhfspec.trainer']
    """
    return ["-m", "rlhfspec.worker.ranks", "--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(name, text, "in the environment, must be a whole number") from None

"""Actor beside critic: once a step's targets are known, what ppo trains are two chains that need nothing of each other.

A chain is all updates of one model in a step, over epochs and mini-batches. Where they run (`training.fuse`):

    InTurn     one after the other, mini-batch by mini-batch
    InThreads  at the same time in one process, the critic's in a thread of its own, each with half of the threads
    OnRanks    rank 0 trains the policy, rank 1 the critic; each holds one model, whole

Bits are the same in all three at the same number of threads a chain. Where the chains run at the same time they meet
before every optimizer step, so that a number that is not finite keeps both models from making it.

Example:
    >>> made = []
    >>> def chain(name: str, own: str | None = None) -> Chain:
    ...     def updates(meet: Meet) -> Iterator[None]:
    ...         for update in (1, 2):
    ...             if (problem := meet(own)) is not None:
    ...                 raise ValueError(problem)
    ...             made.append((name, update))
    ...             yield
    ...     return updates
    >>> InTurn(num_threads=2).run({"policy": chain("policy"), "critic": chain("critic")})
    >>> made
    [('policy', 1), ('critic', 1), ('policy', 2), ('critic', 2)]
    >>> made.clear()
    >>> InThreads(num_threads=2).run({"policy": chain("policy"), "critic": chain("critic", own="not finite")})
    Traceback (most recent call last):
        ...
    ValueError: not finite
    >>> made
    []
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Protocol, TypeVar

import torch

from rlhfspec import job
from rlhfspec.messages.loop import scoring_stages
from rlhfspec.training.learning.distributed import Ranks

T = TypeVar("T")
Meet = Callable[[str | None], str | None]  # what this chain found wrong -> what is wrong in any of them
Chain = Callable[[Meet], Iterator[None]]  # an update a turn
_MODELS = ("policy", "critic")


class Chains(Protocol):
    """Where the chains of a step run."""

    @property
    def models(self) -> tuple[str, ...]:
        """Those that this process trains."""
        ...

    @property
    def ranks(self) -> Ranks:
        """Who shares the weights of a model, and its micro-batches."""
        ...

    @property
    def num_threads(self) -> int:
        """Of each chain, and of everything before the chains that they depend on."""
        ...

    def run(self, chains: Mapping[str, Chain]) -> None:
        """All updates of the models of this process. The first error of any chain ends all of them."""
        ...

    def told_by(self, model: str, thing: T) -> T:
        """What the process that trains `model` has; all have to ask, with their own."""
        ...


@dataclass(frozen=True, kw_only=True)
class InTurn:
    """The slow twin, and the only way where nothing can be gained: one model, one thread, one GPU."""

    num_threads: int
    models: tuple[str, ...] = _MODELS
    ranks: Ranks = field(default_factory=Ranks)

    def run(self, chains: Mapping[str, Chain]) -> None:
        for _ in itertools.zip_longest(*(chain(lambda problem: problem) for chain in chains.values())):
            pass

    def told_by(self, model: str, thing: T) -> T:
        return thing


class InThreads:
    """Of an odd number of threads one is left over."""

    models = _MODELS
    ranks = Ranks()

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads // len(_MODELS)

    def run(self, chains: Mapping[str, Chain]) -> None:
        meeting = Meeting()
        with ThreadPool(1) as beside:
            critic = beside.apply_async(self._run, (chains["critic"], meeting, "critic"))
            try:
                self._run(chains["policy"], meeting, "policy")
            except OtherEnded:
                pass  # the critic's chain ended, and says why below
            finally:
                critic.wait()
            critic.get()

    def _run(self, chain: Chain, meeting: Meeting, model: str) -> None:
        torch.set_num_threads(self.num_threads)  # threads of a process do not inherit it from each other
        with meeting.attended():
            for _ in chain(partial(meeting.problem, model)):
                pass

    def told_by(self, model: str, thing: T) -> T:
        return thing


class OnRanks:
    """No gradient and no weight is exchanged while a step is trained."""

    ranks = Ranks()  # each model has one to itself

    def __init__(self, both: Ranks, num_threads: int) -> None:
        self.models = (_MODELS[both.rank],)
        self.num_threads = num_threads
        self._both = both

    def run(self, chains: Mapping[str, Chain]) -> None:
        (chain,) = chains.values()
        for _ in chain(self._problem):
            pass

    def _problem(self, own: str | None) -> str | None:
        return first(self._both.gathered(own))

    def told_by(self, model: str, thing: T) -> T:
        return self._both.told_by(_MODELS.index(model), thing)


def chains_of(spec: job.Spec, ranks: Ranks, num_threads: int, device: torch.device) -> Chains:
    """Fused where that pays. The chains would only take turns on one thread, and on one GPU, whose kernels fill it."""
    critic = "critic" in scoring_stages(spec.algorithm)
    if critic and spec.training.fuse == "auto":
        if ranks.num_ranks == len(_MODELS) and ranks.tensor is None:
            return OnRanks(ranks, num_threads)
        if ranks.num_ranks == 1 and num_threads >= len(_MODELS) and device.type == "cpu":
            return InThreads(num_threads)
    return InTurn(num_threads=num_threads, models=_MODELS if critic else _MODELS[:1], ranks=ranks)


class OtherEnded(RuntimeError):
    """The other chain ended with an error of its own, which is the one to be told."""


class Meeting:
    """Where two chains tell each other before every update what they found wrong; nobody waits for one that is gone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._said: dict[str, list[str | None]] = {model: [] for model in _MODELS}
        self._is_left = False

    def problem(self, model: str, own: str | None) -> str | None:
        """Of either at this update. What both have said both hear, also when the other has left since."""
        with self._changed:
            self._said[model].append(own)
            update = len(self._said[model])
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_left or self._have_said(update))
            if not self._have_said(update):
                raise OtherEnded
            return first([said[update - 1] for said in self._said.values()])

    def _have_said(self, update: int) -> bool:
        return all(len(said) >= update for said in self._said.values())

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Whoever leaves lets the other one go."""
        try:
            yield
        finally:
            with self._changed:
                self._is_left = True
                self._changed.notify_all()


def first(problems: Sequence[str | None]) -> str | None:
    """The first that is one.

    >>> first([None, "values of sample 3 are not finite"])
    'values of sample 3 are not finite'
    """
    return next((problem for problem in problems if problem is not None), None)

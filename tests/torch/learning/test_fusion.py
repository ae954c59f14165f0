"""Actor and critic on separate ranks train as one rank does; a NaN on one stops both."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from learners import learner as new_learner, rollouts, spec

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import NumericalError
from rlhfspec.training.learning.learner import Learner, LearnReport, share_of
from rlhfspec.training.modeling.digest import digest


@dataclass
class Meeting:
    said: list[Any] = field(default_factory=lambda: [None, None])
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInThread(Ranks):
    meeting: Meeting
    num_ranks: int = 2

    def gather(self, value: Any) -> list[Any]:
        self.meeting.said[self.rank] = value
        self.meeting.barrier.wait()
        told = list(self.meeting.said)
        self.meeting.barrier.wait()
        return told

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        one, other = self.gather(tensor)
        return one + other  # type: ignore[no-any-return]

    def broadcast(self, value: Any = None, *, source: int = 0) -> Any:
        return self.gather(value)[source]


class Apart:
    def __init__(self, **options: Any) -> None:
        meeting = Meeting()
        self.ranks = [learner("auto", ranks=RankInThread(rank=rank, meeting=meeting), **options) for rank in (0, 1)]

    def on_both(self, name: str, *arguments: Any) -> list[Any]:
        """Return a method's results on both; raise rank 0's error if both fail."""
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(getattr(rank, name), *arguments) for rank in self.ranks]
            return [each.result() for each in asked]

    def learn(self, step: Any) -> LearnReport:
        ours, theirs = self.on_both("learn", step)
        assert ours.metrics == theirs.metrics
        return ours  # type: ignore[no-any-return]

    def digests(self) -> tuple[str, str]:
        [of_critic, again] = self.on_both("critic_state")
        assert digest(of_critic) == digest(again)
        return digest(self.ranks[0].policy_state()), digest(of_critic)

    @property
    def num_updates(self) -> list[dict[str, int]]:
        return [{model: each.num_updates for model, each in rank._networks.items()} for rank in self.ranks]


def learner(fuse: str, *, ranks: Ranks | None = None, **settings: Any) -> Learner:
    return new_learner(spec("ppo", fuse=fuse, **settings), ranks=ranks)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("more", [{}, {"model": {"lora": {"rank": 2, "dropout": 0.2}}}, {"exactOnPolicy": True}])
@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_fused_training_has_the_bits_of_serial_training(epochs: int, mini_batches: int, more: dict[str, Any]) -> None:
    settings = {"epochs": epochs, "miniBatches": mini_batches, "tokensPerMicroBatch": 40} | more
    apart, serial = Apart(**settings), learner("off", **settings)
    begun = apart.digests()
    for seed in range(2):
        ours, theirs = apart.learn(rollouts(seed)), serial.learn(rollouts(seed))
        assert ours.metrics == theirs.metrics
        assert list(ours.metrics) == list(theirs.metrics)
        assert torch.equal(ours.log_probs, theirs.log_probs)
        assert apart.digests() == (digest(serial.policy_state()), digest(serial.critic_state()))
    assert all(one != other for one, other in zip(begun, apart.digests(), strict=True))


@pytest.mark.parametrize(
    ("name", "fuse", "num_ranks", "models"),
    [
        ("ppo", "auto", 1, ("policy", "critic")),
        ("grpo", "auto", 1, ("policy",)),
        ("ppo", "auto", 2, ("critic",)),
        ("ppo", "off", 2, ("policy", "critic")),
        ("grpo", "auto", 2, ("policy",)),
        ("ppo", "auto", 3, ("policy", "critic")),
    ],
)
def test_share_of_gives_each_rank_its_models(name: str, fuse: str, num_ranks: int, models: tuple[str, ...]) -> None:
    ranks = Ranks(rank=num_ranks - 1, num_ranks=num_ranks)
    assert share_of(spec(name, fuse=fuse), ranks) == (models, Ranks() if models == ("critic",) else ranks)


def with_a_rare_token() -> Any:
    step = rollouts()
    step.token_ids[step.token_ids == 96] = 95
    step.token_ids[int(step.lengths[:5].sum())] = 96
    return step


def spoil(trained: Learner, model: str) -> None:
    if model in trained._networks:
        module: Any = trained._policy.model if model == "policy" else trained._networks["critic"].module.trunk
        with torch.no_grad():
            module.embed_tokens.weight[96] = math.inf


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize(("model", "what"), [("policy", "log-probs"), ("critic", "values")])
def test_a_value_that_is_not_finite_names_its_sample(model: str, what: str, mini_batches: int) -> None:
    trained = learner("off", miniBatches=mini_batches, tokensPerMicroBatch=30)
    trained.learn(rollouts())
    spoil(trained, model)
    state = trained.policy_state if model == "policy" else trained.critic_state
    before = digest(state())
    with pytest.raises(NumericalError, match=rf"step 2: {model}: {what} of sample j/1/1/1 are not finite; nothing"):
        trained.learn(with_a_rare_token())
    assert trained.version == 1
    assert mini_batches > 1 or digest(state()) == before


@pytest.mark.parametrize(("model", "what"), [("policy", "log-probs"), ("critic", "values")])
def test_an_error_on_one_rank_leaves_both_models_unchanged(model: str, what: str) -> None:
    apart, untroubled = Apart(), Apart()
    for rank in (*apart.ranks, *untroubled.ranks):
        spoil(rank, model)
    begun = apart.digests()
    with pytest.raises(NumericalError, match=rf"step 1: {model}: {what} of sample j/1/1/1"):
        apart.learn(with_a_rare_token())
    assert apart.digests() == begun
    step = rollouts()
    step.token_ids[step.token_ids == 96] = 95
    assert apart.learn(step).metrics == untroubled.learn(step).metrics, "no gradient is left of it"
    assert apart.digests() == untroubled.digests()


def test_both_ranks_stay_at_the_last_update_that_was_good_on_both() -> None:
    """The second mini-batch has the NaN; alone, the policy would have made both updates first."""
    apart = Apart(miniBatches=2)
    spoil(apart.ranks[1], "critic")
    with pytest.raises(NumericalError, match=r"critic: values of sample j/1/1/1"):
        apart.learn(with_a_rare_token())
    assert apart.num_updates == [{"policy": 1}, {"critic": 1}]

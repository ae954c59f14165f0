"""Actor beside critic trains what one after the other does, bit for bit, and neither moves where one found a NaN."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from learners import critic, policy, rollouts, spec

from rlhfspec.errors import NumericalError
from rlhfspec.training.learning.distributed import Ranks
from rlhfspec.training.learning.fusion import Chain, InThreads, InTurn, Meet, Meeting, OnRanks, chains_of
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling import lora
from rlhfspec.training.modeling.digest import digest

CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds for an event that is sure to come


def learner(fuse: str, *, model: Any = None, **training: Any) -> Learner:
    """Both with one thread a chain."""
    settings = spec("ppo", model=model, fuse=fuse, **training)
    trained = policy()
    if settings.model.lora is not None:
        lora.add_lora(trained, settings.model.lora, seed=0)
    return Learner(settings, trained, critic(), num_threads=2 if fuse == "auto" else 1)


def digests(trained: Learner) -> tuple[str, str]:
    return digest(trained.policy_state()), digest(trained.critic_state())


# -- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"model": {"lora": {"rank": 2, "dropout": 0.2}}}, {"exactOnPolicy": True}])
@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_bits_are_those_of_one_after_the_other(epochs: int, mini_batches: int, more: dict[str, Any]) -> None:
    settings = {"epochs": epochs, "miniBatches": mini_batches, "tokensPerMicroBatch": 40} | more
    fused, serial = (learner(fuse, **settings) for fuse in ("auto", "off"))
    assert (type(fused._chains), type(serial._chains)) == (InThreads, InTurn)
    begun = digests(fused)
    for seed in range(2):
        ours, theirs = fused.learn(rollouts(seed)), serial.learn(rollouts(seed))
        assert ours.metrics == theirs.metrics
        assert torch.equal(ours.log_probs, theirs.log_probs)
        assert digests(fused) == digests(serial)
    assert all(one != other for one, other in zip(begun, digests(fused), strict=True))


def test_a_fused_run_goes_on_from_a_serial_one() -> None:
    fused, serial, other = learner("auto"), learner("off"), learner("auto")
    for each in (fused, serial):
        each.learn(rollouts(0))
    other.load_state(serial.state())
    assert fused.learn(rollouts(1)).metrics == other.learn(rollouts(1)).metrics
    assert digests(fused) == digests(other)


def test_each_chain_has_half_of_the_threads_and_nobody_else_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, tuple[int, int]] = {}
    step = Learner._step

    def noted(self: Learner, model: str, *arguments: Any) -> None:
        found[model] = threading.get_ident(), torch.get_num_threads()
        step(self, model, *arguments)

    monkeypatch.setattr(Learner, "_step", noted)
    before = torch.get_num_threads()
    try:
        Learner(spec("ppo", fuse="auto"), policy(), critic(), num_threads=7).learn(rollouts())
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
    assert found["policy"] == (threading.get_ident(), 3)
    assert found["critic"] != (threading.get_ident(), 3)
    assert found["critic"][1] == 3


def test_both_are_at_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {model: threading.Event() for model in ("policy", "critic")}
    terms = {"policy": Learner._policy_terms, "critic": Learner._critic_terms}

    def together(model: str, other: str) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            begun[model].set()
            assert begun[other].wait(PATIENCE), f"the {other} waits for the {model}"
            return terms[model](*arguments)

        return noted

    monkeypatch.setattr(Learner, "_policy_terms", together("policy", "critic"))
    monkeypatch.setattr(Learner, "_critic_terms", together("critic", "policy"))
    learner("auto").learn(rollouts())


# -- where they run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fuse", "num_ranks", "num_threads", "device", "expected"),
    [
        ("ppo", "auto", 1, 2, "cpu", InThreads),
        ("ppo", "auto", 1, 1, "cpu", InTurn),  # they would only take turns
        ("ppo", "auto", 1, 2, "cuda", InTurn),
        ("ppo", "off", 1, 2, "cpu", InTurn),
        ("grpo", "auto", 1, 2, "cpu", InTurn),
        ("ppo", "auto", 2, 1, "cpu", OnRanks),
        ("ppo", "off", 2, 1, "cpu", InTurn),
        ("grpo", "auto", 2, 1, "cpu", InTurn),
        ("ppo", "auto", 3, 1, "cpu", InTurn),
    ],
)
def test_fused_where_that_pays(
    name: str, fuse: str, num_ranks: int, num_threads: int, device: str, expected: type
) -> None:
    ranks = Ranks(rank=num_ranks - 1, num_ranks=num_ranks)
    chains = chains_of(spec(name, fuse=fuse), ranks, num_threads, torch.device(device))
    assert type(chains) is expected
    assert chains.ranks == (Ranks() if expected is OnRanks else ranks)
    assert chains.num_threads == (1 if expected is InThreads else num_threads)
    assert chains.models == {OnRanks: ("critic",)}.get(expected, ("policy", "critic") if name == "ppo" else ("policy",))


# -- what is not finite ---------------------------------------------------------------------------------------------


def with_a_rare_token() -> Any:
    """Token 96 is run in sample 5 alone."""
    step = rollouts()
    step.token_ids[step.token_ids == 96] = 95
    step.token_ids[int(step.lengths[:5].sum())] = 96
    return step


def embeddings_of(trained: Learner, model: str) -> torch.Tensor:
    module: Any = trained._policy.model if model == "policy" else trained._networks["critic"].module.trunk
    return module.embed_tokens.weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuse", ["auto", "off"])
@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize(("model", "what"), [("policy", "log-probs"), ("critic", "values")])
def test_what_is_not_finite_names_the_sample(model: str, what: str, mini_batches: int, fuse: str) -> None:
    trained = learner(fuse, miniBatches=mini_batches)
    with torch.no_grad():
        embeddings_of(trained, model)[96] = math.inf
    with pytest.raises(NumericalError, match=rf"step 1: {model}: {what} of sample j/1/1/1 are not finite; nothing"):
        trained.learn(with_a_rare_token())
    assert trained.version == 0


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_where_one_is_not_finite_neither_moves(model: str) -> None:
    trained = learner("auto")
    with torch.no_grad():
        embeddings_of(trained, model)[96] = math.inf
    begun = digests(trained)
    with pytest.raises(NumericalError, match=rf"step 1: {model}:"):
        trained.learn(with_a_rare_token())
    assert digests(trained) == begun
    untroubled = learner("auto")
    with torch.no_grad():
        embeddings_of(untroubled, model)[96] = math.inf
    step = rollouts()
    step.token_ids[step.token_ids == 96] = 95
    assert trained.learn(step).metrics == untroubled.learn(step).metrics, "no gradient is left of it"
    assert digests(trained) == digests(untroubled)


def test_both_stay_at_the_last_update_that_was_good_in_both() -> None:
    """The second of two mini-batches has the number; alone, the policy had made both updates before it is seen."""
    trained = learner("auto", miniBatches=2)
    with torch.no_grad():
        embeddings_of(trained, "critic")[96] = math.inf
    with pytest.raises(NumericalError, match=r"critic: values of sample j/1/1/1"):
        trained.learn(with_a_rare_token())
    assert {model: network.num_updates for model, network in trained._networks.items()} == {"policy": 1, "critic": 1}


# -- a chain that ends otherwise ------------------------------------------------------------------------------------


def chain(updates: int, made: list[int], error: Exception | None = None) -> Chain:
    def turns(meet: Meet) -> Iterator[None]:
        for update in range(updates):
            if error is not None and update == 1:
                raise error
            assert meet(None) is None
            made.append(update)
            yield

    return turns


@pytest.mark.parametrize("failing", ["policy", "critic"])
def test_an_error_of_one_ends_both(failing: str) -> None:
    made: dict[str, list[int]] = {"policy": [], "critic": []}
    chains = {model: chain(3, made[model], MemoryError("no room") if model == failing else None) for model in made}
    with pytest.raises(MemoryError, match="no room"):
        InThreads(2).run(chains)
    assert made[failing] == [0]
    assert max(map(len, made.values())) == 1


def test_ten_thousand_updates_meet() -> None:
    made: dict[str, list[int]] = {"policy": [], "critic": []}
    InThreads(2).run({model: chain(10_000, made[model]) for model in made})
    assert made["policy"] == made["critic"] == list(range(10_000))


def test_what_both_have_said_both_hear_though_one_has_left_since() -> None:
    """Else the one that was slower to look would keep the gradients of what was not finite."""
    heard: list[str | None] = []

    def slower(meeting: Meeting) -> None:
        with meeting.attended():
            heard.append(meeting.problem("critic", None))

    for _ in range(300):
        thread = threading.Thread(target=slower, args=(meeting := Meeting(),))
        thread.start()
        with pytest.raises(NumericalError), meeting.attended():
            raise NumericalError(str(meeting.problem("policy", "not finite")))
        thread.join(PATIENCE)
    assert heard == ["not finite"] * 300

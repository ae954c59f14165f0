"""A learning step is exact under any packing, resumable to the bit, and never trains on NaN."""

import io
import math
from typing import Any

import pytest
import torch
from learners import ALGORITHMS, learner, policy, rollouts, same_weights, spec

from rlhfspec import job
from rlhfspec.errors import InvalidRequest, NumericalError, StorageError
from rlhfspec.tiny import random_model
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.learning.network import Network
from rlhfspec.training.learning.optim import make_optimizer, make_schedule
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.packed import pack_sequences


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    """With plain SGD an update is the gradient itself."""
    plain = {"optimizer": {"name": "SGD", "learningRate": 0.01}, "criticOptimizer": {"name": "SGD"}}
    whole, parts = (learner(spec(name, tokensPerMicroBatch=size, **plain)) for size in (4096, 30))
    first, second = whole.learn(rollouts()), parts.learn(rollouts())
    same_weights(whole.policy_state(), parts.policy_state(), 1e-6)
    assert first.metrics.keys() == second.metrics.keys()
    for key, value in first.metrics.items():
        assert math.isclose(value, second.metrics[key], rel_tol=1e-4, abs_tol=2e-5), key
    if name == "ppo":
        same_weights(whole.critic_state(), parts.critic_state(), 1e-6)


def test_the_first_gradient_is_written_out_by_hand() -> None:
    """For GRPO without clip or KL it is minus the mean over samples of the mean advantage-weighted log-prob."""
    settings = spec(algorithm={"klCoefficient": 0.0}, optimizer={"name": "SGD", "learningRate": 1.0}, maxGradNorm=1e9)
    step, trained, by_hand = rollouts(), learner(settings), policy()
    trained.learn(step)
    loss = torch.tensor(0.0)
    for group in step.rewards.split(4):
        advantages = (group - group.mean()) / (group.std() + 1e-4)
        for advantage in advantages:
            sample = int((step.rewards == group[advantages == advantage]).nonzero())
            start = int(step.lengths[:sample].sum())
            response = step.token_ids[start : start + int(step.lengths[sample])]
            row = torch.tensor([[*step.prompt_token_ids[sample], *response.tolist()]])
            by_hand.set_attn_implementation("eager")
            log_probs = (by_hand(row, use_cache=False).logits[0, :-1] / 0.9).log_softmax(-1)
            chosen = log_probs[-len(response) :].gather(1, response[:, None])
            loss = loss - float(advantage) * chosen.mean() / 8
    loss.backward()
    state = {name: tensor.cpu() for name, tensor in trained.policy_state().items()}
    for name, parameter in by_hand.named_parameters():
        moved = parameter.detach() - parameter.grad
        assert (state[name] - moved).abs().max() < 1e-5 * max(1.0, float(parameter.grad.abs().max())), name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_several_updates_a_step_are_reproducible(name: str) -> None:
    settings = spec(name, epochs=2, miniBatches=2)
    first, second = learner(settings), learner(settings)
    reports = [each.learn(rollouts()) for each in (first, second)]
    assert reports[0].metrics == reports[1].metrics
    assert all(type(value) is float and math.isfinite(value) for value in reports[0].metrics.values())
    assert digest(first.policy_state()) == digest(second.policy_state()) != digest(policy().state_dict())


def test_one_update_needs_no_second_forward_and_several_do() -> None:
    forwards: list[bool] = []
    for updates in (1, 2):
        trained = learner(spec(miniBatches=updates))
        trained._policy.base_model.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
        trained.learn(rollouts())
    assert forwards == [True, False, False, True, True]


def test_old_log_probs_are_from_before_the_first_update() -> None:
    report = learner(spec(epochs=3)).learn(rollouts())
    assert torch.allclose(report.log_probs, rollouts().generator_log_probs, atol=1e-5)
    assert report.metrics["log_prob_difference_max"] < 1e-5
    assert report.metrics["approximate_kl"] > 1e-4  # the later epochs have moved


@pytest.mark.parametrize("updates", [{"miniBatches": 2}, {"epochs": 3}])
def test_kl_and_entropy_are_of_the_policy_that_sampled(updates: dict[str, int]) -> None:
    """The number of updates within the step does not change them."""
    one, several = (learner(spec(algorithm={"klEstimator": "k1"}, **more)).learn(rollouts()) for more in ({}, updates))
    step = rollouts()
    k1 = float((step.generator_log_probs - step.reference_log_probs).double().mean())
    for report in (one, several):
        assert math.isclose(report.metrics["kl_k1"], k1, abs_tol=1e-6)
        assert report.metrics["kl_k3"] > 0
    assert math.isclose(one.metrics["entropy"], several.metrics["entropy"], rel_tol=1e-6)
    assert several.metrics["approximate_kl"] > 1e-4, "it has moved"


def test_the_difference_to_the_generator_is_reported() -> None:
    step = rollouts()
    step.log_probs[3] += 0.25
    metrics = learner(spec()).learn(step).metrics
    assert math.isclose(metrics["log_prob_difference_max"], 0.25, abs_tol=1e-4)
    assert math.isclose(metrics["log_prob_difference_mean"], 0.25 / step.num_tokens, abs_tol=1e-5)


def test_staleness_counts_versions() -> None:
    trained = learner(spec(algorithm={"importanceCap": 2.0}))
    trained.learn(rollouts())
    assert trained.learn(rollouts(version=0)).metrics["staleness_max"] == 1.0


def test_autocast_trains_in_float32_weights() -> None:
    trained = learner(spec("ppo", autocast="bfloat16"))
    assert 1e-4 < trained.learn(rollouts()).metrics["log_prob_difference_max"] < 0.5
    assert {tensor.dtype for tensor in trained.policy_state().values()} == {torch.float32}


@pytest.mark.on_the_cpu("training.exactOnPolicy has the CPU's kernels")
def test_exact_on_policy_takes_the_engines_forward() -> None:
    assert learner(spec(exactOnPolicy=True)).learn(rollouts()).metrics["log_prob_difference_max"] < 1e-5
    with pytest.raises(InvalidRequest, match=r"training\.autocast"):
        learner(spec(exactOnPolicy=True, autocast="bfloat16"))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


RESUMES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {"epochs": 2, "miniBatches": 2, "schedule": {"name": "cosine", "warmupSteps": 2}}),
    ("grpo", {"optimizer": {"name": "SGD", "learningRate": 0.1, "arguments": {"momentum": 0.9}}}),
    ("grpo", {"schedule": {"name": "ExponentialLR", "arguments": {"gamma": 0.7}}}),
    ("gspo", {"schedule": {"name": "OneCycleLR", "arguments": {"max_lr": 0.01, "total_steps": 9}}}),
    ("rloo", {"optimizer": {"name": "torch.optim:Adafactor", "learningRate": 0.01}}),
    ("grpo", {"model": {"lora": {"rank": 2, "dropout": 0.2}}}),
]


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("stop_after", [0, 1, 2])
@pytest.mark.parametrize(("name", "settings"), RESUMES)
def test_a_resumed_run_is_the_run(name: str, settings: dict[str, Any], stop_after: int) -> None:
    steps = [rollouts(seed) for seed in range(3)]
    straight, stopped, resumed = (learner(spec(name, **settings)) for _ in range(3))
    reports = [straight.learn(step) for step in steps]
    for step in steps[:stop_after]:
        stopped.learn(step)
    resumed.learn(steps[2])  # whatever it did before is forgotten
    resumed.load_state(through_a_file(stopped.state()))
    assert resumed.version == stop_after
    later = [resumed.learn(step) for step in steps[stop_after:]]
    assert [report.metrics for report in later] == [report.metrics for report in reports[stop_after:]]
    assert digest(resumed.policy_state()) == digest(straight.policy_state())
    if name == "ppo":
        assert digest(resumed.critic_state()) == digest(straight.critic_state())


def test_a_state_of_another_model_is_refused() -> None:
    other = Learner(settings := spec(), prepared(random_model("gpt-neox", seed=1)), num_threads=1)
    with pytest.raises(StorageError, match="does not fit the job's model"):
        learner(settings).load_state(other.state())
    with pytest.raises(StorageError, match="critic"):
        learner(spec("ppo")).load_state(learner(settings).state())


def test_lora_keeps_the_update_in_the_state_and_merges_it_for_others() -> None:
    trained = learner(spec(model={"lora": {"rank": 2}}))
    trained.learn(rollouts())
    assert all("lora_" in name for name in trained.state()["policy"])
    merged = trained.policy_state()
    assert list(merged) == list(policy().state_dict())
    plain = policy()
    plain.load_state_dict(merged)
    packed = pack_sequences([(3, 4, 5)], [(8, 9, 10, 11)])
    ours = TorchForward(trained._policy, 1.0)(packed.to(trained._policy.device)).log_probs.cpu()
    assert (TorchForward(plain, 1.0)(packed).log_probs - ours).abs().max() < 1e-4


def test_tied_weights_are_there_once() -> None:
    trained = Learner(spec(), prepared(random_model("llama-tied", seed=1)), num_threads=1)
    assert "lm_head.weight" not in trained.policy_state()
    assert "model.embed_tokens.weight" in trained.policy_state()


def test_a_gradient_that_is_not_finite_names_its_sample_and_leaves_no_trace() -> None:
    trained = learner(spec("dr-grpo"))
    before = digest(trained.policy_state())
    step = rollouts()
    step.rewards[6] = 1e300  # finite, but not as a float32 advantage: of its group, the second
    with pytest.raises(NumericalError, match=r"step 1: policy: the gradient of sample j/1/1/0 is not finite"):
        trained.learn(step)
    assert trained.version == 0
    assert digest(trained.policy_state()) == before
    untroubled = learner(spec("dr-grpo"))
    for each in (trained, untroubled):
        each.learn(rollouts())
    assert digest(trained.policy_state()) == digest(untroubled.policy_state())


def rates(settings: dict[str, Any], num_updates: int) -> list[float]:
    sgd = make_optimizer([torch.nn.Parameter(torch.zeros(2))], job.Optimizer(name="SGD", learningRate=1.0), field="o")
    schedule = make_schedule(sgd, job.Schedule.model_validate(settings), num_updates=num_updates)
    found = []
    for _ in range(num_updates):
        found.append(float(schedule.get_last_lr()[0]))
        sgd.step()
        schedule.step()
    return found


def test_schedules_rise_and_fall() -> None:
    assert rates({"name": "constant"}, 3) == [1.0, 1.0, 1.0]
    assert rates({"name": "constant", "warmupSteps": 3}, 5) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates({"name": "linear", "warmupSteps": 1}, 5) == [0.5, 1.0, 0.75, 0.5, 0.25]
    assert rates({"name": "cosine"}, 2) == pytest.approx([1.0, 0.5])
    assert rates({"name": "StepLR", "arguments": {"step_size": 2, "gamma": 0.5}}, 4) == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "field", "problem"),
    [
        ({"optimizer": {"name": "AdamX"}}, "name", "did you mean Adam"),
        ({"optimizer": {"name": "Adamw"}}, "name", "did you mean AdamW"),
        ({"optimizer": {"name": "LBFGS"}}, "name", "several times"),
        ({"optimizer": {"name": "nowhere:Adam"}}, "name", "cannot import nowhere"),
        ({"optimizer": {"name": "json:JSONDecoder"}}, "name", "no Optimizer"),
        ({"optimizer": {"arguments": {"bettas": [0.9, 0.99]}}}, "arguments", "bettas"),
        ({"optimizer": {"arguments": {"weight_decay": -1.0}}}, "arguments", "weight_decay"),
        ({"optimizer": {"arguments": {"lr": 1.0}}}, "arguments", "learningRate"),
        ({"schedule": {"name": "cosin"}}, "name", "did you mean cosine"),
        ({"schedule": {"name": "ReduceLROnPlateau"}}, "name", "noisy"),
        ({"schedule": {"name": "linear", "arguments": {"a": 1}}}, "arguments", "takes none"),
        ({"schedule": {"name": "StepLR"}}, "arguments", "step_size"),
        ({"schedule": {"name": "StepLR", "warmupSteps": 2, "arguments": {"step_size": 2}}}, "warmupSteps", "warm up"),
    ],
)
def test_what_torch_refuses_is_named(settings: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        learner(spec(**settings))
    assert refused.value.field == f"spec.training.{next(iter(settings))}.{field}"


def test_an_optimizer_class_of_the_user_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import torch\nclass Halved(torch.optim.SGD): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trained = learner(spec(optimizer={"name": "mine:Halved", "learningRate": 0.1}))
    trained.learn(rollouts())
    assert digest(trained.policy_state()) != digest(policy().state_dict())


def test_gradients_are_clipped_to_the_norm() -> None:
    module = torch.nn.Linear(4, 1, bias=False)
    training = job.Training(optimizer=job.Optimizer(name="SGD", learningRate=1.0), maxGradNorm=0.5)
    network = Network(module, training.optimizer, training, field="training.optimizer")
    before = module.weight.detach().clone()
    (module.weight * 3.0).sum().backward()
    assert network.update(network.grad_norm()).grad_norm == 6.0
    assert math.isclose(float((module.weight.detach() - before).norm()), 0.5, rel_tol=1e-5)

"""Generator of learning_numbers.json: what TRL 1.16 and verl 0.9.1 compute on small random batches, in float64.
Run it in an environment with both: python tests/data/make_learning_numbers.py
"""

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
import verl
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig

MAX_TOKENS = 12
NO_DUAL_CLIP = 1e9  # verl clips the loss of negative advantages a second time; the papers here do not
GROUP_SIZES = ([2, 2], [3, 3, 3], [4, 4], [2, 3, 1 + 3])  # TRL wants equal ones; verl also sees the last
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")

Batch = dict[str, list[float]]
Case = dict[str, Any]


def make_batch(seed: int, sizes: list[int]) -> Batch:
    """Return a batch with equal rewards in the first group and one token in the first response."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    lengths = rng.integers(1, MAX_TOKENS + 1, n)
    lengths[0] = 1
    total = int(lengths.sum())
    rewards = rng.integers(0, 3, n) / 2
    rewards[: sizes[0]] = 0.5
    rewards[sizes[0]], rewards[sizes[0] + 1] = 0.0, 1.0
    log_probs = -rng.exponential(1.0, total)
    near = lambda scale: log_probs + rng.normal(0, scale, total)  # noqa: E731
    batch = {
        "lengths": lengths, "groups": np.repeat(np.arange(len(sizes)), sizes), "rewards": rewards,
        "log_probs": log_probs, "old_log_probs": near(0.3), "reference_log_probs": near(0.4),
        "generator_log_probs": near(0.3), "old_values": rng.normal(0, 1, total), "values": rng.normal(0, 1, total),
        "returns": rng.normal(0, 1, total), "entropy": rng.exponential(1.0, total),
        "sample_advantages": rng.normal(0, 1, n), "token_advantages": rng.normal(0, 1, total),
    }  # fmt: skip
    return {name: np.round(numbers, 5).tolist() for name, numbers in batch.items()}


class Padded:
    def __init__(self, batch: Batch) -> None:
        self.lengths = torch.tensor(batch["lengths"], dtype=torch.int64)
        self.groups = np.array(batch["groups"])
        self.rewards = torch.tensor(batch["rewards"], dtype=torch.float64)
        self.sample_advantages = torch.tensor(batch["sample_advantages"], dtype=torch.float64)
        self.mask = (torch.arange(int(self.lengths.max())) < self.lengths[:, None]).double()
        self.batch = batch

    def __getitem__(self, name: str) -> Tensor:
        rows = torch.zeros_like(self.mask)
        rows[self.mask.bool()] = torch.tensor(self.batch[name], dtype=torch.float64)
        return rows

    def leaf(self, name: str) -> Tensor:
        return self[name].requires_grad_()

    def flat(self, rows: Tensor) -> list[float]:
        return rows.expand_as(self.mask)[self.mask.bool()].tolist()

    def token_rewards(self) -> Tensor:
        rows = torch.zeros_like(self.mask)
        rows[torch.arange(len(rows)), self.lengths - 1] = self.rewards
        return rows


def lines_between(function: Any, first: str, last: str) -> str:
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if i > start and last in line)
    return textwrap.dedent("\n".join(lines[start:end]))


def run_lines(source: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "reference", "exec"), names)
    return names


def trl_grpo_advantages(data: Padded, scale_rewards: str) -> list[float]:
    source = lines_between(
        GRPOTrainer._generate_and_score_completions, 'if self.multi_objective_aggregation == "sum', "# Slice to keep"
    )
    options = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", scale_rewards=scale_rewards, reward_weights=torch.ones(1)
    )
    names = run_lines(source, {
        "self": options, "torch": torch, "nanstd": nanstd, "device": "cpu", "rewards_per_func": data.rewards[:, None],
        "unscorable_mask": torch.zeros(len(data.rewards), dtype=torch.bool),
        "num_generations": int((data.groups == 0).sum()),
    })  # fmt: skip
    return names["advantages"].tolist()


def trl_rloo_advantages(data: Padded, beta: float) -> list[float]:
    source = lines_between(
        RLOOTrainer._generate_and_score_completions, "# Include the KL penalty in the reward", "is_std_zero ="
    )
    names = run_lines(source, {
        "self": SimpleNamespace(beta=beta, normalize_advantages=False), "torch": torch, "nanstd": nanstd,
        "gather": lambda rows: rows, "rewards": data.rewards.clone(), "completion_mask": data.mask,
        "old_per_token_logps": data["old_log_probs"], "ref_per_token_logps": data["reference_log_probs"],
        "num_generations": int((data.groups == 0).sum()),
    })  # fmt: skip
    return names["advantages"].tolist()


def verl_overlong(length: int, buffer: int, penalty: float) -> float:
    source = lines_between(DAPORewardManager.run_single, "overlong_buffer_len =", "reward += overlong_reward")
    config = SimpleNamespace(len=buffer, penalty_factor=penalty)
    options = SimpleNamespace(max_resp_len=MAX_TOKENS, overlong_buffer_cfg=config)
    return float(run_lines(source, {"self": options, "valid_response_length": length})["overlong_reward"])


def advantage_cases(data: Padded, equal_groups: bool) -> Iterator[Case]:
    rewards, mask = data.token_rewards(), data.mask
    for coefficient, gamma, gae_lambda in ((0.0, 1.0, 0.95), (0.1, 0.97, 0.9), (0.1, 1.0, 1.0)):
        kl = core_algos.kl_penalty(data["old_log_probs"], data["reference_log_probs"], "kl") * mask
        shaped = rewards - coefficient * kl
        parameters = {"kl_coefficient": coefficient, "gamma": gamma, "gae_lambda": gae_lambda}
        advantages, returns = core_algos.compute_gae_advantage_return(
            shaped, data["old_values"], mask, gamma, gae_lambda
        )
        out = {"advantages": data.flat(advantages), "returns": data.flat(returns)}
        yield {"of": "verl.gae", "parameters": parameters, "outputs": out}
        advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            shaped, mask, config=SimpleNamespace(gamma=gamma)
        )
        parameters = {"kl_coefficient": coefficient, "gamma": gamma}
        out = {"advantages": data.flat(advantages)}
        yield {"of": "verl.reinforce_plus_plus", "parameters": parameters, "outputs": out}
    for by_std in (True, False):
        advantages, _ = core_algos.compute_grpo_outcome_advantage(
            rewards.clone(), mask, data.groups, norm_adv_by_std_in_grpo=by_std
        )
        out = {"advantages": advantages[:, 0].tolist()}
        yield {"of": "verl.grpo", "parameters": {"normalize_by_std": by_std, "epsilon": 1e-6}, "outputs": out}
    for name in ("rloo", "rloo_vectorized"):
        function = getattr(core_algos, f"compute_{name}_outcome_advantage")
        advantages, _ = function(rewards.clone(), mask, data.groups)
        yield {"of": f"verl.{name}", "parameters": {}, "outputs": {"advantages": advantages[:, 0].tolist()}}
    penalties = [verl_overlong(length, 5, 0.7) for length in data.lengths.tolist()]
    yield {"of": "verl.overlong", "parameters": {"buffer": 5, "penalty": 0.7}, "outputs": {"penalties": penalties}}
    if equal_groups:
        for scale in ("group", "none"):
            out = {"advantages": trl_grpo_advantages(data, scale)}
            yield {"of": "trl.grpo", "parameters": {"normalize_by_std": scale == "group"}, "outputs": out}
        for beta in (0.0, 0.05):
            out = {"advantages": trl_rloo_advantages(data, beta)}
            yield {"of": "trl.rloo", "parameters": {"kl_coefficient": beta}, "outputs": out}


class OneProcess:
    num_processes = 1
    sync_gradients = True

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def reduce(self, rows: Tensor, reduction: str) -> Tensor:
        return rows


def trl_importance_weights(data: Padded, cap: float) -> Tensor:
    source = lines_between(
        GRPOTrainer._generate_and_score_completions, "  mask = completion_mask if", "# Compute the per-token log"
    )
    options = SimpleNamespace(
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=cap,
    )
    names = run_lines(source, {
        "self": options, "torch": torch, "completion_mask": data.mask, "tool_mask": None,
        "old_per_token_logps": data["old_log_probs"], "sampling_per_token_logps": data["generator_log_probs"],
    })  # fmt: skip
    return names["vllm_importance_sampling_ratio"]


def trl_loss(
    data: Padded, loss_type: str, level: str, beta: float, cap: float | None, entropy: float
) -> dict[str, Any]:
    log_probs = data.leaf("log_probs")
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = SimpleNamespace(
        args=args, beta=beta, loss_type=loss_type, importance_sampling_level=level, epsilon_low=0.2, epsilon_high=0.28,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=cap is not None,
        vllm_importance_sampling_correction=True, max_completion_length=MAX_TOKENS, accelerator=OneProcess(),
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=entropy > 0, use_adaptive_entropy=False,
        entropy_coef=entropy, model=SimpleNamespace(training=True), _metrics={"train": Lists()},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, data["entropy"], None),
    )  # fmt: skip
    n, longest = data.mask.shape
    inputs = {
        "prompt_ids": torch.zeros(n, 1), "prompt_mask": torch.ones(n, 1), "completion_ids": torch.zeros(n, longest),
        "completion_mask": data.mask, "advantages": data.sample_advantages,
        "old_per_token_logps": data["old_log_probs"], "ref_per_token_logps": data["reference_log_probs"],
        "num_items_in_batch": data.mask.sum(),
    }  # fmt: skip
    if cap is not None:
        inputs["importance_sampling_ratio"] = trl_importance_weights(data, cap)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = trainer._metrics["train"]
    out = {"loss": loss.item(), "gradient": data.flat(log_probs.grad)}
    if level == "token":
        out |= {name: metrics[f"clip_ratio/{name}_mean"][0] for name in ("low", "high")}
    return out


class Lists(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        self[name] = []
        return self[name]


def trl_loss_cases(data: Padded) -> Iterator[Case]:
    choices = [
        ("grpo", "token", 0.0, None, 0.0), ("grpo", "token", 0.04, None, 0.0), ("bnpo", "token", 0.04, 1.5, 0.0),
        ("dapo", "token", 0.0, None, 0.1), ("dr_grpo", "token", 0.04, None, 0.0), ("dr_grpo", "token", 0.0, 1.5, 0.0),
        ("grpo", "sequence", 0.0, None, 0.0), ("dapo", "sequence", 0.04, None, 0.0),
        ("grpo", "sequence", 0.0, 1.5, 0.0),
    ]  # fmt: skip
    for loss_type, level, beta, cap, entropy in choices:
        parameters = {"loss_type": loss_type, "level": level, "beta": beta, "cap": cap, "entropy": entropy}
        yield {"of": "trl.loss", "parameters": parameters, "outputs": trl_loss(data, **parameters)}


def verl_policy_cases(data: Padded) -> Iterator[Case]:
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        data["old_log_probs"] - data["generator_log_probs"], data.mask, "token", 2.0
    )
    yield {"of": "verl.importance", "parameters": {"cap": 2.0}, "outputs": {"weights": data.flat(weights)}}
    for name in ("vanilla", "gspo"):
        for mode in AGGREGATIONS:
            for cap in (None, 2.0):
                config = ActorConfig(
                    strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.15,
                    clip_ratio_high=0.25, clip_ratio_c=NO_DUAL_CLIP,
                    global_batch_info={"loss_scale_factor": MAX_TOKENS},
                )  # fmt: skip
                log_probs = data.leaf("log_probs")
                loss, metrics = core_algos.get_policy_loss_fn(name)(
                    data["old_log_probs"], log_probs, data["token_advantages"], data.mask, mode, config,
                    weights if cap else None,
                )  # fmt: skip
                loss.backward()
                out = {"loss": loss.item(), "gradient": data.flat(log_probs.grad)}
                out["clip_fraction"] = metrics["actor/pg_clipfrac"]
                yield {"of": f"verl.{name}", "parameters": {"mode": mode, "cap": cap}, "outputs": out}


def verl_other_cases(data: Padded) -> Iterator[Case]:
    for estimator in ("k1", "k2", "k3"):
        log_probs = data.leaf("log_probs")
        kl = core_algos.kl_penalty(log_probs, data["reference_log_probs"], estimator)
        kl.sum().backward()
        out = {"kl": data.flat(kl), "gradient": data.flat(log_probs.grad)}
        yield {"of": "verl.kl", "parameters": {"estimator": estimator}, "outputs": out}
    for mode in AGGREGATIONS:
        values = data.leaf("values")
        loss, clipped = core_algos.compute_value_loss(
            values, data["returns"], data["old_values"], data.mask, 0.3, mode, loss_scale_factor=MAX_TOKENS
        )
        loss.backward()
        out = {"loss": loss.item(), "gradient": data.flat(values.grad), "clip_fraction": clipped.item()}
        yield {"of": "verl.value", "parameters": {"mode": mode, "clip": 0.3}, "outputs": out}
        aggregated = core_algos.agg_loss(data["values"], data.mask, mode, loss_scale_factor=MAX_TOKENS)
        yield {"of": "verl.aggregate", "parameters": {"mode": mode}, "outputs": {"loss": aggregated.item()}}
    logits = data["values"] * 3
    out = {"entropy": torch_functional.entropy_from_logits(logits).tolist()}
    yield {"of": "verl.entropy", "parameters": {"logits": logits.tolist()}, "outputs": out}


def cases_of(number: int, batch: Batch, sizes: list[int]) -> Iterator[Case]:
    data = Padded(batch)
    cases = [*advantage_cases(data, len(set(sizes)) == 1), *trl_loss_cases(data), *verl_policy_cases(data)]
    for case in [*cases, *verl_other_cases(data)]:
        yield {"batch": number} | case


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def main() -> None:
    batches = [make_batch(seed, sizes) for seed, sizes in enumerate(GROUP_SIZES)]
    cases = [case for number, batch in enumerate(batches) for case in cases_of(number, batch, GROUP_SIZES[number])]
    made_by = {"trl": trl.__version__, "verl": verl.__version__, "torch": torch.__version__.partition("+")[0]}
    content = {"made_by": made_by, "max_tokens": MAX_TOKENS, "batches": batches, "cases": rounded(cases)}
    text = json.dumps(content, separators=(",", ":")).replace('},{"', '},\n{"')
    Path(__file__).with_name("learning_numbers.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Small policies, critics and rollouts for a learner."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch

from rlhfspec import job
from rlhfspec.tiny import random_model
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling import lora
from rlhfspec.training.modeling.critic import Critic
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.packed import pack_sequences

ALGORITHMS = ("ppo", "grpo", "dr-grpo", "rloo", "reinforce++", "dapo", "gspo")


def spec(
    name: str = "grpo", *, algorithm: Any = None, model: Any = None, generation: Any = None, **training: Any
) -> job.Spec:
    """Return a float32 job, which every device computes alike."""
    return job.Spec.model_validate(
        {
            "model": {"path": "m", **(model or {})},
            "dataset": {"path": "d"},
            "algorithm": {"name": name, **(algorithm or {})},
            "generation": {"maxTokens": 24, "temperature": 0.9, **(generation or {})},
            "rewards": {"sources": [{"type": "function", "function": "a:b"}]},
            "training": {"optimizer": {"learningRate": 1e-3}, "steps": 4, "autocast": "off", **training},
        }
    )


def stored_spec(folder: Path, dtype: str) -> job.Spec:
    return spec("ppo", model={"path": str(folder / "stored"), "dtype": dtype}, tokensPerMicroBatch=40, fuse="off")


def policy(seed: int = 1) -> Any:
    return copy.deepcopy(_proved(seed))


@functools.cache
def _proved(seed: int) -> Any:
    return prepared(random_model("llama", seed=seed))


def critic() -> Critic:
    return Critic(policy(seed=2))


def learner(settings: job.Spec, **options: Any) -> Learner:
    model = policy()
    if settings.model.lora is not None:
        lora.add_lora(model, settings.model.lora, seed=0)
    return Learner(settings, model, critic() if settings.algorithm.name == "ppo" else None, num_threads=1, **options)


def rollouts(seed: int = 0, *, version: int = 0, num_samples: int = 8) -> Rollouts:
    return copy.deepcopy(_rollouts(seed, version, num_samples))


@functools.cache
def _rollouts(seed: int, version: int, num_samples: int) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (num_samples,), generator=generator)
    prompts = tuple((3, 4, 5) if place < 4 else (6, 7) for place in range(num_samples))
    token_ids = torch.randint(97, (int(lengths.sum()),), generator=generator)
    packed = pack_sequences(prompts, [part.tolist() for part in token_ids.split(lengths.tolist())])
    with torch.no_grad():
        out = TorchForward(_proved(1), 0.9)(packed)
    noise = 0.1 * torch.randn(len(token_ids), generator=generator)
    return Rollouts(
        ids=tuple(f"j/1/{place // 4}/{place % 4}" for place in range(num_samples)),
        group_index=torch.arange(num_samples) // 4,
        lengths=lengths,
        prompt_token_ids=prompts,
        token_ids=token_ids,
        generator_log_probs=out.log_probs,
        log_probs=out.untempered,
        weights_versions=torch.full((len(token_ids),), version),
        rewards=torch.randn(num_samples, generator=generator, dtype=torch.float64),
        reward_components={},
        reference_log_probs=out.log_probs + noise,
        values=0.5 * noise,
        truncated=lengths == 24,
    )


def gradients(module: torch.nn.Module, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    (numbers * torch.linspace(-1, 1, len(numbers))).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same_states(one: Any, other: Any) -> None:
    """Assert that two states of a learner are the same bits, tensor by tensor."""
    ours, theirs = _flat(one), _flat(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


def _flat(state: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {at: state}
    return {name: value for key, inner in state.items() for name, value in _flat(inner, f"{at}/{key}").items()}


def same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert (left[name] - right[name]).abs().max() <= tolerance, name

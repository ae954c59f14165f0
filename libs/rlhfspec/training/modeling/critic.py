"""Critic model: a language model's trunk with a value head that starts at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhfspec import job
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.loading import LOAD_ERRORS, refuse_other_weights
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.causal_lm import CausalLM, within_positions
from rlhfspec.training.modeling.loading import load_causal_lm, prepared
from rlhfspec.training.modeling.packed import PackedRow, hidden_states

_CRITIC_FILE = "critic.safetensors"


class Critic(nn.Module):
    def __init__(self, model: Any) -> None:
        """Add a head to a prepared causal LM's trunk, which is trained in place."""
        super().__init__()
        parts = CausalLM(model)
        self.trunk = parts.trunk
        self.score = nn.Linear(parts.width, 1, dtype=model.get_input_embeddings().weight.dtype)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, batch: PackedRow) -> torch.Tensor:
        """Return values [t], float32, of the states before each response token."""
        hidden = hidden_states(self.trunk, batch)
        with torch.autocast(hidden.device.type, enabled=False):  # values need float32
            return self.score(hidden.to(self.score.weight.dtype))[:, 0].float()  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_model

        folder.mkdir(parents=True, exist_ok=True)
        self.trunk.config.save_pretrained(folder)
        save_model(self, str(folder / _CRITIC_FILE))


def load_critic(
    model: job.Model, *, max_context: int = 1024, stored: bool = False, ranks: Ranks | None = None
) -> Critic:
    """Load a saved critic, or add a head to a causal LM. Arguments as in `load_causal_lm`."""
    path, field = (model.path, "spec.model.path") if model.critic is None else (model.critic, "spec.model.critic")
    if not (Path(path) / _CRITIC_FILE).exists():
        trunk = load_causal_lm(
            path, field=field, dtype=model.dtype, max_context=max_context, only_trunk=True, stored=stored, ranks=ranks
        )
        return Critic(trunk)
    return _saved_critic(Path(path), field, model.dtype, max_context)


def _saved_critic(folder: Path, field: str, dtype: str, max_context: int) -> Critic:
    from safetensors.torch import load_model
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng(devices=()):  # only the shape of the model is used
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        examine(model, name=field, max_context=within_positions(model, max_context))
        critic = Critic(model)
        missing, unexpected = load_model(critic, str(folder / _CRITIC_FILE), strict=False)
        prepared(model, dtype=dtype, max_context=max_context, name=field)  # the trunk with the critic's own weights
        critic.score.to(critic.trunk.get_input_embeddings().weight.dtype)
    except LOAD_ERRORS as error:
        if isinstance(error, InvalidRequest):
            raise
        problem = f"is not a loadable critic: {str(error).strip().splitlines()[-1].strip()}"
        raise InvalidRequest(field, str(folder), problem) from error
    refuse_other_weights(missing, unexpected, field=field, path=str(folder))
    return critic

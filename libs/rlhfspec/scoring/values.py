"""The critic's values of a response, each a pure function of the sample and the critic's weights.

The critic runs on the engine's kernels as a language model whose head has one output, so what `log_probs` promises
holds here too: no batch, chunk, worker or number of threads changes a bit.

Example:
    >>> from rlhfspec.modeling.loading import prepared
    >>> from rlhfspec.tiny import random_model
    >>> critic = Critic(prepared(random_model("llama", seed=0)).base_model)
    >>> ValueScorer(critic, max_context=64).values((5, 6, 7), (8, 9))
    [0.0, 0.0]
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlhfspec.errors import WeightsVersionError
from rlhfspec.modeling.critic import Critic
from rlhfspec.modeling.packed import pack_sequences
from rlhfspec.scoring.log_probs import SequenceRows, finite

_TRUNK, _SCORE = "trunk.", "score."


class ValueScorer:
    """Scores under the critic's present weights. One sequence at a time; calls from several threads wait in line.

    The critic itself is left alone; the scorer keeps weights of its own. max_context: tokens of prompt and response.
    """

    def __init__(
        self, critic: Critic, *, max_context: int, dtype: str = "float32", arithmetic: str = "auto", version: int = 0
    ) -> None:
        self.version = version
        model = _as_language_model(critic)
        self._trunk_prefix = f"{model.base_model_prefix}."
        self._head_prefix = f"{_name_of(model, model.get_output_embeddings())}."
        self._rows = SequenceRows(model, "critic", max_context=max_context, dtype=dtype, arithmetic=arithmetic)
        self._load(critic.state_dict())

    def values(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Of the state before every response token. Raises NumericalError when the critic gives none."""
        rows = self._rows.map(prompt_token_ids, token_ids, lambda _, output: output[:, 0])
        return finite(rows, "critic value")

    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> None:
        """The trained critic's `state_dict()`. Versions never go back."""
        if version < self.version:
            raise WeightsVersionError(version, self.version, "the critic's weights are older than the loaded ones")
        self._load(state_dict)
        self.version = version

    def _load(self, state_dict: dict[str, torch.Tensor]) -> None:
        self._rows.load_weights({self._name(name): tensor for name, tensor in state_dict.items()})

    def _name(self, name: str) -> str:
        """The critic's names as the language model has them."""
        if name.startswith(_SCORE):
            return self._head_prefix + name.removeprefix(_SCORE)
        return self._trunk_prefix + name.removeprefix(_TRUNK)


@torch.inference_mode()
def values_reference(critic: Critic, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """The same, slow and obvious: the critic as the trainer runs it, one sequence a forward."""
    return critic(pack_sequences([prompt_token_ids], [token_ids])).tolist()  # type: ignore[no-any-return]


def _as_language_model(critic: Critic) -> Any:
    """A causal LM around a copy of the trunk, with a head of one output and nothing behind it.

    The head is random: what the engine proves when it takes a model up, a head of zeros would not show.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    config = copy.deepcopy(critic.trunk.config)
    config.tie_word_embeddings = False
    for transform in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if hasattr(config, transform):
            setattr(config, transform, 1.0 if transform == "logits_scaling" else None)
    with torch.device("meta"):  # only its shape is wanted
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    setattr(model, model.base_model_prefix, copy.deepcopy(critic.trunk))
    model.set_output_embeddings(_random_head(int(config.hidden_size)))
    return model.eval()


def _random_head(hidden_size: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(hidden_size, 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, hidden_size, generator=generator))
        head.bias.zero_()
    return head


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is wanted]
    return names[0]

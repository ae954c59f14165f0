"""MTP drafters: the layer of a policy's own checkpoint that was trained to predict further tokens (DeepSeek, GLM)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from rlhfspec.common.context import holding
from rlhfspec.errors import InvalidRequest, first_line
from rlhfspec.huggingface.heads.eagle import Attend
from rlhfspec.huggingface.loading import LOAD_ERRORS, further_layers
from rlhfspec.huggingface.structure.attention import AttentionSpec, refuse_unknown, use_eager_experts
from rlhfspec.huggingface.structure.trace import FORWARD_ERRORS
from rlhfspec.job.choices.drafters import MTP

_ATTENTION = "rlhfspec_mtp"


class MtpHead(nn.Module):
    """Drafter with the policy's embedding, one more layer of the policy's kind, and the policy's output head."""

    name = MTP
    shapes = MTP  # otherwise those of the policy
    embed_tokens = None
    token_ids = slice(None)  # the policy's vocabulary
    logits: Callable[[torch.Tensor], torch.Tensor]  # the policy's

    def __init__(self, model: Any) -> None:
        """Take the layer of a transformers `MtpModel`."""
        super().__init__()
        self.config = model.config
        self.layer = model.layers[0]
        self.rotary_emb = copy.deepcopy(model.rotary_emb)
        types = getattr(self.config, "layer_types", None)
        self._window = self.config.sliding_window if types and types[0] == "sliding_attention" else None
        self._rotary_kind = {"layer_type": types[0]} if types and model.has_per_layer_rope else {}
        AttentionInterface.register(_ATTENTION, _attend)
        model.set_attn_implementation(_ATTENTION)
        use_eager_experts(model)

    def layers_tapped(self, num_layers: int) -> tuple[int, ...]:
        return ()  # only the trunk's output

    def attention(self, index: int) -> AttentionSpec:
        """Return the attention of the layer, whose keys and values lie at `index` in the cache."""
        states = self.layer.eh_proj.weight.new_zeros(1, self.config.hidden_size)
        try:
            query, key, value, scale = self._attended(states, states, torch.zeros(1, dtype=torch.int64))
        except FORWARD_ERRORS as error:
            problem = f"cannot run the attention of the policy's MTP layer: {first_line(error)}"
            raise InvalidRequest("drafter", MTP, problem) from error
        return AttentionSpec(
            index=index, num_heads=query.shape[1], num_kv_heads=key.shape[1], key_dim=key.shape[2],
            value_dim=value.shape[2], scale=scale, softcap=0.0, has_sinks=False, window=self._window, chunk=None,
        )  # fmt: skip

    def first_states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the states [N, H] to keep, from what the policy told [N, 1, H]."""
        return tapped.flatten(1)

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the states [N, H] that the next drafted token reads in place of the policy's."""
        embedded, places = embedded[None], positions[None]
        rotary = self.rotary_emb(embedded, position_ids=places, **self._rotary_kind)
        with holding(_attending, attend):
            found: torch.Tensor = self.layer(
                embedded, states[None], position_embeddings=rotary, attention_mask=None, position_ids=places,
                past_key_values=None,
            )  # fmt: skip
        return found[0]

    def kept(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [N, heads, dim] that later tokens attend to."""
        _, key, value, _ = self._attended(embedded, states, positions)
        return key, value

    def _attended(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Return what a forward hands to its attention."""
        found = []

        def note(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
            found.append((query, key, value, scale))
            return value.new_zeros(*query.shape[:2], value.shape[2])

        with torch.no_grad():
            self(*given, note)
        return found[0]


_attending: ContextVar[Attend] = ContextVar("the attention of the head that runs in this thread")


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
            scaling: float | None = None, **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    refuse_unknown(module, keywords, name="drafter")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [N, heads, dim]
    return _attending.get()(query, key, value, scale)[None].contiguous(), None


def load_mtp(policy: Any) -> MtpHead:
    """Load the first MTP layer from the checkpoint of a policy that is not yet modified, or raise InvalidRequest."""
    from transformers.modeling_layers import MtpModel

    first, count = further_layers(policy.config)
    if not count:
        raise InvalidRequest("drafter", MTP, f"config.json of this {policy.config.model_type} names no MTP layers")
    view = copy.copy(policy)
    view.config = config = copy.deepcopy(policy.config)
    text = config.get_text_config(decoder=True)
    text.num_mtp_layers = 1
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds and not getattr(text, "mtp_mlp_layer_types", None):
        text.mtp_mlp_layer_types = kinds[-1:]  # weights of another kind would be missing
    config.dtype = policy.get_input_embeddings().weight.dtype
    view._keys_to_ignore_on_load_unexpected = [r"^mtp\.", rf"^model\.layers\.{first}\."]
    try:
        loaded: Any = MtpModel.from_pretrained(view)
    except LOAD_ERRORS as error:
        raise InvalidRequest("drafter", MTP, f"cannot load the policy's MTP layers: {first_line(error)}") from error
    for is_so, has in ((loaded.use_shared_post_norm, "a shared norm"), (loaded.rotary_emb is None, "no rotary angles")):
        if is_so:
            raise InvalidRequest("drafter", MTP, f"the MTP layers of this {policy.config.model_type} have {has}")
    return MtpHead(loaded).eval().requires_grad_(False)

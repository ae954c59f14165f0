"""EAGLE-3 drafters: one decoder layer over hidden states of the policy, in the format of SpecForge, vLLM and SGLang."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig  # the model's module takes a second to import
from transformers.utils.hub import cached_file

from rlhfspec.errors import InvalidRequest, first_line
from rlhfspec.huggingface.loading import LOAD_ERRORS, refuse_other_weights
from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.huggingface.structure.causal_lm import text_config
from rlhfspec.job.choices.drafters import EAGLE3, is_eagle3

# Of queries, keys and values [N, heads, dim] and their scale; returns [N, heads, dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")  # variants of the layer
_NUM_TAPS = 3
_FIRST_STD = 0.02


class EagleAttention(nn.Module):
    """Projections of the layer's attention, which reads token and hidden state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        bias = bool(config.attention_bias)
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)


class EagleMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class EagleLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = EagleAttention(config)
        self.mlp = EagleMLP(config)


class EagleHead(nn.Module):
    """Drafter that predicts the next token from the last token and the policy's hidden state before it."""

    name = "EAGLE-3"
    d2t: torch.Tensor  # [draft tokens] the policy's id minus the head's

    def __init__(self, config: LlamaConfig, *, target_width: int, has_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self.num_draft_tokens: int = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear(_NUM_TAPS * target_width, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, self.num_draft_tokens, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        self.register_buffer("d2t", torch.zeros(self.num_draft_tokens, dtype=torch.int64))
        self._frequencies, self._rotary_scale = _rotary(config, self.midlayer.self_attn.head_dim)  # stay float32
        self.is_new = False  # it knows nothing yet
        self._norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    @property
    def token_ids(self) -> torch.Tensor:
        """Return the policy's id of each token that the head can draft."""
        return torch.arange(self.num_draft_tokens, device=self.d2t.device) + self.d2t

    def take_tokens(self, token_ids: Sequence[int], weight: torch.Tensor) -> None:
        """Draft these tokens, ascending, whose rows of the policy's output head are `weight`."""
        ids = torch.tensor(token_ids, device=self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        with torch.no_grad():
            self.lm_head.weight.copy_(weight)

    def layers_tapped(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of the policy whose input the head reads."""
        layers = (2, num_layers // 2, num_layers - 3)
        if list(layers) != sorted(set(layers)):
            raise InvalidRequest("drafter", num_layers, "EAGLE-3 needs a policy of at least 7 layers")
        return layers

    @property
    def shapes(self) -> str:
        return f"{self.config.intermediate_size} {self.num_draft_tokens}"

    def attention(self, index: int) -> AttentionSpec:
        """Return the attention of the layer, whose keys and values lie at `index` in the cache."""
        own = self.midlayer.self_attn
        return AttentionSpec(
            index=index, num_heads=own.num_heads, num_kv_heads=own.num_kv_heads, key_dim=own.head_dim,
            value_dim=own.head_dim, scale=own.head_dim**-0.5, softcap=0.0, has_sinks=False, window=None, chunk=None,
        )  # fmt: skip

    def first_states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the states [N, H] to keep, from what the policy told [N, taps, width]."""
        states: torch.Tensor = self.fc(tapped.flatten(1))
        return states

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the states [N, H] that the next drafted token reads in place of the policy's."""
        residual, x = self.inputs(embedded, states)
        scale = self.midlayer.self_attn.head_dim**-0.5
        attended = attend(self.queries(x, positions), *self.keys_and_values(x, positions), scale)
        return self.states(attended, residual)

    def kept(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [N, heads, dim] that later tokens attend to."""
        return self.keys_and_values(self.inputs(embedded, states)[1], positions)

    def inputs(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual [N, H] and the attention's input [N, 2H]."""
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        return residual, torch.cat((layer.input_layernorm(embedded), normed), -1)

    def keys_and_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys and values [N, heads, dim]."""
        attention = self.midlayer.self_attn
        keys = self._rotated(self._by_head(attention.k_proj(x)), positions)
        return keys, self._by_head(attention.v_proj(x))

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._rotated(self._by_head(self.midlayer.self_attn.q_proj(x)), positions)

    def states(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        layer = self.midlayer
        hidden: torch.Tensor = residual + layer.self_attn.o_proj(attended.flatten(1))
        found: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the head's own tokens."""
        logits: torch.Tensor = self.lm_head(self.norm(states)).float()
        return logits

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.midlayer.self_attn.head_dim)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._frequencies = self._frequencies.to(positions.device)
        angles = (positions[:, None] * self._frequencies).repeat(1, 2)[:, None]
        low, high = x.chunk(2, -1)
        turned = x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()
        return (turned * self._rotary_scale).to(x.dtype)


def _rotary(config: LlamaConfig, dim: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies [dim / 2] of rotary positions, and the scale of what is rotated."""
    told: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
    if told["rope_type"] == "default":
        return told["rope_theta"] ** (-torch.arange(0, dim, 2) / dim), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[told["rope_type"]](config, None)
    if len(frequencies) != dim // 2:
        raise ValueError("partly rotated heads are not supported")
    return frequencies, scale


def is_eagle(path: str | Path) -> bool:
    """Return whether a folder or hub id holds an EAGLE-3 drafter."""
    return is_eagle3(_config_of(path))


def load_head(path: str | Path, *, target_width: int | None = None, field: str = "drafter") -> EagleHead:
    """Load an EAGLE-3 drafter in the types of its file, for a policy of this width if given.

    Missing or unknown weights are refused.
    """
    told = _config_of(path)
    for name in _UNSUPPORTED:
        if told.get(name) or (told.get("eagle_config") or {}).get(name):
            raise InvalidRequest(field, str(path), f"{name} in config.json is not supported")
    if (told.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        raise InvalidRequest(field, str(path), "explicit eagle_aux_hidden_state_layer_ids are not supported")
    if told.get("num_hidden_layers") != 1:
        raise InvalidRequest(field, str(path), "an EAGLE-3 drafter has one layer")
    if told.get("hidden_act", "silu") != "silu" or not told.get("hidden_size"):
        raise InvalidRequest(field, str(path), "config.json must have hidden_size, and hidden_act silu")
    wanted = told.get("target_hidden_size") or told["hidden_size"]
    if target_width not in (None, wanted):
        problem = f"reads hidden states of {wanted} values; the policy's have {target_width}"
        raise InvalidRequest(field, str(path), problem)
    weights = _weights_of(path, field)
    weights.pop("t2d", None)
    has_embedding = "embed_tokens.weight" in weights
    if not has_embedding and wanted != told["hidden_size"]:
        raise InvalidRequest(
            field, str(path), "is narrower or wider than the policy, and has no embed_tokens of its own"
        )
    try:
        head = EagleHead(LlamaConfig(**told), target_width=wanted, has_embedding=has_embedding)
    except (*LOAD_ERRORS, StrictDataclassError) as error:
        raise InvalidRequest(field, str(path), f"config.json: {first_line(error)}") from error
    own = head.state_dict()
    if head.num_draft_tokens == head.config.vocab_size:
        weights.setdefault("d2t", own["d2t"])
    shapes = [(name, weights[name].shape, own[name].shape) for name in own.keys() & weights.keys()]
    refuse_other_weights(
        own.keys() - weights.keys(), weights.keys() - own.keys(), (each for each in shapes if each[1] != each[2]),
        field=field, path=str(path),
    )  # fmt: skip
    head.load_state_dict(weights, assign=True)
    if (ids := head.token_ids).numel() and not 0 <= int(ids.min()) <= int(ids.max()) < head.config.vocab_size:
        raise InvalidRequest(field, str(path), "d2t names tokens outside the vocabulary")
    return head.eval().requires_grad_(False)


def new_head(policy: Any, num_draft_tokens: int) -> EagleHead:
    """Return an untrained head for the policy, which drafts its first tokens until `take_tokens`."""
    told, norm = text_config(policy), getattr(policy.base_model, "norm", None)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters")  # fmt: skip
    given = {name: getattr(told, name) for name in same if getattr(told, name, None) is not None}
    own = {"num_hidden_layers": 1, "draft_vocab_size": num_draft_tokens, "tie_word_embeddings": False}
    if rotary := given.get("rope_parameters"):
        given["rope_parameters"] = {name: each for name, each in rotary.items() if name != "partial_rotary_factor"}
    config = LlamaConfig(**given | own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EagleHead(config, target_width=told.hidden_size)
        for parameter in head.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=_FIRST_STD)
    with torch.no_grad():
        if norm is not None:
            head.norm.weight.copy_(norm.weight)
        head.lm_head.weight.copy_(policy.get_output_embeddings().weight[:num_draft_tokens])
    head.is_new = True
    return head.eval()


def save_head(head: EagleHead, out: Path) -> None:
    """Write a drafter's folder, which vLLM and SGLang load too."""
    out.mkdir(parents=True, exist_ok=True)
    config = head.config.to_dict() | {
        "architectures": [EAGLE3], "model_type": "llama", "tie_word_embeddings": False, "num_hidden_layers": 1,
        "draft_vocab_size": head.num_draft_tokens,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[head.token_ids.cpu()] = True
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file({**tensors, "t2d": known}, out / _WEIGHTS[0], metadata={"format": "pt"})


def _config_of(path: str | Path) -> dict[str, Any]:
    try:
        found = _file(path, "config.json")
        told = {} if found is None else json.loads(found.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _weights_of(path: str | Path, field: str) -> dict[str, torch.Tensor]:
    for name in _WEIGHTS:
        if (found := _file(path, name)) is not None:
            try:
                return dict(load_file(found) if name.endswith("safetensors") else torch.load(found, weights_only=True))
            except (*LOAD_ERRORS, struct.error) as error:
                raise InvalidRequest(field, str(path), f"{name}: {first_line(error)}") from error
    raise InvalidRequest(field, str(path), f"has none of {', '.join(_WEIGHTS)}")


def _file(path: str | Path, name: str) -> Path | None:
    """Return a file of a folder or hub id, or None."""
    found = cached_file(
        str(path), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return None if found is None else Path(found)

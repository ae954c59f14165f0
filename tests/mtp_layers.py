"""Tiny checkpoints with an MTP layer in the hub's format, and a slow twin of the drafter that it makes."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from rlhfspec.sweep.classes import tiny_config, tiny_model

KINDS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mellum")
_LAYERS = 3  # of the policy; the one after them predicts further tokens
_LAST = f"model.layers.{_LAYERS}."
_WINDOWED = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}
_MELLUM = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}


class MtpTwin:
    """Folder of a policy with an MTP layer, and a slow drafter of the same weights."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._whole = tiny_model(tiny_config(kind, **(_WINDOWED if kind == "mellum" else {})), seed=3)
        generator = torch.Generator().manual_seed(3)
        for name, buffer in self._whole.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        for name, weight in self._whole.model.layers[_LAYERS].self_attn.named_parameters():
            if name in ("q_b_proj.weight", "q_proj.weight", "q_norm.weight"):
                weight.mul_(6.0)  # otherwise it attends to all tokens alike
        width = self._whole.config.hidden_size
        self._own = {name: 1 + 0.3 * torch.randn(width, generator=generator) for name in _MELLUM if "norm" in name}
        self._own["eh_proj"] = torch.randn(width, 2 * width, generator=generator) / width**0.5
        self._write()
        self.policy = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def best_drafts(self, tokens: Sequence[int], depth: int) -> list[int]:
        """Draft the best next tokens one by one, each from the whole text again."""
        text, found = list(tokens), []
        states = self.policy.model(torch.tensor([text])).last_hidden_state[:, :-1]
        for _ in range(depth):
            embedded = self.policy.get_input_embeddings()(torch.tensor([text[1:]]))
            parts = (self._norm(embedded, "enorm"), self._norm(states, "hnorm"))
            handed_on = self._norm(self._layer(torch.cat(parts, -1) @ self._own["eh_proj"].T), "shared_head.norm")
            text.append(int(self.policy.lm_head(handed_on[0, -1]).argmax()))
            found.append(text[-1])
            states = torch.cat((states, handed_on[:, -1:]), 1)
        return found

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        trunk, places = self._whole.model, torch.arange(x.shape[1])[None]
        is_windowed = self.kind == "mellum"
        rotary = trunk.rotary_emb(x, places, **({"layer_type": "sliding_attention"} if is_windowed else {}))
        mask = create_sliding_window_causal_mask if is_windowed else create_causal_mask
        hidden = mask(
            config=self._whole.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=places
        )
        out: torch.Tensor = trunk.layers[_LAYERS](
            x, attention_mask=hidden, position_embeddings=rotary, position_ids=places
        )
        return out

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self._whole.config.rms_norm_eps).rsqrt() * self._own[name]

    def _write(self) -> None:
        self._whole.save_pretrained(self.folder)
        weights = load_file(self.folder / "model.safetensors")
        if self.kind == "mellum":
            weights = {name.replace(_LAST, "mtp.layers.0."): tensor for name, tensor in weights.items()}
            own = {f"mtp.{_MELLUM[name]}.weight": tensor for name, tensor in self._own.items()}
        else:
            own = {f"{_LAST}{name}.weight": tensor for name, tensor in self._own.items()}
            own[f"{_LAST}shared_head.head.weight"] = weights["lm_head.weight"].clone()
            own[f"{_LAST}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        self.rewrite(weights | own)
        told = json.loads((self.folder / "config.json").read_text())
        told = {name: each[:_LAYERS] if name.endswith("layer_types") and each else each for name, each in told.items()}
        told.pop("num_mtp_layers", None)
        told |= {"num_hidden_layers": _LAYERS, "num_nextn_predict_layers": 1}
        (self.folder / "config.json").write_text(json.dumps(told))

    def rewrite(self, weights: dict[str, torch.Tensor]) -> None:
        save_file(weights, self.folder / "model.safetensors", metadata={"format": "pt"})

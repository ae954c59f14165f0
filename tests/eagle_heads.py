"""EAGLE-3 folders written from the format's description, and a slow twin of the drafter that they hold."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HEADS, KV_HEADS, DIM, INNER = 4, 2, 12, 48


def write_head(folder: Path, policy: Any, *, num_drafted: int, seed: int = 5, **config: Any) -> dict[str, torch.Tensor]:
    """Write a random head for the policy, and return its weights by name."""
    generator = torch.Generator().manual_seed(seed)
    told = policy.config
    width, vocab = told.hidden_size, told.vocab_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(width, generator=generator)

    ids = torch.randperm(vocab, generator=generator)[:num_drafted].sort().values
    weights = {
        "fc.weight": random(width, 3 * width),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": random(HEADS * DIM, 2 * width),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * DIM, 2 * width),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * DIM, 2 * width),
        "midlayer.self_attn.o_proj.weight": random(width, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": random(INNER, width),
        "midlayer.mlp.up_proj.weight": random(INNER, width),
        "midlayer.mlp.down_proj.weight": random(width, INNER),
        "norm.weight": norm(),
        "lm_head.weight": 3 * random(num_drafted, width),
        "d2t": ids - torch.arange(num_drafted),
        "t2d": torch.isin(torch.arange(vocab), ids),
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    content = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "num_hidden_layers": 1, "vocab_size": vocab, "draft_vocab_size": num_drafted, "rms_norm_eps": 1e-5,
        "rope_theta": 500.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content | config))
    return weights


def best_drafts(weights: dict[str, torch.Tensor], policy: Any, tokens: Sequence[int], depth: int) -> list[int]:
    """Draft the best next tokens one by one, each from the whole text again."""
    told = policy.config
    taps = (2, told.num_hidden_layers // 2, told.num_hidden_layers - 3)
    with torch.no_grad():
        states = policy(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        read = torch.cat([states[number][0] for number in taps], -1) @ weights["fc.weight"].T
        embedding, text, found = policy.get_input_embeddings(), list(tokens), []
        inputs = read[:-1]  # the last token has not run
        for _ in range(depth):
            handed_on = _layer(weights, embedding(torch.tensor(text[1:])), inputs)
            logits = _rms(handed_on[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
            place = int(logits.argmax())
            text.append(place + int(weights["d2t"][place]))
            found.append(text[-1])
            inputs = torch.cat((inputs, handed_on[-1:]))
    return found


def _layer(weights: dict[str, torch.Tensor], embedded: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    def of(name: str) -> torch.Tensor:
        return weights[f"midlayer.{name}.weight"]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, DIM)).transpose(0, 1)

    x = torch.cat((_rms(embedded, of("input_layernorm")), _rms(inputs, of("hidden_norm"))), -1)
    query, key = (_rotate(heads(x @ of(f"self_attn.{name}_proj").T)) for name in "qk")
    value = heads(x @ of("self_attn.v_proj").T)
    key, value = (states.repeat_interleave(HEADS // KV_HEADS, 0) for states in (key, value))
    hidden_keys = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(1, 2) / math.sqrt(DIM)).masked_fill(hidden_keys, -math.inf)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    middle = inputs + attended @ of("self_attn.o_proj").T
    y = _rms(middle, of("post_attention_layernorm"))
    gated = torch.nn.functional.silu(y @ of("mlp.gate_proj").T) * (y @ of("mlp.up_proj").T)
    return middle + gated @ of("mlp.down_proj").T


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[1])[:, None] * 500.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cosine, sine = (function(torch.cat((angles, angles), 1)) for function in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cosine + torch.cat((-high, low), -1) * sine

"""Training of a tiny model on text or sums, in minutes on two cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.tiny import corpus, library, sums
from rlhfspec.tiny.muon import Muon
from rlhfspec.tiny.recipe import Recipe
from rlhfspec.tiny.tokenizer import BOS, EOS, PAD, encode

Report = Callable[[str], None]
MAX_POSITIONS = 2048
_IGNORED = -100


def build(recipe: Recipe, *, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocab_size,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def train(recipe: Recipe, report: Report) -> LlamaForCausalLM:
    """Train a float32 model whose final weights bfloat16 represents exactly, reproducible on one machine."""
    model = build(recipe, seed=recipe.seed)
    batches = _lessons(recipe) if recipe.task == "sums" else _windows(recipe)
    optimizers = _optimizers(model, recipe.learning_rate)
    has_bfloat16 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    model.train()
    for step, (tokens, targets) in enumerate(islice(batches, recipe.num_steps)):
        loss = _loss(model, tokens, targets, autocast=has_bfloat16 and recipe.task != "sums")
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _schedule(step, recipe.num_steps)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 9 or step + 1 == recipe.num_steps:
            report(f"{recipe.name}: step {step + 1}/{recipe.num_steps}, {loss.item():.3f} nats a byte")
    model.eval()  # type: ignore[no-untyped-call]
    return model.to(torch.bfloat16).to(torch.float32)  # type: ignore[arg-type,no-any-return]


def _optimizers(model: LlamaForCausalLM, learning_rate: float) -> tuple[torch.optim.Optimizer, ...]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return (
        Muon(matrices, learning_rate, momentum=0.9, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


def _loss(model: LlamaForCausalLM, tokens: Tensor, targets: Tensor, *, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=tokens, use_cache=False).logits  # [sequences, length, vocab]
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


def _windows(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    text = library if recipe.task == "library" else corpus
    stream = torch.tensor(text.token_stream(recipe.corpus_tokens, seed=recipe.seed))
    generator = torch.Generator().manual_seed(recipe.seed)
    for num_sequences, length in cycle(recipe.batch_shapes):
        starts = torch.randint(len(stream) - length, (num_sequences, 1), generator=generator)
        window = stream[starts + torch.arange(length)]
        yield window[:, :-1], window[:, 1:]


def _lessons(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in sums.lessons(seed=recipe.seed):
        encoded = [([BOS, *encode(prompt)], [*encode(response), *_end(response)]) for prompt, response in batch]
        length = max(len(prompt) + len(response) for prompt, response in encoded)
        tokens = torch.full((len(batch), length), PAD)
        targets = torch.full((len(batch), length), _IGNORED)
        for row, (prompt, response) in enumerate(encoded):
            end = len(prompt) + len(response)
            tokens[row, :end] = torch.tensor(prompt + response)
            targets[row, len(prompt) - 1 : end - 1] = torch.tensor(response)
        yield tokens, targets


def _end(response: str) -> list[int]:
    return [] if response == sums.GUESS else [EOS]


def _schedule(step: int, num_steps: int) -> float:
    warm_up = min(1.0, (step + 1) / 20)
    return warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))

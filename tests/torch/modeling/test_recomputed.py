"""Recomputed activations give the same gradients to the bit, from less memory."""

from functools import partial
from typing import Any

import pytest
import torch
from learners import gradients as gradients_of, learner as new_learner, rollouts, same_weights, spec
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from rlhfspec import job
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import MODEL_KINDS, random_model
from rlhfspec.training.modeling import lora, recomputed
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.packed import PackedRow, pack_sequences

PROMPTS = [(5, 6, 7), (5, 6, 7), (9, 10, 11, 12, 13)]
RESPONSES = [tuple(range(20, 20 + size)) for size in (9, 4, 15)]


def batch(times: int = 1) -> PackedRow:
    return pack_sequences(PROMPTS * times, RESPONSES * times, share_prompts=True)


def gradients(forward: TorchForward) -> dict[str, Tensor]:
    return gradients_of(forward, forward(batch()).log_probs)


same_bits = partial(same_weights, tolerance=0.0)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_recomputed_gradients_have_the_same_bits(kind: str) -> None:
    kept = gradients(forward := TorchForward(prepared(random_model(kind, seed=1)), 0.7))
    recomputed.recompute(forward.parts.trunk)
    same_bits(gradients(forward), kept)


def test_torchs_own_wrapper_of_blocks_finds_the_layout_again() -> None:
    forward = TorchForward(prepared(random_model("mistral-window", seed=1)), 0.7)
    kept = gradients(forward)
    layers = forward.parts.trunk.layers
    for place, block in enumerate(layers):
        layers[place] = checkpoint_wrapper(block, context_fn=recomputed.same_row)
    found = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in gradients(forward).items()}
    same_bits(found, kept)


def test_dropout_of_an_update_is_drawn_the_same_again() -> None:
    model = prepared(random_model("llama", seed=1))
    lora.add_lora(model, job.Lora(rank=2, dropout=0.5), seed=0)
    lora.set_dropout(model, True)
    forward = TorchForward(model, 0.7)
    torch.manual_seed(3)
    kept = gradients(forward)
    recomputed.recompute(forward.parts.trunk)
    torch.manual_seed(3)
    same_bits(gradients(forward), kept)


def test_only_whole_layers_are_recomputed() -> None:
    trunk = prepared(tiny_model(tiny_config("longcat_flash"))).model  # a layer has a list of two attentions
    recomputed.recompute(trunk)
    again = [part for part in trunk.modules() if getattr(part.forward, "func", None) is checkpoint]
    assert again == list(trunk.layers)


def test_recomputing_keeps_far_fewer_bytes() -> None:
    forward = TorchForward(prepared(random_model("llama", seed=1)), 1.0)
    kept = recomputed.bytes_kept(lambda: forward.hidden(batch()))
    recomputed.recompute(forward.parts.trunk)
    assert recomputed.bytes_kept(lambda: forward.hidden(batch())) < kept / 5


@pytest.mark.parametrize("autocast", [False, True])
def test_activation_bytes_of_a_row_are_predicted(autocast: bool) -> None:
    forward = TorchForward(prepared(random_model("llama", seed=1)), 1.0)
    row = pack_sequences([tuple(range(40))] * 4, [tuple(range(50, 90))] * 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        told = recomputed.activation_bytes(forward.parts.trunk, len(row.token_ids[0]))
        found = recomputed.bytes_kept(lambda: forward.hidden(row))
    assert abs(told - found) < 0.05 * found


def test_quadratic_activation_memory_is_not_predicted() -> None:
    assert recomputed.activation_bytes(prepared(random_model("gemma2", seed=1)).model, 64) is None


def learnt(name: str, **training: Any) -> str:
    trained = new_learner(spec(name, **training))
    for step in range(2):
        trained.learn(rollouts(step))
    return digest(trained.policy_state())


@pytest.mark.parametrize("training", [{}, {"fuse": "auto"}, {"autocast": "bfloat16"}])
def test_a_learner_with_recomputation_learns_the_same(training: dict[str, Any]) -> None:
    assert learnt("ppo", activationCheckpointing="on", **training) == learnt("ppo", **training)

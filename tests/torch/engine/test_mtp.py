"""MTP layers of a policy's checkpoint draft what their format says, and change no token."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moving import at_once, bits, drain, in_rounds, request
from mtp_layers import KINDS, MtpTwin
from recorded_drafts import Drafted, recorded
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import perturbed, random_model

CHAIN = DraftPlan(drafter="model", depth=4)
TREE = DraftPlan(drafter="model", depth=3, width=2, branch=2)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9, 8], [7] * 40, [3], list(range(10, 25))]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpTwin]:
    return {kind: MtpTwin(kind, tmp_path_factory.mktemp("policies") / kind) for kind in KINDS}


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Return a list that receives what chains drafted."""
    return recorded(monkeypatch)


class Unattending(torch.nn.Module):
    def forward(self, states: torch.Tensor, **_: Any) -> torch.Tensor:
        return states


def make(twin: MtpTwin, drafter: str | None = "mtp", **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": 96, "profile": False, "num_threads": 1}
    chosen["speculation"] = "off" if drafter is None else CHAIN
    return Engine.from_pretrained(twin.folder, drafter=drafter, **chosen | options)


def generated(engine: Engine, **params: Any) -> list[Any]:
    chosen = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | params)
    return [bits(done) for done in engine.generate(PROMPTS, chosen, seeds=range(len(PROMPTS)))]


def check(drafted: Drafted, twin: MtpTwin) -> None:
    for tokens, chain in drafted:
        if len(tokens) > 1:  # a single token has no state before it
            assert chain == twin.best_drafts(tokens, len(chain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arithmetic", ["auto", "torch"])
def test_drafts_are_those_of_the_slow_twin(
    twins: dict[str, MtpTwin], kind: str, arithmetic: str, drafted: Drafted
) -> None:
    generated(make(twins[kind], arithmetic=arithmetic), temperature=0.0)
    assert len(drafted) > 60
    check(drafted, twins[kind])


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "mellum"])
@torch.no_grad()
def test_the_slow_twin_is_transformers_own_drafter(twins: dict[str, MtpTwin], kind: str) -> None:
    twin = twins[kind]
    twin.policy._keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"model\.layers\.3\."]
    head = MtpModel.from_pretrained(twin.policy).eval()
    for seed in range(20):
        text = torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(seed))
        states = twin.policy(text, output_hidden_states=True).hidden_states[-1][:, :-1]
        tokens, _, _ = head(text[:, 1:], states, None, torch.arange(1, 24)[None], None)
        assert tokens[0].tolist() == twin.best_drafts(text[0].tolist(), 1)


@pytest.mark.parametrize(
    ("kind", "plan"), [*(("deepseek_v3", plan) for plan in (CHAIN, TREE, "model", "adaptive")), ("mellum", TREE)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_mtp_layer_changes_no_bit(twins: dict[str, MtpTwin], kind: str, plan: Any, dtype: str) -> None:
    plain = generated(make(twins[kind], None, dtype=dtype))
    assert generated(make(twins[kind], dtype=dtype, speculation=plan, max_sequences=2)) == plain


@pytest.mark.parametrize("move", [at_once, in_rounds])
def test_moves_and_preemptions_keep_bits_and_drafts(twins: dict[str, MtpTwin], move: Any, drafted: Drafted) -> None:
    twin, asked = twins["deepseek_v3"], request("r", (5, 6, 7), temperature=0.0)
    plain = make(twin, None)
    plain.submit(asked)
    wanted = bits(drain(plain)["r"])
    here, there = make(twin), make(twin)
    here.submit(asked)
    for _ in range(3):
        here.step()
    here.preempt("r")
    for _ in range(3):
        here.step()
    move(here, there, "r", np.random.default_rng(0))
    assert bits(drain(there)["r"]) == wanted
    check(drafted, twin)


def test_new_weights_of_the_policy_leave_the_layer_as_it_was(twins: dict[str, MtpTwin], drafted: Drafted) -> None:
    engine, plain = make(twins["deepseek_v3"]), make(twins["deepseek_v3"], None)
    generated(engine)
    later = copy.copy(twins["deepseek_v3"])
    later.policy = perturbed(later.policy, 0.5)
    weights = later.policy.state_dict()
    engine.load_weights(weights, version=1)
    plain.load_weights(weights, version=1)
    assert generated(engine) == generated(plain)
    drafted.clear()
    generated(engine, temperature=0.0)
    assert len(drafted) > 60
    check(drafted, later)


@pytest.mark.parametrize(
    ("name", "said"), [("eh_proj", "eh_proj"), ("input_layernorm", "input_layernorm"), ("", "MTP layers")]
)
def test_a_checkpoint_without_the_layers_weights_is_refused(
    twins: dict[str, MtpTwin], tmp_path: Path, name: str, said: str
) -> None:
    folder = Path(shutil.copytree(twins["glm4_moe"].folder, tmp_path / "policy"))
    weights = load_file(folder / "model.safetensors")
    left = {each: tensor for each, tensor in weights.items() if f"layers.3.{name}" not in each}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=f"drafter: .*{said}"):
        Engine.from_pretrained(folder, drafter="mtp")


def test_weights_of_another_shape_are_refused(twins: dict[str, MtpTwin], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(twins["glm4_moe"].folder, tmp_path / "policy"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.enorm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match="drafter: cannot load the policy's MTP layers"):
        Engine.from_pretrained(folder, drafter="mtp")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head: setattr(head, "use_shared_post_norm", True), "a shared norm"),
        (lambda head: setattr(head, "rotary_emb", None), "no rotary angles"),
        (lambda head: setattr(head.layers[0], "mtp_block", Unattending()), "cannot run the attention"),
        (lambda head: setattr(head.layers[0], "mtp_block", torch.nn.Identity()), "cannot run the attention"),
    ],
)
def test_layers_that_cannot_draft_here_are_refused(
    twins: dict[str, MtpTwin], monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    genuine = MtpModel.from_pretrained

    def changed(*given: Any) -> Any:
        head = genuine(*given)
        change(head)
        return head

    monkeypatch.setattr(MtpModel, "from_pretrained", changed)
    with pytest.raises(InvalidRequest, match=f"drafter: .*{said}"):
        make(twins["glm4_moe"])


def test_a_policy_that_has_no_such_layers_is_refused(tmp_path: Path) -> None:
    random_model("llama", seed=3).save_pretrained(tmp_path / "policy")
    with pytest.raises(InvalidRequest, match=r"drafter: .*llama names no MTP layers"):
        Engine.from_pretrained(tmp_path / "policy", drafter="mtp")

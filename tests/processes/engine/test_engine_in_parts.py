"""Models in two processes generate the tokens of the whole ones, and their sequences move."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import moving
import pytest
import two_parts
from hypothesis import settings
from on_device import why_no_second
from rank_sets import run_ranks
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhfspec.engine.core import make_engine
from rlhfspec.huggingface.loading import load_model
from rlhfspec.tiny import random_model
from rlhfspec.tiny.random_models import SHAPE

Found = dict[str, dict[str, two_parts.Found]]

LOG_PROBS = 2e-5  # sums are added up in another order


def save_models(folder: Path) -> None:
    for kind in (*two_parts.KINDS, "phi3"):
        random_model(kind, seed=3).save_pretrained(folder / kind)
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3}
    LlamaForCausalLM(LlamaConfig(**SHAPE | heads)).save_pretrained(folder / "three-kv-heads")
    GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=1, n_head=4, vocab_size=97)).save_pretrained(folder / "gpt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    save_models(folder)
    run_ranks("two_parts", 2, str(folder))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


def the_same(ours: two_parts.Found, theirs: two_parts.Found) -> None:
    assert theirs.keys() == ours.keys()
    for name, (tokens, log_probs) in theirs.items():
        assert ours[name][0] == tokens, name
        assert ours[name][1] == pytest.approx(log_probs, abs=LOG_PROBS), name


def test_engine_in_parts_gives_whole_models_tokens(folder: Path, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["two_parts", str(folder)])
    path = folder / two_parts.DRIVEN
    options = two_parts.config(kv_cache_tokens=352)
    whole = dict(two_parts.driven(make_engine(load_model(path), options, draft=two_parts.drafter(path))))
    theirs = found[two_parts.DRIVEN]
    assert theirs.keys() == whole.keys()
    for name, ours in whole.items():
        the_same(ours, theirs[name])
    assert "r9" not in theirs["tree, disturbed"]


def test_a_row_has_the_same_bits_alone_and_in_any_batch_or_tree(folder: Path, found: Found) -> None:
    """A row's log-probs are equal alone, among others, in trees and after a preemption."""
    theirs = found[two_parts.DRIVEN]
    for name, run in theirs.items():
        if name != "newer":
            assert run == {request: theirs["alone"][request] for request in run}, name
    for kind in two_parts.KINDS:
        assert (folder / f"{kind}-bits").read_text() == "every row's own"


@pytest.mark.parametrize("kind", two_parts.KINDS)
def test_model_families_are_cut_in_two_and_give_the_same_tokens(kind: str, folder: Path, found: Found) -> None:
    whole = load_model(folder / kind)
    size = sum(weight.numel() for weight in whole.parameters())
    for rank in (0, 1):
        assert int((folder / f"{kind}-{rank}").read_text()) < 0.57 * size
    if kind != two_parts.DRIVEN:
        engine = make_engine(whole, two_parts.config(speculation="off"))
        the_same(two_parts.run(engine, two_parts.requests()), found[kind]["off"])


@pytest.mark.parametrize(("name", "why"), two_parts.REFUSED.items())
def test_a_model_that_cannot_be_cut_is_refused_with_its_reason(name: str, why: str, folder: Path) -> None:
    for rank in (0, 1):
        said = (folder / f"{name}-{rank}").read_text()
        assert "cannot be cut over 2 processes" in said
        assert why in said


def test_parts_on_their_own_devices_hold_the_smaller_number_of_blocks(folder: Path) -> None:
    """`two_devices.py` checks that no host tensor goes through the devices' group."""
    if reason := why_no_second():
        pytest.skip(reason)
    run_ranks("two_parts_on_devices", 2, str(folder), popen=subprocess.Popen)
    first, second = (int((folder / f"blocks-{rank}").read_text()) for rank in (0, 1))
    assert first == second < two_parts.config(max_sequences=64, max_context=512).num_blocks
    engine = make_engine(load_model(folder / two_parts.DRIVEN), two_parts.config(speculation="off"))
    theirs = json.loads((folder / "on-devices.json").read_text())
    the_same({name: run for name, run in two_parts.run(engine, two_parts.requests()).items() if name != "r9"}, theirs)


Found = dict[str, Any]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("groups")
    moving.model().save_pretrained(folder)
    num_examples = 4 if settings.get_current_profile_name() == "whole" else 1
    run_ranks("two_groups", 2, str(folder), str(num_examples))
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


def test_a_move_carries_the_kv_of_all_heads_and_recomputes_nothing(moved: Found) -> None:
    move, whole = moved["a move"], moving.make()
    assert move["same"] == [True, True]
    assert move["widths"] == [space.bytes_per_position for space in whole.state.spaces], "as of a whole model"
    assert (move["prefill"], move["recomputed"]) == (0, 0)
    assert move["is equal"]
    assert move["free"] == [move["blocks"]] * 2


def test_forced_moves_cover_drafts_shared_prompts_and_moves_given_up(moved: Found) -> None:
    seen = moved["seen"]
    wanted = {"moved", "moved twice or more", "given up", "drafted", "shares a prompt there"}
    assert wanted <= {what for what, times in seen.items() if times}, seen


def test_moves_between_a_whole_model_and_parts_are_refused(moved: Found) -> None:
    refused = moved["refused"]
    for name in ("a whole", "parts", "tokens of a whole", "tokens of parts"):
        field, said = refused[name]
        assert field == "architecture"
        assert "of 2 processes" in said
    assert refused["a whole goes on"] == refused["parts goes on"] == "length"


def test_a_move_is_refused_if_weights_differ_in_any_process(moved: Found) -> None:
    [field, _] = moved["refused"]["other weights"]
    assert field == "fingerprint"

"""Sequences move between engines of two-process models and keep tokens and log-probs."""

import json
from typing import Any

import moving
import pytest
from hypothesis import settings
from rank_sets import run_ranks

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("groups")
    moving.model().save_pretrained(folder)
    num_examples = 4 if settings.get_current_profile_name() == "whole" else 1
    run_ranks("two_groups", 2, str(folder), str(num_examples))
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


def test_the_kv_of_all_heads_comes_along_and_nothing_is_computed_again(found: Found) -> None:
    move, whole = found["a move"], moving.make()
    assert move["same"] == [True, True]
    assert move["widths"] == [space.bytes_per_position for space in whole.state.spaces], "as of a whole model"
    assert (move["prefill"], move["recomputed"]) == (0, 0)
    assert move["is equal"]
    assert move["free"] == [move["blocks"]] * 2


def test_forced_moves_meet_what_can_happen_to_them(found: Found) -> None:
    seen = found["seen"]
    wanted = {"moved", "moved twice or more", "given up", "drafted", "shares a prompt there"}
    assert wanted <= {what for what, times in seen.items() if times}, seen


def test_a_whole_model_and_parts_of_it_refuse_each_other_and_the_sequence_goes_on(found: Found) -> None:
    refused = found["refused"]
    for name in ("a whole", "parts", "tokens of a whole", "tokens of parts"):
        field, said = refused[name]
        assert field == "architecture"
        assert "of 2 processes" in said
    assert refused["a whole goes on"] == refused["parts goes on"] == "length"


def test_weights_that_differ_in_another_process_alone_are_others(found: Found) -> None:
    [field, _] = found["refused"]["other weights"]
    assert field == "fingerprint"

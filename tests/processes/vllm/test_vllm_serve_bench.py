"""The benchmark of chats measures vLLM's own server, with rollouts of lower priority beside."""

import json
from pathlib import Path

import pytest
from bench_models import untrained_pair_in
from runs import command
from vllm_children import python_with_vllm

pytestmark = pytest.mark.timeout(900)


def test_chats_with_vllm_are_measured_alone_and_beside_rollouts(tmp_path: Path) -> None:
    python, model = python_with_vllm(), untrained_pair_in(tmp_path / "models").target
    words = ["bench", "serve", "--model", str(model), "--vllm-python", str(python), "--rate", "10", "--chats", "8",
             "--tokens", "8", "--repeats", "1", "--dtype", "float32", "--json", str(tmp_path / "out.json")]  # fmt: skip
    command([*words, "--modes", "vllm-alone,vllm-rollouts,vllm-priority"], 0)
    rows = {row["mode"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert {mode: len(row["turns"][0]["answers"]) for mode, row in rows.items()} == {
        "vllm-alone": 8, "vllm-rollouts": 0, "vllm-priority": 8,
    }  # fmt: skip
    assert rows["vllm-alone"]["turns"][0]["num_rollout_tokens"] == 0
    assert rows["vllm-rollouts"]["rollout_speed"] > 0
    assert 0 < rows["vllm-priority"]["kept"]["value"] < 1.5

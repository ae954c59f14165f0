import os
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from runs import write_models
from small_job import a_job
from vllm_children import python_with_vllm

from rlhfspec.engine import from_job as own_from_job
from rlhfspec.engine.vllm import from_job
from rlhfspec.job import RLHFJob
from rlhfspec.testing.engine import request, run
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there


def job_of(folder: Path, **generator: Any) -> RLHFJob:
    return a_job(
        model={"path": str(folder / "policy")}, roles={"generator": generator},
        dataset={"maxPromptTokens": 16}, generation={"maxTokens": 24, "speculation": {"mode": "off"}},
    )  # fmt: skip


def asked() -> list[Any]:
    return [request(f"r{seed}", (5, 9, seed + 3), seed=seed, max_tokens=24) for seed in range(4)]


def ranks_of(pid: int) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(each.name)) == pid:
                found.append((each / "cmdline").read_text().replace("\0", " ").strip())
    return sorted(name for name in found if "Worker" in name)


def test_tensor_parallel_of_the_job_is_vllms_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_with_vllm()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "struct.py").write_text("raise ImportError('imported from a folder that anyone can write')")
    write_models(tmp_path, random_model("llama", seed=0, vocab_size=VOCAB_SIZE, head_dim=32))
    with closing(from_job.make(job_of(tmp_path, tensorParallel=2), lambda: None)) as engine:
        assert len(ranks_of(engine.pid)) == 2, ranks_of(engine.pid)
        theirs = run(engine, *asked())
    ours = run(own_from_job.make(job_of(tmp_path), lambda: None), *asked())
    assert {n: x.token_ids for n, x in theirs.items()} == {n: x.token_ids for n, x in ours.items()}

"""Script of test_engine_in_parts.py, once a rank: generates with split and whole models. argv: a folder."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec.common.ranks.meeting import joined
from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward.models import follow_engine
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.cutting import load_part
from rlhfspec.huggingface.loading import load_model
from rlhfspec.tiny import perturbed

KINDS = ("llama", "qwen3", "llama-tied", "gemma2", "gpt-neox", "phi")  # norms of heads, windows, biases
DRIVEN = "llama"  # through all that an engine does
REFUSED = {"three-kv-heads": "num_key_value_heads is 3", "phi3": "rowwise_split_input", "gpt2": "no plan for GPT2"}
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=3)
SUFFIX_TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)
MODES: tuple[tuple[str, str | DraftPlan], ...] = (
    ("off", "off"), ("suffix", "suffix"), ("model", "model"), ("adaptive", "adaptive"),
    ("tree", TREE), ("suffix tree", SUFFIX_TREE),
)  # fmt: skip
Found = dict[str, tuple[list[int], list[float]]]


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"max_sequences": 8, "max_context": 96, "num_threads": 1, "profile": False} | options)


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    stems = [tuple(rng.integers(3, 97, length).tolist()) for length in (3, 21, 37)]
    return [
        Request(
            id=f"r{index}", prompt_token_ids=stems[index % 3], seed=100 + index, group=f"g{index % 3}",
            params=SamplingParams(max_tokens=8 + index, temperature=(1.0, 0.7, 0.0)[index % 3], ignore_eos=True),
        )
        for index in range(10)
    ]  # fmt: skip


def run(engine: Engine, some: list[Request], *, disturbed: bool = False) -> Found:
    for request in some:
        engine.submit(request)
    found: Found = {}
    step = 0
    while engine.has_work:
        step += 1
        if disturbed and step % 3 == 0 and engine.scheduler.running:
            engine.preempt(engine.scheduler.running[0].request.id)
        if disturbed and step == 4:
            engine.cancel("r9")
        for done in engine.step().finished:
            found[done.id] = list(done.token_ids), list(done.log_probs)
        engine.check_integrity()
    return found


def driven(engine: Engine) -> Iterator[tuple[str, Found]]:
    alone: Found = {}
    for request in requests():
        alone |= run(engine, [request])
        engine.forget_kept()
    yield "alone", alone
    for name, mode in MODES:
        engine.set_speculation(mode)
        yield name, run(engine, requests())
        engine.forget_kept()
        yield f"{name}, disturbed", run(engine, requests(), disturbed=True)
    newer = perturbed(load_model(Path(sys.argv[1]) / DRIVEN), 0.3).state_dict()
    head = next(iter(newer))
    for bad in ({**newer, head: newer[head][:-1]}, {head: newer[head]}):
        try:
            engine.load_weights(bad, version=1)
        except ValueError:
            continue
        raise AssertionError("weights of another shape were taken")
    engine.submit(requests()[5])
    engine.step()
    engine.load_weights(newer, version=1)  # what runs goes on under them
    yield "newer", run(engine, requests()[:4])


def drafter(path: Path) -> Any:
    return perturbed(load_model(path), 0.15)


if __name__ == "__main__":
    folder, found = Path(sys.argv[1]), {}
    with joined(timeout_seconds=100.0, silence_seconds=100.0) as ranks:
        for name in REFUSED:
            try:
                load_part(folder / name, ranks)
            except InvalidRequest as error:
                (folder / f"{name}-{ranks.rank}").write_text(str(error))
        for kind in KINDS:
            part = load_part(folder / kind, ranks)
            (folder / f"{kind}-{ranks.rank}").write_text(str(sum(weight.numel() for weight in part.parameters())))
            options = config(kv_cache_tokens=352, profile=True) if kind == DRIVEN else config(speculation="off")
            if ranks.rank > 0:
                follow_engine(part, options, ranks)
                continue
            engine = make_engine(part, options, draft=drafter(folder / kind) if kind == DRIVEN else None, group=ranks)
            found[kind] = dict(driven(engine)) if kind == DRIVEN else {"off": run(engine, requests())}
            (folder / f"{kind}-bits").write_text(engine.reports["model"].bits)
            engine.close()
    if found:
        (folder / "found.json").write_text(json.dumps(found))

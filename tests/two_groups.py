"""Script of test_engine_in_parts.py, once a rank. argv: a folder with the model; the number of random examples."""

import copy
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import moving
import numpy as np
import torch.distributed as dist
from forced_moves import play, unmoving
from hypothesis import given, settings, strategies as st

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.engine.base import Watermark
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward.models import follow_engine
from rlhfspec.errors import SequenceStateError
from rlhfspec.huggingface.cutting import load_part

NUM_GROUPS = 5  # the first engine's for good, and four in turns: an engine is closed before the fourth after it
PATIENCE = timedelta(seconds=600.0)  # the first engine has nothing to do for long
OPTIONS: dict[str, Any] = {"max_sequences": 8, "max_context": 128, "profile": False, "num_threads": 1}
SEEDS = (0,)  # of moves that are looked at closely
Found = dict[str, Any]


def config_of(told: dict[str, Any]) -> EngineConfig:
    plan = told["speculation"]
    return EngineConfig(**told | {"speculation": DraftPlan(**plan) if isinstance(plan, dict) else plan})


class Groups:
    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder, self._ranks, self._num_made = folder, ranks, 0
        self._groups = [
            replace(ranks, commands=dist.new_group(timeout=PATIENCE), host=dist.new_group(timeout=PATIENCE))
            for _ in range(NUM_GROUPS)
        ]

    def make(self, *, tokenizer: Any = None, **options: Any) -> Engine:
        config = EngineConfig(**OPTIONS | {"speculation": moving.TREE} | options)
        self._ranks.broadcast(asdict(config))
        group = self._groups[self._next()]
        draft = copy.deepcopy(moving.draft())
        return make_engine(self._part(group), config, draft=draft, tokenizer=tokenizer, group=group)

    def leave(self) -> None:
        self._ranks.broadcast(None)

    def follow(self) -> None:
        threads: dict[int, threading.Thread] = {}
        while (told := self._ranks.broadcast()) is not None:
            config, place = config_of(told), self._next()
            if place in threads:
                threads[place].join()
            group = self._groups[place]
            threads[place] = threading.Thread(target=follow_engine, args=(self._part(group), config, group))
            threads[place].start()
        for thread in threads.values():
            thread.join()

    def _next(self) -> int:
        place = (self._num_made - 1) % (NUM_GROUPS - 1) + 1 if self._num_made else 0
        self._num_made += 1
        return place

    def _part(self, group: Ranks) -> Any:
        return load_part(self._folder, group)


def a_move(make: Callable[..., Engine]) -> Found:
    here, there = make(), make()
    here.submit(moving.request("x", max_tokens=60))
    for _ in range(4):
        here.step()
    mark = there.reserve(here.manifest("x"))
    kv = here.export_range("x", mark)
    there.import_range(kv)
    here.step()
    there.import_sequence(here.export_sequence("x", kv.end))
    again = there.export_range("x", Watermark(epoch=there.manifest("x").epoch, positions=mark.positions))
    same = [np.array_equal(theirs, ours[: len(theirs)]) for theirs, ours in zip(kv.kv, again.kv, strict=True)]
    here.cancel("x")
    num_prefill = there.step().num_prefill_tokens
    moved = moving.bits(moving.drain(there)["x"])
    here.submit(moving.request("x", max_tokens=60))
    unmoved = moving.bits(moving.drain(here)["x"])
    widths = [part.shape[1] for part in kv.kv]
    found = {"same": same, "prefill": num_prefill, "recomputed": there.stats().num_recomputed_tokens, "widths": widths,
             "is equal": moved == unmoved, "free": [each.stats().num_free_blocks for each in (here, there)],
             "blocks": here.stats().num_blocks}  # fmt: skip
    for engine in (here, there):
        engine.check_integrity()
        engine.close()
    return found


def refused(make: Callable[..., Engine]) -> Found:
    whole, here, there = moving.make(), make(), make()
    found: Found = {}
    for name, source, destination in (("a whole", whole, here), ("parts", here, whole)):
        source.submit(moving.request("x"))
        source.step()
        manifest = source.manifest("x")
        found[name] = why_not(lambda manifest=manifest, to=destination: to.reserve(manifest))
        state = replace(source.export_sequence("x"), rest=None)
        found[f"tokens of {name}"] = why_not(lambda state=state, to=destination: to.import_sequence(state))
        source.reattach("x")
        found[f"{name} goes on"] = moving.drain(source)["x"].finish_reason
        assert not destination.has_work
    newer = dict(moving.model().state_dict())
    last_head = newer["model.layers.0.self_attn.k_proj.weight"].clone()
    last_head[-1] += 0.5
    here.load_weights(newer, version=1)
    there.load_weights({**newer, "model.layers.0.self_attn.k_proj.weight": last_head}, version=1)
    here.submit(moving.request("y"))
    here.step()
    found["other weights"] = why_not(lambda: there.reserve(here.manifest("y")))
    for engine in (here, there):
        engine.close()
    return found


def why_not(do: Callable[[], object]) -> list[str]:
    try:
        do()
    except SequenceStateError as error:
        return [error.field, str(error)]
    return []


def lead(groups: Groups, folder: Path, num_examples: int) -> None:
    plain = unmoving(groups.make)
    found: Found = {"a move": a_move(groups.make), "refused": refused(groups.make)}
    found["seen"] = sum((play(seed, make=groups.make, num_sequences=5) for seed in SEEDS), Counter[str]())

    @settings(max_examples=num_examples, deadline=None, database=None, derandomize=num_examples == 1)
    @given(seed=st.integers(len(SEEDS), 1 << 20))
    def forced_to_move_at_random_the_bits_are_those_of_the_unmoved(seed: int) -> None:
        play(seed, make=groups.make, num_sequences=5)

    forced_to_move_at_random_the_bits_are_those_of_the_unmoved()
    plain.close()
    groups.leave()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with joined(timeout_seconds=600.0, silence_seconds=600.0) as ranks:
        groups = Groups(folder, ranks)
        if ranks.rank:
            groups.follow()
        else:
            lead(groups, folder, int(sys.argv[2]))

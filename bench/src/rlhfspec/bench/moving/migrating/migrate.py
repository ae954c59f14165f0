"""Benchmark of moves of one sequence between two generators, each on its own core and decoding eight others.

Each link has two processes, asleep between its turns. A stage prefills a sequence, then moves it there and back, a
few tokens further each time. Once per stage its KV is recomputed instead, while the same others run.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from rlhfspec.bench import links
from rlhfspec.bench.bars import bars_of_migrate
from rlhfspec.bench.generating.results import published
from rlhfspec.bench.links import LinkCost
from rlhfspec.bench.moving.migrating.results import Cell, MigrateResults, Moment
from rlhfspec.bench.moving.migrating.watching import Watch
from rlhfspec.bench.moving.pair import NUM_GENERATORS, Pair, sequences_of
from rlhfspec.bench.processor import processor
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.errors import InvalidRequest
from rlhfspec.job.choices.links import LINKS_OF_A_JOB
from rlhfspec.messages.records import Move
from rlhfspec.tiny.corpus import prompts, token_stream

_WIDE, LARGE_KV = "wide", "large-kv"
_DECODING = {"plain": "off", "drafts": "adaptive"}
NUM_OTHERS = 8  # on each generator
LARGE_KV_TOKENS = 1024  # 67 MB
_MAX_CONTEXT, MIN_CONTEXT = 2048, 1536
_BEFORE, _BEHIND = 48, 400  # tokens below its size at the start, and room to grow beyond it
_LEAST_GROWTH = 200
_ROOM_TOKENS = 12_000  # of KV: the moved sequence and the others, with draft trees
_LINK_SIZES = (4 << 20,)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateSettings:
    model: str
    draft: str | None
    large_kv: str | None = None  # folder of a model with 65 KB of KV per token
    links: tuple[str, ...] = ("shm", "tcp", "nixl", "torch")
    tokens: tuple[int, ...] = (512, 1024, 2000)
    decoding: tuple[str, ...] = tuple(_DECODING)
    repeats: int = 20  # moves per cell
    moves_per_stage: int = 4  # of one sequence, between two prefills
    link_rounds: int = 5
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, known in (("links", LINKS_OF_A_JOB[1:]), ("decoding", tuple(_DECODING))):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidRequest(name, value, f"must be among {', '.join(known)}")
        for tokens in self.tokens:
            if not 2 * _BEFORE < tokens <= _MAX_CONTEXT - _BEFORE:
                raise InvalidRequest("tokens", tokens, f"must be {2 * _BEFORE + 1} to {_MAX_CONTEXT - _BEFORE}")
        for name in ("repeats", "moves_per_stage"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, getattr(self, name), "must be >= 1")

    @property
    def max_context(self) -> int:
        """Return the engines' context length, at which the moved sequence ends."""
        largest = max(*self.tokens, LARGE_KV_TOKENS if self.large_kv else 0)
        return min(max(largest + _BEHIND, MIN_CONTEXT), _MAX_CONTEXT)

    @property
    def num_stages(self) -> int:
        return -(-self.repeats // self.moves_per_stage)


@dataclass(slots=True)
class _Found:
    moves: list[Moment] = field(default_factory=list)
    prefill_gaps: list[float] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


_Key = tuple[str, str, int, str]  # model, decoding, tokens, link


class MigrateBenchmark:
    def __init__(self, settings: MigrateSettings, report: Report = print) -> None:
        self._settings = settings
        self._report = report
        self._skipped: list[str] = []
        self._arithmetic = ""
        self._num_stages = 0

    def run(self) -> MigrateResults:
        settings, found = self._settings, dict[_Key, _Found]()
        kinds = [kind for kind in settings.links if self._is_here(kind)]
        self._measure_model(found, _WIDE, settings.model, settings.draft, kinds)
        if settings.large_kv is not None:
            self._measure_model(found, LARGE_KV, settings.large_kv, None, kinds)
        cells = tuple(_cell(key, each) for key, each in found.items() if each.moves and each.prefill_gaps)
        return MigrateResults(
            machine=processor(arithmetic=self._arithmetic),
            settings=published(settings, "model", "draft", "large_kv"),
            cells=cells,
            bars=bars_of_migrate(cells),
            links=self._measure_links(kinds),
            skipped=tuple(self._skipped),
        )

    def _measure_links(self, kinds: list[str]) -> tuple[LinkCost, ...]:
        if not self._settings.link_rounds:
            return ()
        self._report("links without engines")
        alone = [links.COPY, links.SOCKET, *(kind for kind in kinds if kind != "torch")]
        return tuple(links.measure(alone, _LINK_SIZES, rounds=self._settings.link_rounds))

    def _is_here(self, kind: str) -> bool:
        if kind == "nixl" and importlib.util.find_spec("nixl") is None:
            self._skipped.append("nixl: not installed")
            return False
        return True

    def _measure_model(
        self, found: dict[_Key, _Found], model: str, target: str, draft: str | None, kinds: list[str]
    ) -> None:
        with ExitStack() as opened:
            pairs = {kind: pair for kind in kinds if (pair := self._open(opened, kind, target, draft)) is not None}
            for model_, decoding, tokens, kind in self._turns(model, list(pairs)):
                key = (model_, decoding, tokens, kind)
                each = found.setdefault(key, _Found())
                if len(each.moves) < self._settings.repeats:
                    told = f"{len(each.moves)} of {self._settings.repeats} moves"
                    self._report(f"{model_}, {decoding}, {tokens} tokens, {kind}: {told}")
                    self._stage(pairs[kind], decoding, tokens, each)

    def _turns(self, model: str, kinds: list[str]) -> Iterator[_Key]:
        settings = self._settings
        tokens = settings.tokens if model == _WIDE else (LARGE_KV_TOKENS,)
        decoding = settings.decoding if model == _WIDE else ("plain",)
        for number in range(2 * settings.num_stages):  # twice as many as needed, in case moves fail
            start = number % len(kinds) if kinds else 0
            for mode in decoding:
                for size in tokens:
                    for kind in kinds[start:] + kinds[:start]:
                        yield model, mode, size, kind

    def _open(self, opened: ExitStack, kind: str, target: str, draft: str | None) -> Pair | None:
        self._report(f"loading the engines for {kind}")
        settings, pair = self._settings, opened.enter_context(Pair.start())
        try:
            loaded = pair.load(target=target, draft=draft, dtype=settings.dtype, link=kind, num_threads=1,
                               max_sequences=16, max_context=settings.max_context,
                               kv_cache_tokens=_ROOM_TOKENS)  # fmt: skip
        except WorkerFailed as failure:
            self._skipped.append(f"{kind}: {str(failure).splitlines()[-1]}")
            return None
        self._arithmetic = loaded["arithmetic"]
        self._stage(pair, "plain", min(LARGE_KV_TOKENS, *self._settings.tokens), _Found())  # connects, warms up
        return pair

    # -- a stage ----------------------------------------------------------------------------------------------

    def _stage(self, pair: Pair, decoding: str, tokens: int, found: _Found) -> None:
        self._num_stages += 1
        name = f"stage-{self._num_stages}"
        moved = f"{name}/moved/0"
        others = [[f"{name}/other-{number}/{i}" for i in range(NUM_OTHERS)] for number in range(NUM_GENERATORS)]
        self._begin(pair, name, decoding, tokens, moved, others)
        watch = Watch(pair, moved)
        here, is_there = 0, watch.wait_for_tokens(0, 3)
        for number in range(self._settings.moves_per_stage if is_there else 0):
            if number == self._settings.moves_per_stage // 2 and (gap := watch.prefill_gap(here)) is not None:
                found.prefill_gaps.append(gap)
            move = Move(id=f"{name}/{number}", job="bench", sample_id=moved, source=here, destination=1 - here,
                        gain_seconds=1.0, reason="measured")  # fmt: skip
            moment, reason = watch.move(move)
            if moment is None:
                found.kept.append(reason)
                break
            found.moves.append(moment)
            here = 1 - here
        pair.ask_all("cancel", "cancelled", ids=[moved, *others[0], *others[1]])
        pair.ask_all("end", "ended")
        time.sleep(0.05)  # for tombstones and late answers of the last move

    def _begin(self, pair: Pair, name: str, decoding: str, tokens: int, moved: str, others: list[list[str]]) -> None:
        size = min(tokens - _BEFORE, _MAX_CONTEXT - _LEAST_GROWTH)
        text = token_stream(size, seed=self._num_stages)
        texts = [tuple(text), *(tuple(each) for each in prompts(NUM_GENERATORS * NUM_OTHERS, seed=7))]
        ids = [moved, *others[0], *others[1]]
        room = self._settings.max_context
        lengths = [room - len(text), *([room // 2] * (len(ids) - 1))]
        sequences = [
            sequences_of([id], [prompt], [length], [seed], [seed], max_tokens=length)[0]
            for seed, (id, prompt, length) in enumerate(zip(ids, texts, lengths, strict=True))
        ]
        pair.ask_all("stage", "ready", name=name, speculation=_DECODING[decoding], sequences=sequences, watch=[moved])
        pair.tell(0, "go", ids=[moved, *others[0]])
        pair.tell(1, "go", ids=others[1])


def _cell(key: _Key, found: _Found) -> Cell:
    model, decoding, tokens, link = key
    return Cell(model=model, decoding=decoding, link=link, num_tokens=tokens, moves=tuple(found.moves),
                prefill_gaps=tuple(found.prefill_gaps), kept=tuple(found.kept))  # fmt: skip

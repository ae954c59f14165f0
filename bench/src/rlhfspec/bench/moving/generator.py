"""Generator of the move benchmarks: a process pinned to one core and controlled by lines of JSON.

    {"load": {...}}    -> {"loaded": {...}}                      create an engine and a mover
    {"meet": {...}}    -> {"met": {}}                            set the peers to move to
    {"stage": {...}}   -> {"ready": {}}                          prepare requests
    {"go": {"ids"}}    -> {"finished": {"ids", "at"}}, ...       run some of them
    {"move": {...}}    -> {"moved": {...}}                       move a sequence
    {"cpu": {}}        -> {"cpu": {...}}                         CPU so far, longest recent engine hold
    {"end": {}}        -> {"ended": {...}}                       digests, and every step of the stage

The generator also sends {"load": {...}} unprompted, as in a run. Times are of the monotonic clock, which processes of a
machine share. The engine steps in its own thread; the event loop handles lines and moves.

Only this file knows response lengths. The engine gets the maximum, and sequences are cut off at their length, so that
it cannot favour long ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import statistics
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.base import EngineStep
from rlhfspec.generator.load import LoadMeter
from rlhfspec.messages.records import Move
from rlhfspec.moves.migration.base import Peer
from rlhfspec.moves.migration.control import StreamControl, StreamControlServer
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.moves.migration.links.opening import Links, make_landing, open_sending
from rlhfspec.moves.migration.mover import Mover
from rlhfspec.telemetry.base import SampleProgress

_IDLE_SECONDS = 0.25
_RECENT_STEPS = 32


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    request: Request
    length: int


class NameCustody:
    """Custody (the mover's record of local sequences) that keeps only names, not prompts."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        return (b"", "") if sample_id in self.held else None

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None:
        self.held.add(sample_id)

    def arrived(self, sample_id: str, progress: SampleProgress) -> None:
        pass

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        self.held.discard(sample_id)

    def forgotten(self, sample_id: str, progress: SampleProgress) -> None:
        raise AssertionError(f"{sample_id} is lost: nothing is killed here")


class Generator:
    """Generator that executes lines of JSON and writes to `answers`."""

    def __init__(self, number: int, answers: IO[str]) -> None:
        self._number, self._answers = number, answers
        self._telling = threading.Lock()
        self._wake = threading.Event()
        self._calls = EngineCalls(self._wake.set)
        self._custody = NameCustody()
        self._incarnation = secrets.token_hex(4)
        self._control = StreamControl()
        self._planned: dict[str, PlannedRequest] = {}
        self._completions: list[Completion] = []
        self._steps: list[tuple[float, int, int, int, float]] = []
        self._watched: list[tuple[str, float, int]] = []  # sequence, end of a step, its tokens then
        self._watch: frozenset[str] = frozenset()
        self._calls_cpu = self._longest_held = 0.0
        self._is_leaving = False
        self._engine: Any = None
        self._meter: LoadMeter
        self._mover: Mover
        self._thread: threading.Thread | None = None
        self._server: StreamControlServer | None = None
        self._moves: set[asyncio.Task[None]] = set()

    async def serve(self, requests: IO[str]) -> None:
        """Serve until `requests` end."""
        loop = asyncio.get_running_loop()
        saying = asyncio.create_task(self._say_idle())
        try:
            while line := await loop.run_in_executor(None, requests.readline):
                [(name, arguments)] = json.loads(line).items()
                await getattr(self, f"_on_{name}")(**arguments)
        finally:
            saying.cancel()
            await self._close()

    async def _close(self) -> None:
        if self._engine is None:
            return
        await self._mover.close()
        self._is_leaving = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._server is not None:
            self._server.close()
        self._control.close()

    def _tell(self, name: str, **what: Any) -> None:
        with self._telling:
            print(json.dumps({name: what}), file=self._answers, flush=True)

    # -- requests -------------------------------------------------------------------------------------------

    async def _on_load(self, *, target: str, draft: str | None, link: str, **options: Any) -> None:
        self._engine = Engine.from_pretrained(target, drafter=draft, **options)
        name = f"generator-{self._number}"
        self._meter = LoadMeter(
            "bench", name, self._engine, worker=self._number, incarnation=self._incarnation,
            sequences=self._engine.sequences,
        )  # fmt: skip
        links = Links(make_landing(link), open_sending)
        self._mover = Mover(name, self._incarnation, self._engine, self._calls, self._control, links, self._custody)
        self._server = StreamControlServer()
        self._server.serve(self._mover.answer)
        self._thread = threading.Thread(target=self._work, name="engine")
        self._thread.start()
        peer = asdict(Peer(name=name, address=self._server.address, incarnation=self._incarnation))
        state = self._engine.state
        bytes_per_token = sum(space.bytes_per_position for space in state.spaces)
        arithmetic = state.target.runner.config.arithmetic
        self._tell("loaded", peer=peer, arithmetic=arithmetic, bytes_per_token=bytes_per_token)

    async def _on_meet(self, *, peers: list[dict[str, str]]) -> None:
        self._peers = [Peer(**peer) for peer in peers]
        self._tell("met")

    async def _on_stage(
        self, *, name: str, speculation: str, sequences: list[dict[str, Any]], watch: list[str] | None = None
    ) -> None:
        """Prepare a stage's requests, in groups of its own so that earlier stages do not help its drafts."""
        planned = [planned_of(name, **sequence) for sequence in sequences]

        def begin() -> None:
            self._engine.forget_kept()
            self._engine.set_speculation(speculation)
            self._planned = {each.request.id: each for each in planned}
            self._completions, self._steps, self._watched = [], [], []
            self._watch = frozenset(watch or ())

        await self._calls.call(begin)
        self._tell("ready")

    async def _on_go(self, *, ids: list[str]) -> None:
        self._custody.held.update(ids)

        def submit() -> None:
            for name in ids:
                self._engine.submit(self._planned[name].request)

        await self._calls.call(submit)

    async def _on_move(self, *, must_go: bool = False, **move: Any) -> None:
        """Begin a move; further commands are read meanwhile. `must_go`: move without KV rather than stay."""

        async def make() -> None:
            order = Move(**move)
            moved = await self._mover.move(order, self._peers[order.destination], must_go=must_go)
            self._tell("moved", at=time.monotonic(), **asdict(moved))

        task = asyncio.create_task(make())
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _on_cancel(self, *, ids: list[str]) -> None:
        self._custody.held.difference_update(ids)
        await self._calls.call(lambda: [self._engine.cancel(name) for name in ids])
        self._tell("cancelled")

    async def _on_preempt(self, *, id: str) -> None:
        """Preempt a sequence and empty the prefix cache, so that its KV is recomputed."""

        def preempt() -> None:
            self._engine.preempt(id)
            self._engine.forget_kept()

        await self._calls.call(preempt)
        self._tell("preempted", at=time.monotonic())

    async def _on_cpu(self) -> None:
        def read() -> dict[str, float]:
            calls, held = self._calls_cpu, self._longest_held
            self._longest_held = 0.0
            return {"calls": calls, "others": time.process_time() - time.thread_time(), "longest_held": held}

        self._tell("cpu", **await self._calls.call(read))

    async def _on_watched(self) -> None:
        """Report watched sequences' new tokens, and the median time of recent steps without prefill."""

        def read() -> dict[str, Any]:
            watched, self._watched = self._watched, []
            plain = [seconds for _, _, prefill, _, seconds in self._steps[-_RECENT_STEPS:] if not prefill]
            has_ended = any(done.id in self._watch for done in self._completions)
            step = statistics.median(plain) if plain else 0.0
            return {"steps": watched, "step_seconds": step, "has_ended": has_ended}

        self._tell("watched", **await self._calls.call(read))

    async def _on_end(self) -> None:
        def end() -> dict[str, Any]:
            self._engine.check_integrity()
            return {"digests": {done.id: digest_of(done) for done in self._completions}, "steps": self._steps}

        self._tell("ended", **await self._calls.call(end))

    async def _say_idle(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_SECONDS)
            if self._engine is not None and (load := await self._calls.call(self._meter.idle)) is not None:
                self._tell("load", **asdict(load))

    # -- the engine's thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_leaving:
                self._wake.clear()
                self._make_calls()
                if self._engine.has_work:
                    self._step()
                elif not self._calls.waiting and not self._is_leaving:
                    self._wake.wait()
        finally:
            self._calls.close()

    def _make_calls(self) -> None:
        if not self._calls.waiting:
            return
        cpu, began = time.thread_time(), time.perf_counter()
        self._calls.run()
        self._calls_cpu += time.thread_time() - cpu
        if self._engine.has_work:
            self._longest_held = max(self._longest_held, time.perf_counter() - began)

    def _step(self) -> None:
        report: EngineStep = self._engine.step()
        finished = [cut(done, self._planned[done.id].length) for done in report.finished]
        finished += [self._end_of(name) for name in self._at_their_ends()]
        now = time.monotonic()
        told = (now, report.num_decoding, report.num_prefill_tokens, report.num_committed, report.seconds)
        self._steps.append(told)
        self._look(now)
        self._meter.stepped(report)
        if finished:
            self._completions += finished
            self._custody.held.difference_update(done.id for done in finished)
            self._tell("finished", ids=[done.id for done in finished], at=now)
        if (load := self._meter.load()) is not None:
            self._tell("load", **asdict(load))

    def _at_their_ends(self) -> list[str]:
        state = self._engine.state
        ended = []
        for name, sequence in state.sequences.items():
            length = len(sequence.request.prompt_token_ids) + self._planned[name].length
            if sequence.has_row and state.rows.lengths[sequence.row] >= length:
                ended.append(name)
        return ended

    def _end_of(self, name: str) -> Completion:
        sequence = self._engine.state.sequences[name]
        self._engine.cancel(name)
        return cut(sequence.complete("length"), self._planned[name].length)

    def _look(self, now: float) -> None:
        state = self._engine.state
        for name in self._watch & state.sequences.keys():
            sequence = state.sequences[name]
            if sequence.has_row:
                self._watched.append((name, now, int(state.rows.lengths[sequence.row])))


def planned_of(
    stage: str, *, id: str, prompt: list[int], length: int, max_tokens: int, seed: int, group: int
) -> PlannedRequest:
    request = Request(
        id=id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=seed,
        group=f"{stage}/{group}",
    )
    return PlannedRequest(request, length)


def cut(done: Completion, length: int) -> Completion:
    """Return the completion cut to `length`, which drafts may have exceeded."""
    return replace(done, token_ids=done.token_ids[:length], log_probs=done.log_probs[:length])


def digest_of(done: Completion) -> str:
    """Return a hash of tokens, log-prob bits and finish reason."""
    content = repr((done.token_ids, done.log_probs, done.finish_reason))
    return hashlib.sha256(content.encode()).hexdigest()[:16]

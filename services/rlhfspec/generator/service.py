"""The generating stage: the engine between an inbox of prompts and a subject of samples."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

from rlhfspec.engine.base import Completion, EngineProtocol, Movable, Request
from rlhfspec.engine.params import SamplingParams
from rlhfspec.generator.dry import IdleScoring
from rlhfspec.generator.history import Histories
from rlhfspec.generator.load import Experts, LoadMeter
from rlhfspec.generator.moving import MovedPrompt, Moving
from rlhfspec.job import RLHFJob
from rlhfspec.job.generation import Generation
from rlhfspec.messages.records import Load, Prompt, Sample, Weights
from rlhfspec.messages.wire.codec import encode
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Delivery, Inbox, StageBus, give_back
from rlhfspec.stage.guest import HostedScoring
from rlhfspec.stage.new_weights import NewWeights
from rlhfspec.stage.tasks import together
from rlhfspec.stage.vitals import Vitals
from rlhfspec.telemetry.base import SampleProgress
from rlhfspec.training.weights import WeightStore
from rlhfspec.worker.ends import MoveEndpoint

log = logging.getLogger("rlhfspec.stage")
_IDLE_SECONDS = 0.5
ON_THE_WAY_SECONDS = 0.05
BURST_SECONDS = 0.05  # so long the engine steps between two looks at what came; a finished sample ends it sooner


class GeneratorService(Service):
    """Consumes Prompt, Weights; produces Sample, Load; waits for prompts, and room in the KV cache; unblocked by
    prompts, trainer. A prompt is acknowledged once its sample is published, so a lost generator loses no sample.

    It pulls what its engine can run, and a few prompts more; all others stay where whoever has room first takes them.
    Samples go to other generators and come from them while they run (`moving`); of these it is the `Custody`. Asked to
    stop, it hands what runs to the others, and back what is left.
    """

    def __init__(
        self,
        worker: int,
        vitals: Vitals,
        bus: StageBus,
        *,
        job: RLHFJob,
        engine: EngineProtocol,
        weights: WeightStore,
        move_endpoint: MoveEndpoint | None = None,
        hosted_scoring: HostedScoring | None = None,
    ) -> None:
        super().__init__("generator", worker, vitals)
        spec = job.spec
        self._bus = bus
        self._job = job
        self._engine = engine
        self._deadline = spec.roles.generator.deadline_seconds
        self._params = sampling_params(spec.generation)
        self._new_weights = NewWeights(self, weights, self._load, deadline_seconds=self._deadline, clock=bus.clock)
        self._announced: list[Weights] = []  # newer than the engine's
        self._prefetch = spec.prefetch
        self._piece = spec.pulled_at_a_time
        self._room = 0  # prompts that may still be pulled
        self._has_room = asyncio.Event()  # for a piece
        self._news = asyncio.Event()  # prompts or weights came, or the worker is asked to stop
        self._idle_scoring = IdleScoring(self, bus, hosted_scoring, self._news)
        self._pulled: deque[Delivery[Prompt]] = deque()  # not yet in the engine: just come, or before their weights
        self._running: dict[str, Delivery[Prompt]] = {}
        self._last_load: Load | None = None
        self._publishing: asyncio.Task[None] | None = None  # the samples of the last burst
        self._shares: dict[str, float] = {}  # of what runs: `_share_seconds` when it came
        self._share_seconds = 0.0  # of each piece of work, what fell to each sample that was there
        self._histories = Histories(keep=spec.algorithm.samples_per_prompt)
        movable = engine if isinstance(engine, Movable) else None  # else its samples stay where they began
        self._sequences = movable.sequences if movable is not None else tuple
        incarnation = move_endpoint.incarnation if move_endpoint is not None else ""
        name = f"generator-{worker}"
        self._meter = LoadMeter(
            job.metadata.name, name, engine, worker=worker, incarnation=incarnation, sequences=self._sequences
        )
        self._prompts: Inbox[Prompt]
        self._calls = EngineCalls(self._news.set)
        self._moving: Moving | None = None
        if move_endpoint is not None and movable is not None:
            link = spec.roles.generator.link
            mover = move_endpoint.mover(movable, self._calls, self, bus.clock, name=name, link=link)
            self._moving = Moving(self, bus, mover, job.metadata.name)

    async def run(self) -> None:
        async with await self._bus.subscribe(Prompt) as self._prompts, await self._bus.subscribe(Weights) as weights:
            self._look_for_room()
            parts = [self._pull(self._prompts), self._follow(weights), self._idle_scoring.follow(), self._work()]
            if self._moving is not None:
                parts += [self._moving.run(), self._say_idle()]
            try:
                await together(*parts)
                await self._leave()
                await self._published()
            finally:
                self._calls.close()
                if self._publishing is not None:
                    self._publishing.cancel()

    async def _leave(self) -> None:
        """What runs goes on elsewhere where it can; the rest is handed back."""
        num_running = len(self._running)
        if self._moving is not None:
            with self.vitals.working("handing over what runs", deadline_seconds=self._deadline):
                leaving = asyncio.create_task(self._moving.leave(self._begun))
                leaving.add_done_callback(lambda _: self._news.set())
                while not leaving.done():
                    await self._news.wait()
                    self._news.clear()
                    while self._calls.waiting:
                        await self.in_thread(self._calls.run)
                await leaving
                self._meter.is_leaving = True
                await self._bus.publish(self._meter.now())
                await self.in_thread(self._check_nothing_leaked)
        left = len(self._running)
        log.info(
            "left: of %d running samples %d go on elsewhere, %d are handed back", num_running, num_running - left, left
        )
        await give_back([delivery.held for delivery in (*self._pulled, *self._running.values())])

    async def _begun(self) -> list[str]:
        """What is worth more than its prompt."""

        def begun() -> list[str]:
            return [each.id for each in self._sequences() if each.num_generated or not each.is_waiting]

        return await self._calls.call(begun)

    def _check_nothing_leaked(self) -> None:
        """Without what still runs an engine is empty: no row, no block and no lease of any move is left in it."""
        for each in self._sequences():
            self._engine.cancel(each.id)
        self._engine.check_integrity()
        stats = self._engine.stats()
        assert stats.num_free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.num_free_blocks} blocks leaked"

    @property
    def load(self) -> Load | None:
        return self._last_load

    @property
    def owned(self) -> list[str]:
        return [*self._running, *(delivery.record.id for delivery in self._pulled)]

    async def stop(self) -> None:
        await super().stop()
        self._news.set()
        self._has_room.set()

    # -- the custody of prompts, for those who move samples ---------------------------------------------------

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        delivery = self._running.get(sample_id)
        if delivery is None:
            return None
        seconds = self._share_seconds - self._shares[sample_id]
        return MovedPrompt(encode(delivery.record), delivery.headers, seconds).to_bytes(), delivery.held.token

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None:
        moved = MovedPrompt.read(prompt)
        delivery = await self._prompts.adopt(moved.record, sample_id, token, moved.headers)
        self._running[sample_id] = delivery
        self._shares[sample_id] = self._share_seconds - moved.seconds
        self._meter.submitted(delivery.record.step)

    def arrived(self, sample_id: str, progress: SampleProgress) -> None:
        seconds = self._share_seconds - self._shares[sample_id]
        self._prompts.arrived(self._running[sample_id], progress._replace(seconds=seconds))

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        held, seconds = self._running.pop(sample_id).held, self._share_seconds - self._shares.pop(sample_id)
        held.leave(progress and progress._replace(seconds=seconds))

    forgotten = given  # nobody ends it: if need be it is delivered again

    # -- what comes, while the engine works -----------------------------------------------------------------

    async def _pull(self, inbox: Inbox[Prompt]) -> None:
        while not self.stopping.is_set():
            await self._has_room.wait()
            pulling = inbox.pull(max_records=self._piece, timeout_seconds=PULL_SECONDS)
            if arrived := await self.unless_stopped(pulling):
                self._pulled.extend(arrived)
                self._set_room(self._room - len(arrived))
                self._news.set()

    async def _follow(self, inbox: Inbox[Weights]) -> None:
        while not self.stopping.is_set():
            pulling = inbox.pull(max_records=1024, timeout_seconds=PULL_SECONDS)
            arrived = [delivery.record for delivery in await self.unless_stopped(pulling)]
            if policies := [record for record in arrived if record.role == "policy"]:
                self._announced.extend(policies)
                self._news.set()

    def _look_for_room(self) -> None:
        """Between two steps of the engine."""
        stats = self._engine.stats()
        self._set_room(stats.room + self._prefetch - stats.num_waiting - len(self._pulled))

    def _set_room(self, room: int) -> None:
        self._room = room
        if room >= self._piece:
            self._has_room.set()
        elif not self.stopping.is_set():
            self._has_room.clear()

    # -- the engine -----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self.stopping.is_set():
            self._news.clear()
            await self._take_weights()
            self._submit_ready()
            self._look_for_room()
            if self._engine.has_work:
                await self._generate()
            elif self._calls.waiting:
                await self.in_thread(self._calls.run)
            else:
                await self._wait()

    async def _wait(self) -> None:
        with self.vitals.waiting("room to publish samples"):
            await self._published()
        if any(delivery.record.id in self._on_the_way for delivery in self._pulled):
            with self.vitals.waiting("what is on its way from or to another generator"):
                return await self._bus.clock.sleep(ON_THE_WAY_SECONDS)
        early = min((delivery.record.weights_version for delivery in self._pulled), default=None)
        with self.vitals.waiting("prompts" if early is None else f"weights version {early}"):
            await self._idle_scoring.until_news()

    async def _say_idle(self) -> None:
        """Who has nothing to do says so, so that others may move samples here."""
        while not self.stopping.is_set():
            if not self._running and (load := self._meter.idle()) is not None:
                self._last_load = load
                await self._bus.publish(load)
            await self.unless_stopped(self._idle_for_a_while())

    async def _idle_for_a_while(self) -> list[None]:
        await self._bus.clock.sleep(_IDLE_SECONDS)
        return []

    async def _take_weights(self) -> None:
        """Between two steps of the engine. What runs goes on under the new version, and says so token by token."""
        newer = [record for record in self._announced if record.version > self._engine.weights_version]
        self._announced.clear()
        if newer:
            await self._new_weights.take(newer)

    def _load(self, tensors: dict[str, Any], version: int) -> None:
        self._engine.load_weights(tensors, version=version)

    def _submit_ready(self) -> None:
        """What may be sampled now; the rest stays until its weights are here."""
        version = self._engine.weights_version
        on_the_way = self._on_the_way
        waiting: deque[Delivery[Prompt]] = deque()
        for delivery in self._pulled:
            if delivery.record.weights_version > version or delivery.record.id in on_the_way:
                waiting.append(delivery)
                continue
            if delivery.record.id not in self._running:  # a redelivery of what already runs here
                self._submit(delivery.record)
                self._shares[delivery.record.id] = self._share_seconds
            self._running[delivery.record.id] = delivery
        self._pulled = waiting

    @property
    def _on_the_way(self) -> frozenset[str]:
        return self._moving.mover.moving if self._moving is not None else frozenset()

    def _submit(self, prompt: Prompt) -> None:
        request = Request(
            id=prompt.id,
            prompt_token_ids=prompt.token_ids,
            params=self._params,
            seed=prompt.seed,
            group=prompt.group_id,
            history=self._histories.of(prompt.token_ids),
        )
        self._engine.submit(request)
        self._meter.submitted(prompt.step)

    async def _generate(self) -> None:
        what = f"generating {len(self._running)} samples, the first {next(iter(self._running), 'gone')}"
        with self.vitals.working(what, deadline_seconds=self._deadline) as worked:
            finished = await self.in_thread(self._burst)
        self._share_seconds += worked.seconds / max(len(self._running), 1)
        await self._published()
        made = [self._finished(completion) for completion in finished]
        load = self._meter.load()
        self._last_load = load or self._last_load
        self._publishing = asyncio.create_task(self._publish(load, made))

    def _finished(self, completion: Completion) -> tuple[Delivery[Prompt], Sample]:
        delivery = self._running.pop(completion.id)
        self._histories.add(completion.prompt_token_ids, completion.token_ids)
        seconds = self._share_seconds - self._shares.pop(completion.id)
        experts = self._meter.experts()
        return delivery, sample_of(delivery.record, completion, self._meter.name, seconds=seconds, experts=experts)

    async def _publish(self, load: Load | None, made: list[tuple[Delivery[Prompt], Sample]]) -> None:
        """While the engine goes on: the way to the server and back costs it nothing."""
        if load is not None:
            await self._bus.publish(load)
        await asyncio.gather(*(self._answer(delivery, sample) for delivery, sample in made))

    async def _answer(self, delivery: Delivery[Prompt], sample: Sample) -> None:
        await self._bus.publish(sample)
        await delivery.ack()

    async def _published(self) -> None:
        """The burst before is out: never more than one is on its way."""
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    def _burst(self) -> list[Completion]:
        """Steps until something is finished, so that scoring begins with the first sample, or something came."""
        end = time.monotonic() + BURST_SECONDS
        finished: list[Completion] = []
        self._calls.run()
        while self._engine.has_work and not finished and time.monotonic() < end:
            report = self._engine.step()
            self._meter.stepped(report)
            if report.num_prefill_tokens and self._moving is not None:
                self._moving.mover.costs.learn_prefill(1, self._meter.prefill_seconds)
            finished.extend(report.finished)
            self._calls.run()
            if self._news.is_set():
                break
        return finished


def sampling_params(generation: Generation) -> SamplingParams:
    return SamplingParams(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        max_tokens=generation.max_tokens,
        stop=tuple(generation.stop),
        ignore_eos=generation.ignore_eos,
    )


def sample_of(
    prompt: Prompt, completion: Completion, generator: str, *, seconds: float = 0.0, experts: Experts = ()
) -> Sample:
    """Pure: the record of a finished response."""
    failed = completion.finish_reason not in ("stop", "length")
    return Sample(
        id=prompt.id,
        job=prompt.job,
        step=prompt.step,
        prompt=prompt.prompt,
        replica=prompt.replica,
        prompt_text=prompt.text,
        prompt_token_ids=prompt.token_ids,
        columns_json=prompt.columns_json,
        text=completion.text or "",
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        tempered_log_probs=completion.tempered_log_probs,
        weights_versions=completion.weights_versions,
        finish_reason="stop" if completion.finish_reason == "stop" else "error" if failed else "length",
        error=completion.error or completion.finish_reason if failed else "",
        num_verifications=completion.stats.num_verifications,
        num_drafted=completion.stats.num_drafted,
        num_accepted=completion.stats.num_accepted,
        strategies=completion.stats.strategies,
        experts=experts,
        seconds=seconds,
        generator=generator,
        purpose=prompt.purpose,
    )

"""The generating stage: the engine between an inbox of prompts and a subject of samples."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from rlhfspec.engine.base import Completion, EngineProtocol
from rlhfspec.generator.dry import IdleScoring
from rlhfspec.generator.engine_loop import EngineLoop, sampling_params
from rlhfspec.generator.history import Histories
from rlhfspec.generator.learnt import LearntSharing
from rlhfspec.generator.leases import PromptLeases
from rlhfspec.generator.load import LoadMeter
from rlhfspec.generator.moving import Moving
from rlhfspec.generator.publishing import Made, SamplePublisher
from rlhfspec.generator.queue import PromptQueue
from rlhfspec.generator.seconds import SharedSeconds
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Prompt, Weights
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Inbox, StageBus, give_back
from rlhfspec.stage.guest import HostedScoring
from rlhfspec.stage.new_weights import NewWeights
from rlhfspec.stage.tasks import together
from rlhfspec.stage.vitals import Vitals
from rlhfspec.training.weights import WeightStore
from rlhfspec.worker.ends import MoveEndpoint

log = logging.getLogger("rlhfspec.stage")
_IDLE_SECONDS = 0.5
ON_THE_WAY_SECONDS = 0.05


class GeneratorService(Service):
    """Consumes Prompt, Weights; produces Sample, Load; waits for prompts, and room in the KV cache; unblocked by
    prompts, trainer. A prompt is acknowledged once its sample is published, so a lost generator loses no sample.

    It pulls what its engine can run, and a few prompts more; all others stay where the first with room takes them.
    Samples go to other generators and come from them while they run (`moving`). Asked to stop, it hands what runs to
    the others, and back what is left.
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
        run_folder: Path | None = None,
    ) -> None:
        super().__init__("generator", worker, vitals)
        spec = job.spec
        self._bus = bus
        self._job = job
        self._engine = engine
        self._deadline = spec.roles.generator.deadline_seconds
        self._new_weights = NewWeights(self, weights, self._load, deadline_seconds=self._deadline, clock=bus.clock)
        self._announced: list[Weights] = []  # newer than the engine's
        self._news = asyncio.Event()  # prompts or weights came, or the worker is asked to stop
        self._queue = PromptQueue(self, prefetch=spec.prefetch, piece=spec.pulled_at_a_time)
        self._publisher = SamplePublisher(bus)
        incarnation = move_endpoint.incarnation if move_endpoint is not None else ""
        name = f"generator-{worker}"
        movable = engine.abilities.moves_tokens if spec.has_movable_samples else None  # None: they stay here
        sequences = movable.sequences if movable is not None else tuple
        self._meter = LoadMeter(
            job.metadata.name, name, engine, worker=worker, incarnation=incarnation, sequences=sequences
        )
        self._seconds = SharedSeconds()
        self._leases = PromptLeases(self._seconds, self._meter.submitted)
        self._calls = EngineCalls(self._news.set)
        histories, params = Histories(keep=spec.algorithm.samples_per_prompt), sampling_params(spec.generation)
        self._loop = EngineLoop(
            engine, sequences, params, self._meter, self._calls, histories=histories, has_news=self._news.is_set
        )  # fmt: skip
        self._learnt = LearntSharing(self, bus, engine, weights, run_folder, self._news, job.metadata.name)
        self._idle_scoring = IdleScoring(
            self, bus, hosted_scoring, engine.abilities.learning, lambda: self._learnt.is_due, self._news
        )
        self._moving: Moving | None = None
        if move_endpoint is not None and movable is not None:
            link = spec.roles.generator.link
            mover = move_endpoint.mover(movable, self._calls, self._leases, bus.clock, name=name, link=link)
            self._moving = Moving(self, bus, mover, job.metadata.name)
            self._loop.prefill_took = partial(mover.costs.learn_prefill, 1)

    async def run(self) -> None:
        async with await self._bus.subscribe(Prompt) as prompts, await self._bus.subscribe(Weights) as weights:
            self._leases.inbox = prompts
            self._queue.look_for_room(self._engine.stats())
            with self.vitals.working("reading what the drafter learnt", deadline_seconds=self._deadline):
                await self._learnt.restore()
            parts = [
                self._queue.pull(prompts, self._news.set),
                self._follow(weights),
                self._idle_scoring.follow(),
                self._learnt.follow(),
                self._work(),
            ]
            if self._moving is not None:
                parts += [self._moving.run(), self._say_idle()]
            try:
                await together(*parts)
                await self._leave()
                await self._publisher.done()
                with self.vitals.working("handing out what the drafter learnt", deadline_seconds=self._deadline):
                    await self._learnt.leave()
            finally:
                self._learnt.cancel()
                self._calls.close()
                self._publisher.cancel()

    async def _leave(self) -> None:
        """What runs goes on elsewhere where it can; the rest is handed back."""
        num_running = len(self._leases)
        if self._moving is not None:
            with self.vitals.working("handing over what runs", deadline_seconds=self._deadline):
                leaving = asyncio.create_task(self._moving.leave(self._loop.begun))
                leaving.add_done_callback(lambda _: self._news.set())
                while not leaving.done():
                    await self._news.wait()
                    self._news.clear()
                    while self._calls.waiting:
                        await self.in_thread(self._calls.run)
                await leaving
                self._meter.is_leaving = True
                await self._bus.publish(self._meter.now())
                await self.in_thread(self._loop.check_nothing_leaked)
        left = len(self._leases)
        log.info(
            "left: of %d running samples %d go on elsewhere, %d are handed back", num_running, num_running - left, left
        )
        await give_back([delivery.held for delivery in (*self._queue, *self._leases)])

    async def stop(self) -> None:
        await super().stop()
        self._news.set()
        self._queue.wake()

    # -- what comes, while the engine works -----------------------------------------------------------------

    async def _follow(self, inbox: Inbox[Weights]) -> None:
        while not self.stopping.is_set():
            pulling = inbox.pull(max_records=1024, timeout_seconds=PULL_SECONDS)
            arrived = [delivery.record for delivery in await self.unless_stopped(pulling)]
            if policies := [record for record in arrived if record.role == "policy"]:
                self._announced.extend(policies)
                self._news.set()

    # -- the engine -----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self.stopping.is_set():
            self._news.clear()
            await self._take_weights()
            await self._learnt.between_steps()
            self._submit_ready()
            self._queue.look_for_room(self._engine.stats())
            if self._engine.has_work:
                await self._generate()
            elif self._calls.waiting:
                await self.in_thread(self._calls.run)
            else:
                await self._wait()

    async def _wait(self) -> None:
        with self.vitals.waiting("room to publish samples"):
            await self._publisher.done()
        if not self._on_the_way.isdisjoint(self._queue.ids):
            with self.vitals.waiting("what is on its way from or to another generator"):
                return await self._bus.clock.sleep(ON_THE_WAY_SECONDS)
        early = self._queue.earliest_version
        with self.vitals.waiting("prompts" if early is None else f"weights version {early}"):
            await self._idle_scoring.until_news()

    async def _say_idle(self) -> None:
        """Says so when it has nothing to do, so that others may move samples here."""
        while not self.stopping.is_set():
            if not self._leases and (load := self._meter.idle()) is not None:
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
        for delivery in self._queue.take_ready(self._engine.weights_version, self._on_the_way):
            if delivery.record.id not in self._leases:  # else a redelivery of what already runs here
                self._loop.submit(delivery.record)
            self._leases.begin(delivery)

    @property
    def _on_the_way(self) -> frozenset[str]:
        return self._moving.mover.moving if self._moving is not None else frozenset()

    async def _generate(self) -> None:
        what = f"generating {len(self._leases)} samples, the first {next(iter(self._leases.ids), 'gone')}"
        with self.vitals.working(what, deadline_seconds=self._deadline) as worked:
            finished = await self.in_thread(self._loop.burst)
        self._seconds.worked(worked.seconds, num_running=len(self._leases))
        await self._publisher.done()
        made = [self._finished(completion) for completion in finished]
        load = self._meter.load()
        self._publisher.begin(load, made)

    def _finished(self, completion: Completion) -> Made:
        delivery, seconds = self._leases.end(completion.id)
        return delivery, self._loop.sample(delivery.record, completion, seconds=seconds)

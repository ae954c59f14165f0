from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rlhfspec.engine.base import Completion, EngineProtocol, SequenceView
from rlhfspec.generator.learnt import LearntSharing
from rlhfspec.generator.load import LoadMeter
from rlhfspec.generator.moving import OwnMoves, PromptCustody, assert_empty
from rlhfspec.generator.samples import Histories, request_of, sample_of, sampling_params
from rlhfspec.generator.state import GeneratorState
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DraftWeights, Load, Move, Plan, Prompt, Record, Sample, Weights, WorkerInfo
from rlhfspec.moves.migration.engine_calls import EngineCalls, EngineStopped
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Delivery, Inbox, give_back
from rlhfspec.stage.context import GeneratorContext
from rlhfspec.stage.new_weights import load_newest
from rlhfspec.stage.tasks import together

if TYPE_CHECKING:
    from rlhfspec.door.calls import ClientCalls

log = logging.getLogger("rlhfspec.stage")
BURST_SECONDS = 0.05  # longest run of engine steps without a look at arrivals; a finished sample ends it sooner
ON_THE_WAY_SECONDS = 0.05
_REPORT_SECONDS = 0.5
_R = TypeVar("_R", bound=Record)


class GeneratorService(Service):
    """Generator worker. Prompts are acknowledged after their samples are published."""

    def __init__(self, job: RLHFJob, context: GeneratorContext, engine: EngineProtocol) -> None:
        super().__init__("generator", context.worker, context.vitals)
        spec, name = job.spec, f"generator-{context.worker}"
        self._job = job
        self._context = context
        self._bus = context.bus
        self._engine = engine
        self._deadline = spec.roles.generator.deadline_seconds
        self._num_prefilling = spec.roles.generator.prefill_workers
        self._hands_over = context.worker < self._num_prefilling
        self.state = GeneratorState(worker=self.worker, prefetch=spec.prefetch, piece=spec.pulled_at_a_time)
        self._params = sampling_params(spec.generation)
        self._histories = Histories(keep=spec.algorithm.samples_per_prompt)
        self._movable = engine.abilities.moves_tokens if spec.has_movable_samples else None
        self._calls = EngineCalls(self.state.news.set)
        self._moves: OwnMoves | None = None  # while it runs, where samples can move
        self._meter = LoadMeter(
            job.metadata.name, name, engine, worker=self.worker,
            incarnation=context.move_endpoint.incarnation if context.move_endpoint else "",
            sequences=self._samples,
        )  # fmt: skip
        self._clients: ClientCalls | None = None
        self._learnt: LearntSharing | None = None
        if (learner := engine.abilities.learning) is not None:
            self._learnt = LearntSharing(
                engine, learner, self._bus, context.weights, context.run.folder, job=job.metadata.name, name=name
            )
            self.leaving.callback(self._learnt.close)
        if context.hosted_scoring is not None:
            self.leaving.callback(context.hosted_scoring.close)
        self._publishing: asyncio.Task[None] | None = None  # the samples of the last burst

    def for_clients(self) -> ClientCalls:
        """Return the calls of clients into this generator, which get rows before samples do."""
        from rlhfspec.door.calls import MOST_CONVERSATIONS, ClientCalls
        from rlhfspec.engine.core import Engine

        assert isinstance(self._engine, Engine), "the command line refuses other engines"
        self._clients = ClientCalls(self._engine, self._calls, most_kept=MOST_CONVERSATIONS)
        return self._clients

    async def run(self) -> None:
        state, learnt = self.state, self._learnt
        async with await self._bus.subscribe(Prompt) as prompts:
            self._moves = self._moves_by(prompts)
            self._serve_the_gateway()
            state.look_for_room(self._engine.stats())
            if self._clients is not None:
                with self.vitals.working("measuring the cost of steps", deadline_seconds=self._deadline):
                    await self.in_thread(self._clients.measure)
            if learnt is not None:
                with self.vitals.working("loading the saved drafter", deadline_seconds=self._deadline):
                    await learnt.restore()
            parts = [self._hear(Weights, state.announced), self._work()]
            if self._hands_over or not self._num_prefilling:
                parts.append(self._pull(prompts))
            if self._context.hosted_scoring is not None:
                parts.append(self._hear(Plan, state.planned))
            if learnt is not None:
                parts.append(self._fetch_learnt(learnt))
            if (moves := self._moves) is not None:
                parts += [self._hear(WorkerInfo, moves.meet), self._hear(Move, moves.follow), self._report_idle()]
                if self._hands_over:
                    parts.append(self._hear(Load, moves.loaded))
            try:
                await together(*parts)
                await self._leave()
            finally:
                self._calls.close()
                if self._clients is not None:
                    self._clients.end(EngineStopped())
                for part in (self._publishing, learnt):
                    if part is not None:
                        part.cancel()

    async def stop(self) -> None:
        await super().stop()
        self.state.news.set()
        self.state.has_room.set()

    async def _work(self) -> None:
        while not self.stopping.is_set():
            self.state.news.clear()
            if self._moves is not None:
                self._moves.settle()
            await self._load_weights()
            await self._exchange_learnt()
            self._submit_ready()
            if self._hands_over and self._moves is not None:
                self._moves.hand_over(self._samples(), self._engine.weights_version)
            self.state.look_for_room(self._engine.stats())
            if self._engine.has_work:
                await self._hand_out(await self._step())
            elif self._calls.waiting:
                await self.in_thread(self._calls.run)
            else:
                await self._wait()

    async def _load_weights(self) -> None:
        """Load the newest announced version, under which running samples continue."""
        newer = [record for record in self.state.wanted if record.version > self._engine.weights_version]
        self.state.wanted.clear()
        if newer:
            load, clock = self._engine.load_weights, self._bus.clock
            await load_newest(self, self._context.weights, newer, load, deadline_seconds=self._deadline, clock=clock)
            if self._num_prefilling:
                await self._bus.publish(self._meter.now())  # samples arrive only under the same weights

    async def _exchange_learnt(self) -> None:
        if (learnt := self._learnt) is None:
            return
        if learnt.arrived is not None:
            await self.in_thread(learnt.take)
        if learnt.is_due:
            learnt.begin_handing_out(await self.in_thread(learnt.learner.learnt))
        await learnt.note_cost()

    def _submit_ready(self) -> None:
        for delivery in self.state.take_ready(self._engine.weights_version, self._moving):
            prompt = delivery.record
            if prompt.id not in self.state.running:  # otherwise a redelivery of a running sample
                self._engine.submit(request_of(prompt, self._params, self._histories.of(prompt.token_ids)))
                self._meter.submitted(prompt.step)
            self.state.begin(delivery)

    async def _step(self) -> list[Completion]:
        running = self.state.running
        what = f"generating {len(running)} samples, the first {next(iter(running), 'gone')}"
        if self._clients is not None and not running:
            what = "answering clients"
        with self.vitals.working(what, deadline_seconds=self._deadline) as worked:
            finished = await self.in_thread(self._burst)
        self.state.worked(worked.seconds)
        return finished

    def _burst(self) -> list[Completion]:
        """Run the engine until a sample completes, news arrives or BURST_SECONDS are over; return completions."""
        end = time.monotonic() + BURST_SECONDS
        finished: list[Completion] = []
        self._calls.run()
        while self._engine.has_work and not finished and time.monotonic() < end:
            report = self._engine.step()
            if self._clients is not None:
                report = replace(report, finished=tuple(self._clients.stepped(report)))
            self._meter.stepped(report)
            if report.num_prefill_tokens and self._moves is not None:
                self._moves.mover.costs.learn_prefill(1, self._meter.prefill_seconds)
            finished.extend(report.finished)
            self._calls.run()
            if self.state.news.is_set():
                break
        return finished

    async def _hand_out(self, finished: Sequence[Completion]) -> None:
        """Publish a burst's completions while the engine continues, after those of the previous burst."""
        await self._published()
        made = [self._made(completion) for completion in finished]
        self._publishing = asyncio.create_task(self._publish(self._meter.load(), made))

    def _made(self, completion: Completion) -> tuple[Delivery[Prompt], Sample]:
        delivery, seconds = self.state.end(completion.id)
        self._histories.add(completion.prompt_token_ids, completion.token_ids)
        experts = self._meter.experts()
        return delivery, sample_of(delivery.record, completion, self._meter.name, seconds=seconds, experts=experts)

    async def _published(self) -> None:
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def _publish(self, load: Load | None, made: Sequence[tuple[Delivery[Prompt], Sample]]) -> None:
        if load is not None:
            await self._bus.publish(load)
        await asyncio.gather(*(self._answer(delivery, sample) for delivery, sample in made))

    async def _answer(self, delivery: Delivery[Prompt], sample: Sample) -> None:
        await self._bus.publish(sample)
        await delivery.ack()

    async def _wait(self) -> None:
        with self.vitals.waiting("room to publish samples"):
            await self._published()
        if any(delivery.record.id in self._moving for delivery in self.state.queued):
            with self.vitals.waiting("samples that move from or to another generator"):
                return await self._bus.clock.sleep(ON_THE_WAY_SECONDS)
        with self.vitals.waiting(self.state.waits_for):
            await self._score_or_learn()

    async def _score_or_learn(self) -> None:
        news = asyncio.create_task(self.state.news.wait())
        scoring, learnt = self._context.hosted_scoring, self._learnt
        try:
            if scoring is not None and self.state.is_to_score:
                await scoring.score_while(news)
                return
            while learnt is not None and not news.done() and await self.in_thread(learnt.learner.learn_while_idle):
                if learnt.is_due:
                    return
            await news
        finally:
            news.cancel()

    async def _report_idle(self) -> None:
        while not self.stopping.is_set():
            if not self.state.running and (load := self._meter.idle()) is not None:
                await self._bus.publish(load)
            await self.unless_stopped(self._bus.clock.sleep(_REPORT_SECONDS))

    async def _pull(self, inbox: Inbox[Prompt]) -> None:
        while not self.stopping.is_set():
            await self.state.has_room.wait()
            pulling = inbox.pull(max_records=self._job.spec.pulled_at_a_time, timeout_seconds=PULL_SECONDS)
            if arrived := await self.unless_stopped(pulling):
                self.state.pulled(arrived)

    async def _hear(self, record_type: type[_R], take: Callable[[_R], None]) -> None:
        async with await self._bus.subscribe(record_type) as inbox:
            async for arrived in self.arrivals(inbox):
                for delivery in arrived:
                    take(delivery.record)

    async def _fetch_learnt(self, learnt: LearntSharing) -> None:
        async with await self._bus.subscribe(DraftWeights) as inbox:
            async for arrived in self.arrivals(inbox):
                await learnt.fetch([delivery.record for delivery in arrived])
                self.state.news.set()

    def _moves_by(self, prompts: Inbox[Prompt]) -> OwnMoves | None:
        endpoint = self._context.move_endpoint
        if endpoint is None or self._movable is None:
            return None
        custody, link = PromptCustody(self.state, prompts, self._meter), self._job.spec.roles.generator.link
        mover = endpoint.mover(self._movable, self._calls, custody, self._bus.clock, name=self._meter.name, link=link)
        return OwnMoves(
            self._bus, mover, self.state.news, job=self._job.metadata.name, num_prefilling=self._num_prefilling
        )

    def _serve_the_gateway(self) -> None:
        endpoint = self._context.move_endpoint
        if self._context.is_called and endpoint is not None and endpoint.serve_caller is not None:
            from rlhfspec.door.control import CallServer

            endpoint.serve_caller(CallServer(self.for_clients()).answer)

    def _samples(self) -> tuple[SequenceView, ...]:
        """Return the samples that may move; clients' sequences stay."""
        if self._movable is None:
            return ()
        return tuple(each for each in self._movable.sequences() if each.id in self.state.running)

    @property
    def _moving(self) -> frozenset[str]:
        return self._moves.mover.moving if self._moves is not None else frozenset()

    async def _leave(self) -> None:
        """Move running samples to other generators, return other prompts, and share the last learnt drafter."""
        num_running = len(self.state.running)
        if self._clients is not None:
            await self.in_thread(self._clients.leave)
        if self._moves is not None:
            with self.vitals.working("moving running samples to other generators", deadline_seconds=self._deadline):
                await self._move_away(self._moves)
        left = len(self.state.running)
        log.info(
            "left: of %d running samples, %d continue elsewhere, %d are returned", num_running, num_running - left, left
        )
        await give_back(self.state.held())
        await self._published()
        if (learnt := self._learnt) is not None:
            with self.vitals.working("sharing the drafter", deadline_seconds=self._deadline):
                await learnt.handed_out()
                if learnt.has_more:
                    learnt.begin_handing_out(await self.in_thread(learnt.learner.learnt))
                    await learnt.handed_out()
                await learnt.note_cost(is_last=True)

    async def _move_away(self, moves: OwnMoves) -> None:
        leaving = asyncio.create_task(moves.leave())
        leaving.add_done_callback(lambda _: self.state.news.set())
        while not leaving.done():
            await self.state.news.wait()
            self.state.news.clear()
            while self._calls.waiting:
                await self.in_thread(self._calls.run)
        await leaving
        self._meter.is_leaving = True
        await self._bus.publish(self._meter.now())
        await self.in_thread(assert_empty, moves.mover.engine)

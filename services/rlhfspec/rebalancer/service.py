from __future__ import annotations

import secrets
from collections.abc import Mapping

from rlhfspec.job import RLHFJob, Spec
from rlhfspec.job.choices.drafters import OFF
from rlhfspec.messages.records import Load, Moved, Plan, PlannedMove, Sample
from rlhfspec.moves.rebalancing.elastic import Elastic, Wanted
from rlhfspec.rebalancer.knowledge import Advice, FleetKnowledge, StageWork
from rlhfspec.runs.folder.moves import MovesFile
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.stage.vitals import Vitals

_RECORDS_A_PULL = 4096  # records
TOLD_SECONDS = 10.0  # between two unchanged plans without moves
_MAX_LISTED_GENERATORS = 64  # generators in a line


class RebalancerService(Service):
    """Rebalancing worker, whose advice never changes a generated token."""

    def __init__(self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, moves: MovesFile) -> None:
        super().__init__("rebalancer", worker, vitals)
        self._bus = bus
        self._job = job.metadata.name
        self._interval = job.spec.rebalance.interval_seconds
        self._moves = moves
        self._incarnation = secrets.token_hex(4)
        self.knowledge = FleetKnowledge(
            self._job,
            max_tokens=job.spec.generation.max_tokens,
            began_at=bus.clock.now(),
            draw=self._move_id,
            work=work_of(job.spec),
            elastic=elastic_of(job.spec),
            learns=job.spec.generation.speculation.learning != OFF,
            num_prefilling=job.spec.roles.generator.prefill_workers,
        )
        self._num_plans = 0
        self._planned_at = self._told_at = -float("inf")
        self._told_dry: Mapping[int, str] = {}
        self._told_wanted: Wanted | None = None

    async def run(self) -> None:
        bus = self._bus
        async with (
            await bus.subscribe(Load) as loads,
            await bus.subscribe(Moved) as all_moved,
            await bus.subscribe(Sample) as samples,
        ):
            while not self.stopping.is_set():
                if await self._hear(loads, all_moved, samples) and self._is_due():
                    await self._plan()
            if (costs := self.knowledge.costs()) is not None:
                await self.in_thread(self._moves.costs, costs)

    async def _hear(self, loads: Inbox[Load], all_moved: Inbox[Moved], samples: Inbox[Sample]) -> bool:
        """Record pending loads, move outcomes and samples, and return whether there were any."""
        with self.vitals.waiting(f"load reports of the generators; {self.knowledge.num_moves} moves so far"):
            arrived = await self.unless_stopped(loads.pull(max_records=_RECORDS_A_PULL, timeout_seconds=self._interval))
        now = self._bus.clock.now()
        for load in arrived:
            self.knowledge.loaded(load.record, now)
        ended = await all_moved.pull(max_records=_RECORDS_A_PULL, timeout_seconds=0.0)
        for moved in ended:
            self.knowledge.moved(moved.record, now)
        if ended:
            await self.in_thread(self._moves.moved, [moved.record for moved in ended])
        finished = await samples.pull(max_records=_RECORDS_A_PULL, timeout_seconds=0.0)
        for sample in finished:
            self.knowledge.finished(sample.record)
        return bool(arrived or ended or finished)

    def _is_due(self) -> bool:
        return self._bus.clock.now() - self._planned_at >= self._interval

    async def _plan(self) -> None:
        self._planned_at = now = self._bus.clock.now()
        advice = await self.in_thread(self.knowledge.advise, now)
        if advice is None:
            return
        for move in advice.moves:
            await self._bus.publish(move)
        id = f"{self._job}/plan/{self._incarnation}/{self._num_plans + 1}"
        plan = plan_of(advice, self.knowledge.wanted, id=id, job=self._job)
        news = plan.dry != self._told_dry or self.knowledge.wanted != self._told_wanted
        if advice.moves or news or now - self._told_at >= TOLD_SECONDS:
            self._told_at, self._told_dry, self._told_wanted = now, plan.dry, self.knowledge.wanted
            self._num_plans += 1
            await self._bus.publish(plan)
            await self.in_thread(self._moves.plan, plan)

    def _move_id(self, number: int) -> str:
        return f"{self._job}/move/{self._incarnation}/{number}"


def elastic_of(spec: Spec) -> Elastic | None:
    replicas = spec.roles.generator.replicas
    return None if replicas is None else Elastic(least=replicas.min, most=replicas.max)


def work_of(spec: Spec) -> StageWork:
    generation, samples = spec.generation, spec.training.prompts_per_step * spec.algorithm.samples_per_prompt
    rows = min(generation.max_sequences, spec.samples_in_flight)
    return StageWork(samples_per_step=samples, max_tokens=generation.max_tokens, rows=rows)


def plan_of(advice: Advice, wanted: Wanted | None, *, id: str, job: str) -> Plan:
    planned, seen = advice.planned, advice.seen
    ends = zip(seen.workers, planned.before, strict=True) if len(seen.workers) <= _MAX_LISTED_GENERATORS else ()
    return Plan(
        id=id,
        job=job,
        num_wanted=wanted.number if wanted else 0,
        why_wanted=wanted.because if wanted else "",
        ends={worker: round(float(end), 3) for worker, end in ends},
        num_generators=len(seen.workers),
        num_samples=seen.fleet.num_sequences,
        latest_end=round(float(planned.before.max()), 3),
        latest_end_after=round(float(planned.after.max()), 3),
        moves=tuple(
            PlannedMove(
                id=move.id,
                sample=move.sample_id,
                source=move.source,
                destination=move.destination,
                gain_seconds=round(move.gain_seconds, 3),
                reason=move.reason,
            )
            for move in advice.moves
        ),
        why_not=tuple(planned.why_not(name=seen.name)),
        dry={seen.workers[index]: told for index, told in zip(planned.dry, planned.advice, strict=True)},
    )

"""The rebalancing stage: what generators say of themselves in, advice which samples go on elsewhere out."""

from __future__ import annotations

import json
import secrets
from typing import Any

from rlhfspec.job import RLHFJob, Spec
from rlhfspec.messages.records import Load, Moved, Plan, Sample
from rlhfspec.moves.rebalancing.elastic import Elastic, Wanted
from rlhfspec.rebalancer.knowledge import Advice, FleetKnowledge
from rlhfspec.rebalancer.stage_work import StageWork
from rlhfspec.runs.folder.moves import MovesFile
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.stage.vitals import Vitals

AT_ONCE = 4096  # records
TOLD_SECONDS = 10.0  # between two lines of plans that move nothing and say what the one before said
MOST_NAMED = 64  # generators in a line


class RebalancerService(Service):
    """Watches Load, Moved, Sample; produces Move, Plan; waits for generators to say what they have; unblocked by
    nobody: it needs nothing.

    It knows only what signals say, so that it can die, be late or be wrong: that costs balance, never a token.
    """

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
        )
        self._num_plans = 0
        self._planned_at = self._told_at = -float("inf")
        self._told_dry: dict[str, str] = {}
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

    async def _hear(self, loads: Inbox[Load], all_moved: Inbox[Moved], samples: Inbox[Sample]) -> bool:
        """Whether there is news. Samples count for what is known and for nothing else."""
        with self.vitals.waiting(f"generators to say what they have; {self.knowledge.num_moves} moves so far"):
            arrived = await self.unless_stopped(loads.pull(max_records=AT_ONCE, timeout_seconds=self._interval))
        now = self._bus.clock.now()
        for load in arrived:
            self.knowledge.loaded(load.record, now)
        ended = await all_moved.pull(max_records=AT_ONCE, timeout_seconds=0.0)
        for moved in ended:
            self.knowledge.moved(moved.record, now)
        if ended:
            await self.in_thread(self._moves.moved, [moved.record for moved in ended])
        finished = await samples.pull(max_records=AT_ONCE, timeout_seconds=0.0)
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
        content = content_of(advice)
        news = content["dry"] != self._told_dry or self.knowledge.wanted != self._told_wanted
        if advice.moves or news or now - self._told_at >= TOLD_SECONDS:
            self._told_at, self._told_dry, self._told_wanted = now, content["dry"], self.knowledge.wanted
            await self._tell(content)

    async def _tell(self, content: dict[str, Any]) -> None:
        self._num_plans += 1
        id = f"{self._job}/plan/{self._incarnation}/{self._num_plans}"
        number, because = (wanted.number, wanted.because) if (wanted := self.knowledge.wanted) else (0, "")
        plan = Plan(id=id, job=self._job, plan_json=json.dumps(content), num_wanted=number, why_wanted=because)
        await self._bus.publish(plan)
        await self.in_thread(self._moves.plan, id, content)

    def _move_id(self, number: int) -> str:
        return f"{self._job}/move/{self._incarnation}/{number}"


def elastic_of(spec: Spec) -> Elastic | None:
    """None: the job says how many generators there are."""
    replicas = spec.roles.generator.replicas
    return None if replicas is None else Elastic(least=replicas.min, most=replicas.max)


def work_of(spec: Spec) -> StageWork:
    generation, samples = spec.generation, spec.training.prompts_per_step * spec.algorithm.samples_per_prompt
    rows = min(generation.max_sequences, spec.samples_in_flight)
    return StageWork(samples_per_step=samples, max_tokens=generation.max_tokens, rows=rows)


def content_of(advice: Advice) -> dict[str, Any]:
    """Pure: what a plan says. `dry`: what generators with nothing to do should do, by their numbers."""
    planned, seen = advice.planned, advice.seen
    return {
        "ends": {str(worker): round(float(end), 3) for worker, end in zip(seen.workers, planned.before, strict=True)}
        if len(seen.workers) <= MOST_NAMED
        else {},
        "num_generators": len(seen.workers),
        "num_samples": seen.fleet.num_sequences,
        "latest_end": round(float(planned.before.max()), 3),
        "latest_end_after": round(float(planned.after.max()), 3),
        "moves": [
            {
                "id": move.id,
                "sample": move.sample_id,
                "source": move.source,
                "destination": move.destination,
                "gain_seconds": round(move.gain_seconds, 3),
                "reason": move.reason,
            }
            for move in advice.moves
        ],
        "why_not": planned.why_not(name=seen.name),
        "dry": {str(seen.workers[index]): told for index, told in zip(planned.dry, planned.advice, strict=True)},
    }

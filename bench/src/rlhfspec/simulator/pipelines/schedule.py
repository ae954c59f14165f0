"""Pipelines of actor and critic, interleaved on the same stages so that each fills the other's bubbles.

The actor enters at stage 0, the critic at the last one. A stage runs one task at a time; a backward takes twice as long
as its forward. Micro-batches in flight are limited as in 1F1B, which bounds memory and avoids deadlocks.

    serial    1F1B of the actor, then of the critic
    search    list scheduling of both by many random rules; the shortest schedule found

Example:
    >>> case = PipelineCase(num_stages=2, num_micro_batches=4)
    >>> serial(case).seconds, search(case).seconds, case.least_seconds
    (30.0, 24.0, 24.0)
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

MODELS = ("actor", "critic")
BACKWARD_TIMES = 2.0  # as long as a forward
NUM_RULES = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCase:
    num_stages: int
    num_micro_batches: int
    forward_seconds: tuple[float, float] = (1.0, 1.0)  # of a micro-batch at a stage: the actor's, the critic's

    @property
    def work_seconds(self) -> float:
        """Return the seconds that each stage is busy, with both models' tasks."""
        return self.num_micro_batches * (1 + BACKWARD_TIMES) * sum(self.forward_seconds)

    @property
    def least_seconds(self) -> float:
        """Return a lower bound of a schedule: a stage's busy seconds or, if longer, the slower model alone."""
        way = (self.num_micro_batches + self.num_stages - 1) * (1 + BACKWARD_TIMES) * max(self.forward_seconds)
        return max(self.work_seconds, way)

    def stage(self, model: int, place: int) -> int:
        """Return the stage at position `place` of the model's pipeline."""
        return place if model == 0 else self.num_stages - 1 - place

    def most_under_way(self, place: int) -> int:
        """Return the maximum number of micro-batches that 1F1B has in flight at position `place`."""
        return self.num_stages - place


@dataclass(frozen=True, slots=True)
class Task:
    """Forward or backward of a micro-batch at position `place` of its model's pipeline."""

    model: int
    micro_batch: int
    place: int
    is_backward: bool


@dataclass(frozen=True, slots=True)
class PlacedTask:
    task: Task
    stage: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    case: PipelineCase
    placed: tuple[PlacedTask, ...]  # by start

    @property
    def seconds(self) -> float:
        return max(each.end for each in self.placed)

    @property
    def bubbles(self) -> float:
        """Return the mean share of time that a stage is idle."""
        return 1 - self.case.work_seconds / self.seconds

    @property
    def peak_activations(self) -> float:
        """Return the peak activations of any stage, in units of one actor micro-batch."""
        actor = self.case.forward_seconds[0]
        changes: list[list[tuple[float, float]]] = [[] for _ in range(self.case.num_stages)]
        for each in self.placed:
            size = self.case.forward_seconds[each.task.model] / actor
            change = (each.end, -size) if each.task.is_backward else (each.start, size)
            changes[each.stage].append(change)
        return max(_highest(of_stage) for of_stage in changes)


Rule = Callable[[Task], float]  # the ready task with the least value is taken


def serial(case: PipelineCase) -> PipelineSchedule:
    actor = run(case, _one_forward_one_backward, models=(0,))
    critic = run(case, _one_forward_one_backward, models=(1,))
    begin = max(each.end for each in actor)
    later = [PlacedTask(each.task, each.stage, begin + each.start, begin + each.end) for each in critic]
    return PipelineSchedule(case, (*actor, *later))


def search(case: PipelineCase, *, num_rules: int = NUM_RULES, seed: int = 0) -> PipelineSchedule:
    """Return the shortest of the serial schedule and those of random rules; later rules vary the best."""
    best, taste, drawn = serial(case), None, random.Random(seed)
    for number in range(num_rules):
        tried = Taste.drawn(drawn) if taste is None or 2 * number < num_rules else taste.like_it(drawn)
        found = run(case, tried.rule(case), give_up_at=best.seconds)
        if found:
            best, taste = PipelineSchedule(case, tuple(found)), tried
        if best.seconds <= case.least_seconds:
            break
    return best


def run(
    case: PipelineCase, rule: Rule, *, models: tuple[int, ...] = (0, 1), give_up_at: float = float("inf")
) -> list[PlacedTask]:
    """Return tasks placed by list scheduling, or [] if one would end at `give_up_at` seconds or later."""
    row = _StageRow(case, rule, models)
    placed: list[PlacedTask] = []
    ending: list[tuple[float, int, PlacedTask]] = []
    now = 0.0
    while True:
        for begun in row.begin(now):
            if begun.end >= give_up_at:
                return []
            placed.append(begun)
            heapq.heappush(ending, (begun.end, len(placed), begun))
        if not ending:
            return placed
        now = ending[0][0]
        while ending and ending[0][0] == now:
            row.end(heapq.heappop(ending)[2])


class _StageRow:
    """State of the stages: ready tasks, idle stages, and micro-batches in flight at each position."""

    def __init__(self, case: PipelineCase, rule: Rule, models: tuple[int, ...]) -> None:
        self._case, self._rule = case, rule
        self._ready: list[list[tuple[float, int, Task]]] = [[] for _ in range(case.num_stages)]
        self._idle = set(range(case.num_stages))
        self._under_way = {(model, place): 0 for model in models for place in range(case.num_stages)}
        self._num_added = 0
        for model in models:
            for micro_batch in range(case.num_micro_batches):
                self._add(Task(model, micro_batch, 0, is_backward=False))

    def begin(self, now: float) -> list[PlacedTask]:
        begun = []
        for stage in sorted(self._idle):
            task = self._take(stage)
            if task is not None:
                self._idle.remove(stage)
                seconds = self._case.forward_seconds[task.model] * (BACKWARD_TIMES if task.is_backward else 1.0)
                begun.append(PlacedTask(task, stage, now, now + seconds))
        return begun

    def end(self, placed: PlacedTask) -> None:
        task = placed.task
        self._idle.add(placed.stage)
        if task.is_backward:
            self._under_way[task.model, task.place] -= 1
        is_last = not task.is_backward and task.place == self._case.num_stages - 1
        place = task.place if is_last else task.place + (-1 if task.is_backward else 1)
        if place >= 0:
            self._add(Task(task.model, task.micro_batch, place, is_backward=task.is_backward or is_last))

    def _add(self, task: Task) -> None:
        self._num_added += 1
        ready = self._ready[self._case.stage(task.model, task.place)]
        heapq.heappush(ready, (self._rule(task), self._num_added, task))

    def _take(self, stage: int) -> Task | None:
        """Remove and return the best ready task that may begin on the stage, or None."""
        ready, passed, found = self._ready[stage], [], None
        while ready and found is None:
            entry = heapq.heappop(ready)
            task = entry[2]
            at = task.model, task.place
            if not task.is_backward and self._under_way[at] >= self._case.most_under_way(task.place):
                passed.append(entry)
                continue
            self._under_way[at] += not task.is_backward
            found = task
        for entry in passed:
            heapq.heappush(ready, entry)
        return found


def _one_forward_one_backward(task: Task) -> float:
    return task.micro_batch - 1e6 * task.is_backward


@dataclass(frozen=True, slots=True)
class Taste:
    """Random rule: weights of backwards, the critic, early micro-batches and distance left; `mood` scales noise."""

    weights: tuple[float, float, float, float]
    mood: float
    mood_seed: int

    @classmethod
    def drawn(cls, drawn: random.Random) -> Taste:
        backward, model, micro_batch, way = (drawn.gauss(0, 1) for _ in range(4))
        mood = drawn.choice((0.0, 0.1, 0.5))
        return cls((backward - 2.0, model, abs(micro_batch), way), mood, drawn.getrandbits(32))

    def like_it(self, drawn: random.Random) -> Taste:
        backward, model, micro_batch, way = (weight + drawn.gauss(0, 0.2) for weight in self.weights)
        return Taste((backward, model, micro_batch, way), drawn.choice((0.02, 0.1, 0.3)), drawn.getrandbits(32))

    def rule(self, case: PipelineCase) -> Rule:
        backward, model, micro_batch, way = self.weights
        moods = random.Random(self.mood_seed)

        def rule(task: Task) -> float:
            left = task.place if task.is_backward else 3 * case.num_stages - 1 - task.place
            liked = backward * task.is_backward + model * task.model + way * left / case.num_stages
            return liked + micro_batch * task.micro_batch / case.num_micro_batches + self.mood * moods.random()

        return rule


def _highest(changes: list[tuple[float, float]]) -> float:
    """Return the highest running sum of (time, change) pairs; at equal times, decreases come first."""
    held = highest = 0.0
    for _, change in sorted(changes):
        held += change
        highest = max(highest, held)
    return highest

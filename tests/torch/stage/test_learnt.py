"""Learnt drafters reach other and later generators; damage costs only speed."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from coroutines import until
from small_job import a_job
from stages import FakeEngine, Stages, a_prompt, ends, killed

from rlhfspec.engine.base import Abilities, EngineStats, LearningReport, Learnt
from rlhfspec.errors import InvalidRequest
from rlhfspec.generator import learnt as sharing
from rlhfspec.generator.service import GeneratorService
from rlhfspec.messages.records import DraftWeights
from rlhfspec.messages.records.models import Drafting
from rlhfspec.runs.folder.learnt import LEARNT, learnt_lines
from rlhfspec.training.checkpoint.learnt import LEARNT_FILE, read_learnt, write_learnt

WORKERS = {"prompts": 1, "generator": 3, "trainer": 1, "rebalancer": 1}


@pytest.fixture(autouse=True)
def handed_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_REST", 0.0)


class Learner(FakeEngine):
    """Engine whose drafter's one weight is its version; it learns from 100 tokens at a time while any are `left`."""

    def __init__(self, left: int = 0) -> None:
        super().__init__(random.Random(0))
        self.left, self.version, self.took = left, 0, list[int]()

    @property
    def abilities(self) -> Abilities:
        return Abilities(learning=self)

    @property
    def report(self) -> LearningReport:
        return LearningReport(version=self.version, num_tokens=self.version, seconds=0.5, law_now=(0.4, 0.3))

    def stats(self) -> EngineStats:
        """Return drafts whose first 300 verifications gave 3 tokens each, and all later ones 2."""
        drafting = Drafting(
            drafter="model", acceptance=(0.5,), level_share=None, num_verifications=self.version,
            num_tokens=2 * self.version + min(self.version, 300), saved_seconds=0.0,
        )  # fmt: skip
        return replace(super().stats(), drafting=(drafting,))

    def learn_while_idle(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.version += 100
        return True

    def learnt(self) -> Learnt:
        return Learnt(version=self.version, tensors={"w": torch.tensor([float(self.version)])})

    def take(self, learnt: Learnt) -> bool:
        if learnt.tensors.keys() != {"w"}:
            raise InvalidRequest("drafter", min(learnt.tensors), "the learnt weights belong to another drafter")
        assert float(learnt.tensors["w"][0]) == learnt.version
        if learnt.version <= self.version:
            return False
        self.version = learnt.version
        self.took.append(learnt.version)
        return True

    def load_weights(self, state_dict: dict[str, Any], *, version: int) -> None:
        self.weights_version = version


class Place:
    def __init__(self, stages: Stages, folder: Path) -> None:
        self.stages, self.folder = stages, folder
        self.running: list[tuple[asyncio.Task[None], GeneratorService]] = []

    def start(self, worker: int, engine: Learner) -> Learner:
        service = self.stages.generator(worker, engine, folder=self.folder)
        self.running.append((asyncio.create_task(service.run()), service))
        return engine

    async def announced(self, version: int) -> None:
        subject: Any = self.stages.transport._subjects[self.stages.bus.subject(DraftWeights)]
        await until(lambda: any(f"/drafter/{version}/" in m.id for m in subject.latest.values()), f"{version} is there")


@asynccontextmanager
async def placed(folder: Path) -> AsyncIterator[Place]:
    place = Place(await Stages.open(a_job(), **WORKERS), folder)
    yield place
    for task, service in place.running:
        await ends(task, service)


def kept(folder: Path) -> int:
    found = read_learnt(folder / LEARNT)
    return 0 if found is None else found[0]


async def test_learnt_weights_reach_other_and_later_generators(tmp_path: Path) -> None:
    async with placed(tmp_path) as place:
        other = place.start(1, Learner())
        place.start(0, Learner(left=1))
        await until(lambda: other.took == [100], "the other takes it")
        late = place.start(2, Learner())
        await until(lambda: late.took == [100], "and who comes later")
    assert kept(tmp_path) == 100


async def test_a_generator_that_learnt_from_more_tokens_keeps_its_weights(tmp_path: Path) -> None:
    async with placed(tmp_path) as place:
        first, second, third = Learner(), Learner(), Learner()
        first.version, third.version = 900, 2000
        place.start(1, first)
        await place.announced(900)
        place.start(0, second)
        await until(lambda: second.took == [900], "it takes what is from more tokens")
        write_learnt(tmp_path / LEARNT, 970, {"w": torch.tensor([970.0])}, by="generator-9")
        place.start(2, third)
        await until(lambda: first.took == [2000] and second.took == [900, 2000], "so do both")
        assert third.took == []
    assert kept(tmp_path) == 2000


async def test_not_every_learning_step_is_published(tmp_path: Path) -> None:
    put: list[int] = []
    async with placed(tmp_path) as place:
        genuine = place.stages.weights.put
        place.stages.weights.put = lambda *given: (put.append(given[2]), genuine(*given))[1]  # type: ignore[method-assign]
        engine = place.start(0, Learner())
        for _ in range(20):  # however long it takes to hand out, it has not learnt all meanwhile
            engine.left = 50
            service = place.running[0][1]
            service.state.news.set()
            await until(lambda: not engine.left, "it has learnt")
            await service._learnt.handed_out()
    assert 2 < len(put) < 40, put
    assert put[-1] == 100_000, "the last when it leaves"
    assert all(later - earlier >= min(earlier / 4, 32768) for earlier, later in list(pairwise(put))[:-1])


@pytest.mark.parametrize("harm", ["byte", "cut", "empty", "another"])
async def test_damaged_learnt_weights_are_refused_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    write_learnt(tmp_path / LEARNT, 300, {"v" if harm == "another" else "w": torch.tensor([300.0])}, by="generator-0")
    file = tmp_path / LEARNT / LEARNT_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= harm == "byte"
    file.write_bytes({"cut": content[:-1], "empty": b""}.get(harm, bytes(content)))

    async with placed(tmp_path) as place:
        engine = place.start(0, Learner())
        await until(lambda: caplog.records, "it says so")
        assert engine.took == []
        engine.left = 4
        await place.stages.publish("prompts")
    [record] = caplog.records
    assert "saved drafter cannot be read" in record.getMessage() or "cannot be loaded" in record.getMessage()
    assert "\n" not in record.getMessage()


async def test_a_failed_fetch_or_put_ends_no_generator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with placed(tmp_path) as place:
        other = place.start(1, Learner())
        await until(lambda: len(place.stages.vitals.snapshot()) > 0, "it is there")
        gone = DraftWeights(id="x", job=place.stages.job.metadata.name, version=50, uri="memory:x", digest="0")
        await place.stages.publish("generator", gone)
        await until(lambda: caplog.records, "it says so")
        (tmp_path / LEARNT).write_bytes(b"")  # no folder can be made
        place.start(0, Learner(left=1))
        await until(lambda: any("cannot be shared" in r.getMessage() for r in caplog.records), "nor can this be")
        (tmp_path / LEARNT).unlink()
        other.version = 5000
        other.left = 1
        place.running[1][1].stopping.set()
    assert "cannot be fetched" in caplog.records[0].getMessage()


@pytest.mark.parametrize("at", ["put", "write", "publish"])
async def test_a_kill_loses_only_the_last_weights(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_learnt(tmp_path / LEARNT, 300, {"w": torch.tensor([300.0])}, by="generator-0")

    async with placed(tmp_path) as place:
        engine = Learner()
        reached, never = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def dies(*given: Any, **named: Any) -> Any:
            loop.call_soon_threadsafe(reached.set)
            if at == "write":  # as far as the bytes, and not as far as the name
                (tmp_path / LEARNT / ".writing-generator-0").write_bytes(b"half")
            raise asyncio.CancelledError

        async def hangs(record: Any) -> bool:
            reached.set()
            await never.wait()
            return True

        place.start(0, engine)
        await until(lambda: engine.took == [300], "it goes on from what is there")
        task, service = place.running.pop()
        if at == "put":
            monkeypatch.setattr(place.stages.weights, "put", dies)
        elif at == "write":
            monkeypatch.setattr(sharing, "write_learnt", dies)
        else:
            monkeypatch.setattr(service._bus, "publish", hangs)
        engine.left = 5
        service.state.news.set()
        await reached.wait()
        await killed(task, service)
        monkeypatch.undo()
        assert kept(tmp_path) == (300 if at == "write" else 400)
        again = place.start(0, Learner())
        await until(lambda: again.took == [kept(tmp_path)], "started again it goes on from there")


async def test_the_cost_and_gain_of_learning_are_written_to_the_run(tmp_path: Path) -> None:
    async with placed(tmp_path) as place:
        engine = place.start(0, Learner(left=3))
        await until(lambda: not engine.left, "it has learnt")
        engine.weights_version = 1
        place.running[0][1].state.news.set()
        await until(lambda: list(learnt_lines(tmp_path)), "a line")
        engine.left = 1
        place.running[0][1].state.news.set()
        await until(lambda: not engine.left, "it has learnt again")
    first, last = learnt_lines(tmp_path)
    assert (first.weights_version, first.law) == (0, (0.4, 0.3))
    assert (first.tokens_per_verification, last.tokens_per_verification) == (3.0, 2.0), "since the line before"
    assert (last.weights_version, last.seconds) == (1, 0.0), "since the line before"
    assert first.num_tokens + last.num_tokens == last.version == 400


async def test_a_dry_generator_stops_learning_for_new_work_and_resumes(tmp_path: Path) -> None:
    async with placed(tmp_path) as place:
        engine = place.start(0, Learner(left=1 << 60))
        await until(lambda: engine.version > 1000, "it learns")
        at = engine.version
        await place.stages.publish("prompts", a_prompt(0))
        await until(lambda: engine.submitted, "it generates")
        await until(lambda: engine.version > at, "and learns again")

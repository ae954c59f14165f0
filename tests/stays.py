"""Samples with stays at several generators, as stages report them to a tracer."""

from dataclasses import replace
from typing import Any

from example_records import example_sample

from rlhfspec.messages.records import Load, Moved, MoveOutcome, Prompt, Sample
from rlhfspec.telemetry.base import Delivered, SampleProgress, WorkerPlace
from rlhfspec.telemetry.read import Life, lives
from rlhfspec.telemetry.spans import Span, parse
from rlhfspec.telemetry.tracer import Tracer

UID = "3f2a91c0"


def traced_sample() -> Sample:
    return example_sample(
        7, 1, step=3, prompt_token_ids=(1, 2), log_probs=(-0.5,) * 3, num_verifications=3, num_drafted=4,
        num_accepted=2, strategies=(("suffix", 3),), seconds=0.5, generator="generator-0",
    )  # fmt: skip


SAMPLE = replace(
    traced_sample(), token_ids=tuple(range(10)), weights_versions=(2,) * 6 + (3,) * 4, num_verifications=9,
    num_drafted=6, num_accepted=1, strategies=(("plain", 5), ("suffix", 4)), seconds=3.0,
)  # fmt: skip


PROMPT = Prompt(
    id=SAMPLE.id, job="sums", step=3, prompt=7, replica=1, text="2+2=", token_ids=(1, 2), columns_json="{}", seed=1,
    weights_version=2,
)  # fmt: skip


LOAD = Load(
    id="l", job="sums", generator="generator-0", step=3, num_running=1, num_waiting=0, num_finished=0, num_tokens=9,
    tokens_per_second=9.0, accepted_per_verification=None, strategy="plain",
)  # fmt: skip


def progress(num_tokens: int, *, plain: int, suffix: int = 0, moves: int = 0, at: float = 0.0) -> SampleProgress:
    strategies = tuple((name, steps) for name, steps in (("plain", plain), ("suffix", suffix)) if steps)
    steps = plain + suffix
    versions = SAMPLE.weights_versions[:num_tokens]
    return SampleProgress(moves, versions, steps, suffix, num_tokens - steps, strategies, at, seconds=0.25 * num_tokens)


def place(worker: int) -> WorkerPlace:
    return WorkerPlace("generator", worker)


class Watched:
    def __init__(self) -> None:
        self.now = 100.0
        self.spans: list[Span] = []
        self._tracers = [Tracer(UID, self.spans.append, now=lambda: self.now) for _ in range(3)]
        prompts = Tracer(UID, self.spans.append, now=lambda: self.now)
        self.headers = prompts.publishing(WorkerPlace("prompts", 0), PROMPT)
        prompts.published(WorkerPlace("prompts", 0), PROMPT, self.now, True)

    def after(self, seconds: float) -> "Watched":
        self.now += seconds
        return self

    def takes(self, worker: int, *, delivery: int = 1, came: SampleProgress | None = None) -> None:
        self._tracers[worker].taken(place(worker), PROMPT, Delivered(self.headers, delivery, came))

    def gives(
        self,
        worker: int,
        left: SampleProgress,
        to: int,
        how: MoveOutcome = "kv",
        *,
        pause: float = 0.5,
        reason: str = "",
    ) -> None:
        """Hand a sample over. It stood still before; the destination reports at once."""
        self._tracers[worker].ended(place(worker), Prompt, PROMPT.id, "moved", left._replace(at=self.now - pause))
        self.tells(worker, to, "kept", id="sums/move/late", pause=0.0, reason="it is not at this generator")
        self.tells(worker, to, how, pause=pause, reason=reason)

    def tells(self, worker: int, to: int, how: MoveOutcome, *, pause: float, reason: str = "", id: str = "") -> None:
        moved = Moved(
            id=id or f"sums/move/{worker}{to}", job="sums", sample_id=PROMPT.id, source=worker, destination=to, how=how,
            num_bytes=1_200_000, num_rounds=2, pause_seconds=pause, reason=reason,
        )  # fmt: skip
        self._tracers[worker].published(place(worker), moved, self.now, True)

    def hands_back(self, worker: int) -> None:
        self._tracers[worker].ended(place(worker), Prompt, PROMPT.id, "nak")

    def says(self, worker: int) -> None:
        self._tracers[worker].published(place(worker), LOAD, self.now, True)

    def finishes(self, worker: int, *, is_new: bool = True) -> str:
        sample = replace(SAMPLE, generator=f"generator-{worker}")
        headers = self._tracers[worker].publishing(place(worker), sample)
        self._tracers[worker].published(place(worker), sample, self.now, is_new)
        self._tracers[worker].ended(place(worker), Prompt, PROMPT.id, "ack")
        return parse(headers["traceparent"])[1]

    def scored(self) -> None:
        """Score a sample that waited for half a second."""
        times = {"began": self.now, "ended": self.now, "sent": self.now - 0.5}
        self.spans.append(Span(run=UID, sample=PROMPT.id, name="reward", stage="reward", worker=0, step=3, **times))

    def life(self) -> Life:
        for tracer in self._tracers:
            assert not tracer._left
        [life] = lives([Span.from_line(span.to_line()) for span in self.spans])
        return life

    def told(self, life: Life) -> list[tuple[Any, ...]]:
        times = [(span.name, span.worker, span.began - 100.0, span.ended - 100.0) for span in life.spans]
        return [(name, worker, round(began, 6), round(ended, 6)) for name, worker, began, ended in times[1:]]


def moved_there_and_back() -> tuple[Watched, str]:
    watched = Watched()
    watched.after(1.0).takes(0)
    first = progress(4, plain=4)
    watched.after(3.5).takes(1, came=first)  # half a second after it stood still
    watched.gives(0, first, 1)
    second = progress(6, plain=5, moves=1)
    watched.after(2.0).takes(0, came=second)
    watched.gives(1, second, 0)
    return watched, watched.after(4.0).finishes(0)

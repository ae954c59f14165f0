"""Attributes of a sample's spans: the work of each generator that had it.

Records contain totals; the work of a stay is the total minus that at its begin."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec.messages.records import Moved, Sample
from rlhfspec.telemetry.base import SampleProgress, WorkerPlace
from rlhfspec.telemetry.spans import Attribute

Strategies = Sequence[tuple[str, int]]


def made_at_the_last(sample: Sample, before: SampleProgress | None) -> dict[str, Attribute]:
    if before is None:  # nearly always
        made = _made(
            sample.generator, sample.weights_versions, sample.strategies, sample.num_verifications,
            sample.num_drafted, sample.num_accepted, sample.seconds,
        )  # fmt: skip
    else:
        whole = before._replace(
            weights_versions=sample.weights_versions, strategies=sample.strategies, seconds=sample.seconds,
            num_verifications=sample.num_verifications, num_drafted=sample.num_drafted,
            num_accepted=sample.num_accepted,
        )  # fmt: skip
        made = _made_since(sample.generator, before, whole)
    made["finish_reason"] = sample.finish_reason
    if sample.error:
        made["error"] = sample.error
    return made


def made_before_it_left(
    place: WorkerPlace, before: SampleProgress | None, progress: SampleProgress
) -> dict[str, Attribute]:
    nothing = progress._replace(
        weights_versions=(), strategies=(), num_verifications=0, num_drafted=0, num_accepted=0, seconds=0.0
    )
    return _made_since(f"{place.stage}-{place.worker}", before or nothing, progress) | {"left": "moved"}


def of_a_move(moved: Moved) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "move": moved.id,
        "source": moved.source,
        "destination": moved.destination,
        "how": moved.how,
        "bytes": moved.num_bytes,
        "rounds": moved.num_rounds,
        "recomputed": moved.num_recomputed,
        "pause_seconds": round(moved.pause_seconds, 6),
    }
    return attributes | ({"reason": moved.reason} if moved.reason else {})


def _made_since(generator: str, before: SampleProgress, progress: SampleProgress) -> dict[str, Attribute]:
    earlier = dict(before.strategies)
    strategies = [(name, steps - earlier.get(name, 0)) for name, steps in progress.strategies]
    attributes = _made(
        generator,
        progress.weights_versions[before.num_tokens :],
        [(name, steps) for name, steps in strategies if steps],
        progress.num_verifications - before.num_verifications,
        progress.num_drafted - before.num_drafted,
        progress.num_accepted - before.num_accepted,
        progress.seconds - before.seconds,
    )
    return attributes | ({"tokens_before": before.num_tokens} if before.num_tokens else {})


def _made(
    generator: str,
    versions: Sequence[int],
    strategies: Strategies,
    num_verifications: int,
    num_drafted: int,
    num_accepted: int,
    seconds: float,
) -> dict[str, Attribute]:
    return {
        "generator": generator,
        "tokens": len(versions),
        "strategies": ", ".join([f"{name} x {steps}" for name, steps in strategies]),
        "engine_steps": sum([steps for _, steps in strategies]),
        "verifications": num_verifications,
        "drafted": num_drafted,
        "accepted": num_accepted,
        "weights_versions": ", ".join(map(str, sorted(set(versions)))),
        "work_seconds": round(seconds, 6),
    }

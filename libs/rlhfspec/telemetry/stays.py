"""Attributes of a sample's spans. The span of a stay (time on one generator) counts only the work of that stay."""

from __future__ import annotations

from rlhfspec.messages.records import Moved, Sample
from rlhfspec.telemetry.base import SampleProgress, WorkerPlace
from rlhfspec.telemetry.spans import Attribute

_NO_PROGRESS = SampleProgress(0, (), 0, 0, 0, (), at=0.0)


def made_at_the_last(sample: Sample, before: SampleProgress | None) -> dict[str, Attribute]:
    whole = _NO_PROGRESS._replace(
        weights_versions=sample.weights_versions, strategies=sample.strategies, seconds=sample.seconds,
        num_verifications=sample.num_verifications, num_drafted=sample.num_drafted, num_accepted=sample.num_accepted,
    )  # fmt: skip
    made = _made_since(sample.generator, before or _NO_PROGRESS, whole)
    made["finish_reason"] = sample.finish_reason
    if sample.error:
        made["error"] = sample.error
    return made


def made_before_it_left(
    place: WorkerPlace, before: SampleProgress | None, progress: SampleProgress
) -> dict[str, Attribute]:
    return _made_since(f"{place.stage}-{place.worker}", before or _NO_PROGRESS, progress) | {"left": "moved"}


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
    versions = progress.weights_versions[before.num_tokens :]
    attributes: dict[str, Attribute] = {
        "generator": generator,
        "tokens": len(versions),
        "strategies": ", ".join([f"{name} x {steps}" for name, steps in strategies if steps]),
        "engine_steps": sum([steps for _, steps in strategies]),
        "verifications": progress.num_verifications - before.num_verifications,
        "drafted": progress.num_drafted - before.num_drafted,
        "accepted": progress.num_accepted - before.num_accepted,
        "weights_versions": ", ".join(map(str, sorted(set(versions)))),
        "work_seconds": round(progress.seconds - before.seconds, 6),
    }
    return attributes | ({"tokens_before": before.num_tokens} if before.num_tokens else {})

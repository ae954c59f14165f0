"""Remarks on settings that are allowed but probably a mistake."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlhfspec.job import RLHFJob, Spec
from rlhfspec.job.block import Mark, marked

# Deeper paths, those of roles, come last.
CLUSTER_ONLY = sorted(marked(Spec, Mark.CLUSTER_ONLY), key=lambda path: path.count("."))


def remarks(job: RLHFJob) -> Iterator[str]:
    algorithm, generation, training = job.spec.algorithm, job.spec.generation, job.spec.training
    no_correction = not algorithm.importance_cap
    masked = generation.top_k > 0 or generation.top_p < 1
    num_updates = training.steps * training.epochs * training.mini_batches
    said = {
        f"generation.{'topK' if generation.top_k else 'topP'}: the trained log-probs ignore this mask; set "
        "algorithm.importanceCap to correct for it": masked and no_correction,
        "training.maxStaleness: nothing corrects for stale samples; set algorithm.importanceCap, such as 2": (
            training.max_staleness > 0 and no_correction
        ),
        "algorithm.klEstimator: k1 in the loss has a gradient of mean 0; use k2 or k3, or klPlacement: reward": (
            algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss" and algorithm.kl_estimator == "k1"
        ),
        "model.reference: not used while algorithm.klCoefficient is 0": (
            job.spec.model.reference is not None and algorithm.kl_coefficient == 0
        ),
        f"training.schedule.warmupSteps: the peak learning rate is never reached in {num_updates} optimizer steps": (
            training.schedule.warmup_steps >= num_updates
        ),
        f"roles.generator.workers: more than the {os.cpu_count()} cores here; they need memory and share the cores": (
            job.spec.roles.generator.workers > (os.cpu_count() or 1)
        ),
    }
    yield from (text for text, holds in said.items() if holds)
    aside = left_aside(job)
    if aside is not None:
        yield aside


def left_aside(job: RLHFJob) -> str | None:
    """Return a line that names the job's cluster-only fields, or None without any."""
    written = job.model_dump(by_alias=True, exclude_defaults=True)["spec"]
    named = [path for path in CLUSTER_ONLY if _is_in(written, path)]
    served = "; --serve PORT is the gateway here" if job.spec.roles.gateway.workers else ""
    return f"ignored outside a cluster: {', '.join(named)}{served}" if named else None


def _is_in(block: dict[str, Any], path: str) -> bool:
    *outer, last = path.split(".")
    for name in outer:
        block = block.get(name, {})
    return last in block

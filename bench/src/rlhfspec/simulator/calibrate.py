"""Fit of a step curve, prefill cost and lengths to the traces of a run.

Each step of a generator takes t0 + c * (its running samples), plus the prefill of new prompts. A sample's seconds
are thus linear in t0, c and seconds per prompt token, with coefficients known from all start and end times.

Example:
    >>> scenario = Scenario(num_generators=2, curve=StepCurve.affine(step_seconds=4e-3, sequence_seconds=1e-3))
    >>> found = calibrate(as_spans(scenario, workload("groups", num_generators=2, per_generator=32, seed=1)))
    >>> round(found.step_seconds * 1e3, 1), round(found.sequence_seconds * 1e3, 1)
    (4.0, 1.0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec.common.arrays import Floats
from rlhfspec.errors import InvalidRequest
from rlhfspec.simulator.lengths import Workload, workload
from rlhfspec.simulator.scenario import NANOSECONDS, Scenario
from rlhfspec.simulator.simulator import simulate
from rlhfspec.simulator.step_curves import StepCurve

_FEWEST = 16  # samples needed for a fit
_MOST = 8192  # newest samples used


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Sample of a run, or the part of it made by one generator. Times are seconds of any one clock."""

    sample: str
    generator: str
    prompt: str  # whose samples share a prefix
    step: int
    began: float
    ended: float
    num_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    step_seconds: float
    sequence_seconds: float
    prefill_seconds: float  # a prompt token
    error: float  # median over samples of |predicted / measured - 1|
    num_samples: int

    @property
    def curve(self) -> StepCurve:
        return StepCurve.affine(
            name="calibrated", step_seconds=self.step_seconds, sequence_seconds=self.sequence_seconds
        )


def calibrate(samples: Sequence[Ran]) -> Calibration:
    """Fit the curve to the samples by least squares, without negative costs."""
    told = [sample for sample in samples if sample.num_tokens > 1 and sample.ended > sample.began][-_MOST:]
    if len(told) < _FEWEST:
        raise InvalidRequest("calibrate", len(told), f"needs traces of at least {_FEWEST} generated samples")
    seconds = np.array([sample.ended - sample.began for sample in told])
    tokens = np.array([sample.num_tokens for sample in told], dtype=np.float64)
    design = np.stack([tokens, _tokens_beside(told), _prompt_tokens_beside(told)], axis=1)
    found = _not_negative(design / seconds[:, None])
    return Calibration(
        step_seconds=float(found[0]),
        sequence_seconds=float(found[1]),
        prefill_seconds=float(found[2]),
        error=float(np.median(np.abs(design @ found / seconds - 1))),
        num_samples=len(told),
    )


def _not_negative(design: Floats) -> Floats:
    """Return the least-squares solution of `design @ x = 1`, with unknowns set to 0 one by one until x >= 0."""
    kept = list(range(design.shape[1]))
    while kept:
        solved, *_ = np.linalg.lstsq(design[:, kept], np.ones(len(design)), rcond=None)
        if (solved >= 0).all():
            break
        kept.pop(int(np.argmin(solved)))
    found = np.zeros(design.shape[1])
    found[kept] = solved
    return found


def _tokens_beside(samples: Sequence[Ran]) -> Floats:
    """Return [S]: the number of tokens that a sample's generator made while the sample ran, its own included.

    Steps in an overlap of two samples are estimated from the sample with the larger share of its time in it.
    """
    found = np.zeros(len(samples))
    for members in _of_generators(samples).values():
        began = np.array([samples[index].began for index in members])
        ended = np.array([samples[index].ended for index in members])
        tokens = np.array([samples[index].num_tokens for index in members], dtype=np.float64)
        for place, index in enumerate(members):
            overlap = np.maximum(np.minimum(ended, ended[place]) - np.maximum(began, began[place]), 0)
            theirs, mine = overlap / (ended - began), overlap / (ended[place] - began[place])
            shared = np.where(theirs >= mine, tokens * theirs, tokens[place] * mine)
            found[index] = np.minimum(shared, np.minimum(tokens, tokens[place])).sum()
    return found


def _prompt_tokens_beside(samples: Sequence[Ran]) -> Floats:
    """Return [S]: the number of prompt tokens that a sample's generator prefilled beside it, shared prefixes once."""
    found = np.zeros(len(samples))
    for members in _of_generators(samples).values():
        firsts: dict[tuple[int, str], tuple[float, int]] = {}
        for index in members:
            sample = samples[index]
            key = (sample.step, sample.prompt)
            firsts[key] = min(firsts.get(key, (np.inf, 0)), (sample.began, sample.prompt_tokens))
        moments = np.array(sorted(firsts.values()))
        taken = np.concatenate(([0.0], np.cumsum(moments[:, 1])))
        for index in members:
            first = np.searchsorted(moments[:, 0], samples[index].began, side="left")
            last = np.searchsorted(moments[:, 0], samples[index].ended, side="left")
            found[index] = taken[last] - taken[first]
    return found


def _of_generators(samples: Sequence[Ran]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.generator, []).append(index)
    return members


def as_spans(scenario: Scenario, work: Workload) -> list[Ran]:
    """Return the samples that a simulated run without moves would record, to test the fit."""
    outcome = simulate(scenario, work)
    rows = zip(work.prompts, work.lengths, work.prompt_tokens, outcome.ended, outcome.ended_on, strict=True)
    return [
        Ran(
            sample=str(place),
            generator=str(where),
            prompt=str(prompt),
            step=1,
            began=0.0,
            ended=ended / NANOSECONDS,
            num_tokens=int(length),
            prompt_tokens=int(tokens),
        )
        for place, (prompt, length, tokens, ended, where) in enumerate(rows)
    ]


def workload_of(samples: Sequence[Ran], *, num_generators: int, seed: int) -> Workload:
    """Draw a stage from a run: as many prompts as its last step had, with all their samples, dealt in turn."""
    prompts: dict[tuple[int, str], list[Ran]] = {}
    for sample in _whole(samples):
        if sample.num_tokens:
            prompts.setdefault((sample.step, sample.prompt), []).append(sample)
    groups = list(prompts.values())
    last = max(step for step, _ in prompts)
    count = sum(step == last for step, _ in prompts)
    drawn = np.random.default_rng([seed, 12]).integers(0, len(groups), count)
    rows = [(number, sample) for number, group in enumerate(drawn.tolist()) for sample in groups[group]]
    numbers = np.array([number for number, _ in rows], dtype=np.int64)
    lengths = np.array([sample.num_tokens for _, sample in rows], dtype=np.int64)
    return Workload(
        lengths=lengths,
        prompt_tokens=np.array([sample.prompt_tokens for _, sample in rows], dtype=np.int64),
        prompts=numbers,
        dealt=numbers % num_generators,
        limit=int(max(sample.num_tokens for group in groups for sample in group)),
    )


def _whole(samples: Sequence[Ran]) -> Iterable[Ran]:
    """Return the samples with their parts merged."""
    found: dict[str, Ran] = {}
    for part in samples:
        rest = found.get(part.sample)
        num_tokens, prompt_tokens = (rest.num_tokens, rest.prompt_tokens) if rest else (0, 0)
        found[part.sample] = replace(
            part, num_tokens=num_tokens + part.num_tokens, prompt_tokens=prompt_tokens + part.prompt_tokens
        )
    return found.values()


__all__ = ["Calibration", "Ran", "as_spans", "calibrate", "workload", "workload_of"]

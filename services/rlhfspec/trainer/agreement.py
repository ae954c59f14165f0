"""Check that an engine generates with the trainer's weights: log-probs agree up to rounding.

The job's coarsest precision limits the mean absolute difference, over tokens of the trainer's weights version.
"""

from __future__ import annotations

from rlhfspec.errors import LogProbMismatch
from rlhfspec.huggingface.devices import device_of, settled
from rlhfspec.job import Spec
from rlhfspec.training.learning.learner import LearnReport
from rlhfspec.training.learning.rollouts import Rollouts

_ALLOWED = {"exact": 0.0, "float32": 1e-3, "bfloat16": 0.1, "quantised": 1.0}  # float32: GPUs may multiply in TF32
_QUANTISE = {"quantization", "quantization_config", "kv_cache_dtype"}  # arguments of an engine


def precision_of(spec: Spec) -> str:
    """Return the job's coarsest precision, a key of `_ALLOWED`."""
    spec = settled(spec, device_of(spec))
    if _QUANTISE & spec.generation.engine.arguments.keys():
        return "quantised"
    if spec.training.exact_on_policy:
        return "exact"
    dtypes = (spec.generation.dtype, spec.model.dtype, spec.training.autocast)
    return "bfloat16" if "bfloat16" in dtypes else "float32"


class Agreement:
    """Limit of the log-prob difference between engine and trainer, by the job's precision."""

    def __init__(self, spec: Spec) -> None:
        self._engine = spec.generation.engine.name
        self._precision = precision_of(spec)

    def allow_for_a_restart(self) -> None:
        """Allow rounding differences in an exact job, because another machine may have trained the samples' weights."""
        if self._precision == "exact":
            self._precision = "float32"

    def check(self, step: int, rollouts: Rollouts, report: LearnReport) -> None:
        """Raise LogProbMismatch if the step's mean difference exceeds the limit."""
        is_current = (rollouts.weights_versions == step - 1) & report.has_run
        if not is_current.any():
            return
        differences = report.untempered_log_probs.double() - rollouts.log_probs.double()
        difference, allowed = float(differences[is_current].abs().mean()), _ALLOWED[self._precision]
        if not difference <= allowed:
            raise LogProbMismatch(self._engine, step, difference, allowed, self._precision)

"""Every error the system raises on purpose, drawn as a tree.

    RLHFSpecError
    ├── InvalidRequest (ValueError)   the user asked for something impossible; names the field
    │   └── UnsupportedModel          a model feature we refuse by name rather than ignore
    ├── WeightsVersionError           weights older than, or other than, what was asked for
    ├── SequenceStateError            an exported sequence does not fit this engine
    └── NumericalError                a model gave NaN or infinite logits for one sequence

Example:
    >>> raise InvalidRequest("temperature", -1.0, "must be >= 0")
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: temperature: must be >= 0 (got -1.0)
"""

from __future__ import annotations


class RLHFSpecError(Exception):
    """Root of every error raised on purpose."""


class InvalidRequest(RLHFSpecError, ValueError):
    """A value a user can mend: which field, what it was, what it must be."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        super().__init__(f"{field}: {problem} (got {value!r})")


class UnsupportedModel(InvalidRequest):
    """The model needs an attention feature that the engine refuses rather than ignores."""


class WeightsVersionError(RLHFSpecError):
    """Weights that would break the law: older than the loaded ones, or not those a request asked for."""

    def __init__(self, wanted: int, have: int, problem: str) -> None:
        self.wanted = wanted
        self.have = have
        super().__init__(f"weights version: {problem} (wanted {wanted}, have {have})")


class SequenceStateError(RLHFSpecError):
    """An exported sequence that does not fit this engine; `field` says which part of its manifest differs."""

    def __init__(self, field: str, theirs: object, ours: object) -> None:
        self.field = field
        self.theirs = theirs
        self.ours = ours
        super().__init__(f"sequence state: {field} differs (theirs {theirs!r}, ours {ours!r})")


class NumericalError(RLHFSpecError):
    """A model produced NaN or infinity where a probability was needed."""

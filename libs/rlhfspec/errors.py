"""Exceptions of RLHFSpec.

    RLHFSpecError
    ├── InvalidRequest (ValueError)   invalid value of a named field
    │   ├── UnsupportedModel          unsupported feature of a model
    │   ├── JobError                  invalid job file or data
    │   └── StageRefused              job refused by a stage's process
    ├── EndedEarly                    end of a run before its last step
    │   ├── DataExhausted             the dataset's epochs are over
    │   └── PolicyCollapsed           the policy collapsed
    ├── WeightsVersionError           weights of an unexpected version
    ├── SequenceStateError            incompatible exported sequence
    ├── RolloutError                  mismatched samples and scores
    ├── RewardError                   no reward for a sample
    ├── MalformedRecord               invalid bytes of a record
    ├── TransportClosed               use of a closed transport or subscription
    ├── LogProbMismatch               log-probs unlike the trainer's
    ├── TransportFull                 timeout of `publish`
    ├── MessageTooLarge               message above the server's limit
    ├── PlacedError                   problem of a named thing
    │   ├── StorageError              weights or checkpoint missing, damaged or not writable
    │   │   └── StorageUnavailable    object store unreachable; temporary
    │   ├── ServerFailed              NATS or Redis of a run does not start
    │   ├── TransportUnavailable      message server unreachable; temporary
    │   ├── EngineFailed              engine process that keeps failing
    │   └── LinkError                 failed transfer between engines
    ├── ClusterUnavailable            API server unreachable or failing
    │   └── ClusterRefused            forbidden request, or missing object
    ├── LeadershipLost                write of an operator that no longer leads
    ├── StageError                    run ended by one stage's worker
    │   ├── StageFailed               the worker raised
    │   ├── StageStalled              the worker missed its deadline
    │   │   └── LoopStalled           all workers wait
    │   └── RecordUndeliverable       record that no worker could handle
    └── NumericalError                NaN or infinite logits of a sequence

Example:
    >>> raise InvalidRequest("temperature", -1.0, "must be >= 0")
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: temperature: must be >= 0 (got -1.0)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the known word most similar to `word`, ignoring case and underscores, or None below `cutoff`.

    >>> nearest("learning_rate", ["name", "learningRate"]), nearest("banana", ["name"])
    ('learningRate', None)
    """
    by_folded = {_folded(name): name for name in known}
    found = difflib.get_close_matches(_folded(word), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a "did you mean" hint for an unknown word, or an empty text.

    >>> did_you_mean("stpes", ["steps", "seed"]), did_you_mean("banana", ["steps"])
    ('; did you mean steps?', '')
    """
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def _folded(word: str) -> str:
    return word.replace("_", "").lower()


def _brief(value: object) -> str:
    """Return `repr(value)` on one line, cut at 300 characters.

    >>> _brief([1, 2]), len(_brief("x" * 1_000_000))
    ('[1, 2]', 303)
    """
    text = " ".join(repr(value).split("\n"))
    return text if len(text) <= 300 else f"{text[:300]}..."


class RLHFSpecError(Exception):
    pass


class PlacedError(RLHFSpecError):
    """Error about one named thing, such as a server.

    >>> str(ServerFailed("nats-server", "ended with exit code 1: no space left on device"))
    'nats-server: ended with exit code 1: no space left on device'
    """

    def __init__(self, place: object, problem: str) -> None:
        self.place = str(place)
        self.problem = problem
        super().__init__(f"{place}: {problem}")


class InvalidRequest(RLHFSpecError, ValueError):
    """Error about a value that the user has to change."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        super().__init__(f"{field}: {problem} (got {_brief(value)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Problem of a job or its data.

    >>> print(Problem(field="spec.training.steps", value="many", problem="must be a whole number", where="line 9"))
    line 9: spec.training.steps: must be a whole number (got 'many')
    """

    field: str
    problem: str
    value: object = None
    where: str = ""  # such as "line 12" or "--set training.steps=0"; empty when the problem has no single place

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.field}: {self.problem}" + ("" if self.value is None else f" (got {self._shown()})")

    def _shown(self) -> str:
        text = repr(self.value)
        return text if len(text) <= 80 else f"{text[:77]}..."


class JobError(InvalidRequest):
    """Invalid job or data; `problems` are in the order of the file.

    >>> error = JobError("job.yaml", [Problem(field="spec.trainig", problem="unknown key; did you mean training?")])
    >>> str(error)
    'job.yaml: spec.trainig: unknown key; did you mean training?'
    """

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        assert problems, "an error without a problem"
        super().__init__(problems[0].field, problems[0].value, problems[0].problem)
        self.source = source
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        return "\n  ".join([f"{self.source}: {len(self.problems)} problems", *map(str, self.problems)])


class StageRefused(InvalidRequest):
    """Refusal of a job by a stage's process; `said` is its message, which begins with the field.

    >>> str(StageRefused("spec.model.path: does not exist (got 'm')"))
    "spec.model.path: does not exist (got 'm')"
    """

    def __init__(self, said: str) -> None:
        field, _, problem = said.partition(": ")
        super().__init__(field, None, problem)
        self.said = said

    def __str__(self) -> str:
        return self.said


class EndedEarly(RLHFSpecError):
    """Clean end of a run before its last step."""


class PolicyCollapsed(EndedEarly):
    """End of a run whose policy collapsed; `sign` is the warning."""

    def __init__(self, sign: str) -> None:
        super().__init__(f"{sign} (training.stopOnCollapse is true; set it to false to continue)")


class DataExhausted(EndedEarly):
    """End of a run whose dataset has no epochs left."""

    def __init__(self, last_step: int, num_rows: int, epochs: int) -> None:
        self.last_step = last_step
        super().__init__(
            f"the data ended after step {last_step}: {num_rows} prompts, {epochs} epochs "
            "(dataset.epochs: null repeats them without limit)"
        )


class UnsupportedModel(InvalidRequest):
    """Model with an attention feature that the engine does not support."""


class WeightsVersionError(RLHFSpecError):
    """Weights older than the loaded ones, or of another version than requested."""

    def __init__(self, wanted: int, have: int, problem: str) -> None:
        self.have = have
        super().__init__(f"weights version: {problem} (wanted {wanted}, have {have})")


class SequenceStateError(RLHFSpecError):
    """Exported sequence that does not fit this engine, because `field` of its manifest differs."""

    def __init__(self, field: str, theirs: object, ours: object) -> None:
        self.field = field
        super().__init__(f"sequence state: {field} differs (theirs {_brief(theirs)}, ours {_brief(ours)})")


class RolloutError(RLHFSpecError):
    """Samples and scores that cannot be trained on together."""

    def __init__(self, sample_id: str, problem: str) -> None:
        super().__init__(f"sample {sample_id}: {problem}")


class MalformedRecord(RLHFSpecError):
    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"malformed record: {problem}")


class TransportClosed(RLHFSpecError):
    def __init__(self, subject: str) -> None:
        super().__init__(f"{subject}: the transport or the subscription is closed")


class ServerFailed(PlacedError):
    """NATS or Redis server that is missing, does not start or refuses the connection."""


class EngineFailed(PlacedError):
    """Engine process that cannot continue."""


class LogProbMismatch(RLHFSpecError):
    """Log-probs of an engine that differ from the trainer's by more than rounding.

    >>> str(LogProbMismatch("vllm", 2, 0.0685, 1e-3, "float32"))[:96]
    "vllm: step 2: its log-probs differ from the trainer's by 0.069 a token, and float32 explains at "
    """

    def __init__(self, engine: str, step: int, difference: float, allowed: float, precision: str) -> None:
        self.engine = engine
        self.step = step
        self.difference = difference
        self.allowed = allowed
        super().__init__(
            f"{engine}: step {step}: its log-probs differ from the trainer's by {difference:.2g} a token, and "
            f"{precision} explains at most {allowed:g}: it did not generate with the weights of version {step - 1}. "
            "This step was discarded; use another generation.engine and resume the run"
        )


class TransportFull(RLHFSpecError):
    """Timeout of `publish`, because consumers have not acknowledged earlier messages.

    >>> str(TransportFull("rlhf.sums.sample", 8192, ("critic",), 600.0))
    'rlhf.sums.sample: no room for 600 s: 8192 messages are not yet acknowledged by critic'
    """

    def __init__(self, subject: str, num_pending: int, waits_for: Sequence[str], seconds: float) -> None:
        lag = f"{num_pending} messages are not yet acknowledged by {', '.join(waits_for) or 'anybody'}"
        super().__init__(f"{subject}: no room for {seconds:g} s: {lag}")


class TransportUnavailable(PlacedError):
    """Temporary failure to reach the server at a URL."""


class ClusterUnavailable(RLHFSpecError):
    """Failed request to the API server.

    >>> str(ClusterUnavailable("list of Pod", "pods is forbidden"))
    'request to the API server failed (list of Pod): pods is forbidden'
    """

    def __init__(self, asked: str, problem: str) -> None:
        self.problem = problem
        super().__init__(f"request to the API server failed ({asked}): {problem}")


class ClusterRefused(ClusterUnavailable):
    """Request that the API server forbids, or whose object does not exist."""


class LeadershipLost(RLHFSpecError):
    """Write that was not sent because another replica may lead."""

    def __init__(self, what: str) -> None:
        super().__init__(f"this replica is no longer the leader; not done: {what}")


class LinkError(PlacedError):
    """Failed transfer of a sequence between two engines; it stays at its source."""


class MessageTooLarge(RLHFSpecError):
    """Message that exceeds the server's size limit, so that retries cannot succeed."""

    def __init__(self, subject: str, id: str, num_bytes: int, most: int) -> None:
        super().__init__(f"{subject}: {id} has {num_bytes} bytes; the server accepts {most} (max_payload)")


class StageError(RLHFSpecError):
    """Error of one stage that ended the run; `worker` is None if it is unknown."""

    def __init__(self, stage: str, worker: int | None, problem: str) -> None:
        self.stage = stage
        self.worker = worker
        self.problem = problem
        super().__init__(f"{stage}: {problem}" if worker is None else f"{stage} {worker}: {problem}")


class StageFailed(StageError):
    """Exception of a worker, with the original as `__cause__`.

    >>> str(StageFailed("reward", 0, "ValueError: no digits"))
    'reward 0: failed: ValueError: no digits'
    """

    def __init__(self, stage: str, worker: int, reason: str) -> None:
        super().__init__(stage, worker, f"failed: {reason}")


class StageStalled(StageError):
    """Work of a worker that missed its deadline.

    >>> str(StageStalled("reward", 0, "reward of sums/3/7/1", 61.0))
    'reward 0: stalled: reward of sums/3/7/1 takes 61 s, longer than its deadline'
    """

    def __init__(self, stage: str, worker: int, what: str, seconds: float, problem: str = "") -> None:
        super().__init__(stage, worker, problem or f"stalled: {what} takes {seconds:.0f} s, longer than its deadline")


class LoopStalled(StageStalled):
    """Stall of all workers; `waits` holds (stage, worker, awaited, seconds), longest first.

    >>> print(LoopStalled(120.0, [("trainer", 0, "scores of step 3", 130.0), ("reward", 0, "samples", 121.0)]))
    trainer 0: stalled: no worker has worked for 120 s
      trainer 0 waits for scores of step 3 (130 s)
      reward 0 waits for samples (121 s)
    """

    def __init__(self, seconds: float, waits: Sequence[tuple[str, int, str, float]]) -> None:
        assert waits, "a loop without workers cannot stall"
        stage, worker, what, _ = waits[0]
        lines = [f"{name} {index} waits for {wait} ({waited:.0f} s)" for name, index, wait, waited in waits]
        problem = "\n  ".join([f"stalled: no worker has worked for {seconds:.0f} s", *lines])
        super().__init__(stage, worker, what, seconds, problem)


class RecordUndeliverable(StageError):
    """Record that a stage failed to handle in every delivery.

    >>> str(RecordUndeliverable("reward", "rlhf.sums.sample", "sums/3/7/1", "5 deliveries and no ack"))
    'reward: could not handle sums/3/7/1 of rlhf.sums.sample: 5 deliveries and no ack'
    """

    def __init__(self, stage: str, subject: str, record_id: str, reason: str) -> None:
        super().__init__(stage, None, f"could not handle {record_id} of {subject}: {reason}")


class NumericalError(RLHFSpecError):
    pass


class RewardError(RLHFSpecError):
    """Reward source that gave no number for a sample."""

    def __init__(self, source: str, sample_id: str, problem: str) -> None:
        self.problem = problem
        super().__init__(f"reward {source!r} of sample {sample_id}: {problem}")


class StorageError(PlacedError):
    """Stored weights or a checkpoint that are missing, damaged or not writable."""


class StorageUnavailable(StorageError):
    pass

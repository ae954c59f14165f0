"""Records that stages exchange, frozen and free of torch.

A prompt and its sample have the id `{job}/{step}/{prompt}/{replica}`; a retry has the same id, so duplicates are
dropped. Steps count from 1. Weights version 0 is the initial model; step s trains version s - 1 into version s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.messages.records.models import Drafting, ModelReport

ScoringStage = Literal["reward", "reference", "critic"]
Role = Literal["policy", "critic", "drafter"]
FinishReason = Literal["stop", "length", "error"]
Doing = Literal["working", "waiting", "stopped"]
Purpose = Literal["training", "evaluation"]
# kv: moved with its KV cache; tokens: moved without, to be prefilled again; kept: not moved, with a reason; lost: not
# confirmed by the destination, so the sample will be redelivered.
MoveOutcome = Literal["kv", "tokens", "kept", "lost"]


def sample_id(job: str, *, step: int, prompt: int, replica: int) -> str:
    """Return the id of a sample; it is not zero-padded, so sort by `sort_key`."""
    return f"{job}/{step}/{prompt}/{replica}"


def evaluation_id(job: str, *, step: int, prompt: int, replica: int) -> str:
    """Return the id of an evaluation's sample."""
    return f"{job}/evaluation-{step}/{prompt}/{replica}"


def sample_seed(job_seed: int, record_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{job_seed}:{record_id}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Request for one sample; the `samplesPerPrompt` replicas of a prompt share a group id."""

    id: str
    job: str
    step: int
    prompt: int  # index in the step's order, continued through its demands
    replica: int
    text: str
    token_ids: tuple[int, ...]
    columns_json: str  # the data row's other columns as a JSON object, for rewards
    seed: int  # 64 bits, unsigned
    weights_version: int  # the oldest version that may generate it
    purpose: Purpose = "training"  # for an evaluation, `step` is the step it follows; 0: before training

    @property
    def group_id(self) -> str:
        return self.id.rpartition("/")[0]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return (self.step, self.prompt, self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Finished response; with `finish_reason` "error" it has an `error` and no usable tokens."""

    id: str
    job: str
    step: int
    prompt: int
    replica: int
    prompt_text: str
    prompt_token_ids: tuple[int, ...]
    columns_json: str
    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # of each token under the policy at temperature 1
    tempered_log_probs: tuple[float, ...]  # under the actual sampling distribution
    weights_versions: tuple[int, ...]  # that generated each token
    finish_reason: FinishReason
    error: str = ""
    num_verifications: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    strategies: tuple[tuple[str, int], ...] = ()  # (plan, number of engine steps under it)
    experts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (layer, rows each expert ran since the last report)
    seconds: float = 0.0  # its share of engine time: each step's time is divided among its sequences
    generator: str = ""  # for display only
    purpose: Purpose = "training"

    @property
    def group_id(self) -> str:
        return self.id.rpartition("/")[0]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return (self.step, self.prompt, self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of one scoring stage for one sample; a failure has an `error`, never a silent zero.

    `values` has one number from reward, one per response token from reference (log-probs) and critic (values).
    """

    id: str
    sample_id: str
    job: str
    step: int
    stage: ScoringStage
    values: tuple[float, ...]
    components: tuple[tuple[str, float], ...] = ()  # of a reward's sources, unweighted
    weights_version: int = 0  # of the critic
    error: str = ""
    seconds: float = 0.0  # of work on it
    purpose: Purpose = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Announcement of new weights at `uri` (`memory:`, `file:`)."""

    id: str
    job: str
    version: int
    role: Role
    uri: str
    digest: str  # sha256 over names, shapes, types and bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """Announcement of a generator's drafter weights; no token depends on it, so it may be lost, late or wrong.

    The record is separate from `Weights` because a generator must not announce a policy.
    """

    id: str
    job: str
    version: int  # number of tokens it has learnt from, counted with repetition
    uri: str
    digest: str

    @property
    def weights(self) -> Weights:
        return Weights(id=self.id, job=self.job, version=self.version, role="drafter", uri=self.uri, digest=self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    id: str
    job: str
    num_prompts: int
    num_held_out: int  # evaluation prompts
    last_step: int  # the last step that the epochs fill; 0: no end
    columns: Mapping[str, str] = field(default_factory=dict)  # as data.Prompts.columns; for the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Request for more prompts in a step after dynamic sampling dropped some."""

    id: str
    job: str
    step: int
    round: int  # 1 is the first demand of a step
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Current load of a generator, which may be lost because no token or curve depends on it.

    The rebalancer uses `worker` and all fields after it. A step of B sequences takes about `step_seconds +
    sequence_seconds * B`.
    """

    id: str
    job: str
    generator: str
    step: int
    num_running: int
    num_waiting: int
    num_finished: int
    num_tokens: int  # generated since start
    tokens_per_second: float  # over the last moments
    accepted_per_verification: float | None  # drafted tokens; None: nothing was drafted
    strategy: str
    worker: int = 0
    incarnation: str = ""  # of its process; a new process holds nothing of the old one
    host: str = ""  # engines of one host share its memory bandwidth
    weights_version: int = 0
    is_leaving: bool = False
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    prefill_seconds: float = 0.0  # per token
    prefill_tokens: int = 0  # still to prefill
    num_free_rows: int = 0
    num_free_tokens: int = 0  # room in free KV blocks
    sample_ids: tuple[str, ...] = ()
    num_generated: tuple[int, ...] = ()
    num_held: tuple[int, ...] = ()
    num_prefilled: int = 0  # tokens prefilled since start: prompts, and recomputed responses
    num_found: int = 0  # tokens not prefilled because their KV was cached
    learning_seconds: float = 0.0  # spent on drafter learning since start
    saved_seconds: float = 0.0  # by learning; an estimate
    drafter_version: int = 0  # tokens that its drafter has learnt from, here or elsewhere
    drafting: tuple[Drafting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Advice to move a sample; a lost, late or wrong one only worsens the balance."""

    id: str  # of the move, in all its records
    job: str
    sample_id: str
    source: int  # generator numbers
    destination: int
    gain_seconds: float  # by which the later of the two generators ends earlier
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Outcome of a move, as reported by its source generator."""

    id: str  # of the move
    job: str
    sample_id: str
    source: int
    destination: int
    how: MoveOutcome
    reason: str = ""  # of a refusal or a failure
    code: str = ""  # of that reason, for programs
    num_bytes: int = 0
    num_rounds: int = 0  # of KV sent while the source continued
    num_tokens: int = 0  # of the sample
    num_recomputed: int = 0  # of num_tokens, those prefilled again at the destination
    pause_seconds: float = 0.0  # from the source's last step until the destination has it, or it continues


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    id: str
    sample: str
    source: int
    destination: int
    gain_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decision of the rebalancer with its reasons, a line of `moves.jsonl`.

    Times are seconds from now. `num_wanted` is the number of generators worth running (0: unknown).
    """

    id: str
    job: str
    num_wanted: int = 0
    why_wanted: str = ""
    ends: Mapping[int, float] = field(default_factory=dict)  # by generator, without moves; empty if there are many
    num_generators: int = 0
    num_samples: int = 0
    latest_end: float = 0.0
    latest_end_after: float = 0.0  # with the moves
    moves: tuple[PlannedMove, ...] = ()
    why_not: tuple[str, ...] = ()  # reasons why nothing else moves
    dry: Mapping[int, str] = field(default_factory=dict)  # by idle generator, what it should do


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Metrics of one trained step, a line of `steps.jsonl`."""

    id: str
    job: str
    metrics: StepMetrics

    @property
    def step(self) -> int:
        return self.metrics.step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Evaluation on held-out prompts, a line of `evaluations.jsonl`."""

    id: str
    job: str
    evaluation: Evaluation

    @property
    def step(self) -> int:
        return self.evaluation.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Current activity of one worker; heartbeats may be lost."""

    id: str
    job: str
    stage: str
    worker: int
    doing: Doing
    what: str
    since_seconds: float  # time in the current activity
    overdue_seconds: float  # past the deadline of its work; negative: time left; -inf: not working
    busy_seconds: float  # total working time; its rate of change is the utilisation
    trouble: str = ""  # what fails and is retried; observers measure since when


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Process, addresses and model checks of a ready worker."""

    id: str  # new with every start of the process
    job: str
    stage: str
    worker: int
    host: str
    pid: int
    grpc_address: str  # host:port of health and weights
    http_address: str  # of /healthz, /readyz and /metrics
    moves_address: str = ""  # host:port of a generator's move server; empty within one process
    models: Mapping[str, ModelReport] = field(default_factory=dict)  # by role, for the manifest


Record = (
    Prompt
    | Sample
    | Score
    | Weights
    | DraftWeights
    | DatasetInfo
    | Demand
    | Load
    | Move
    | Moved
    | Plan
    | StepReport
    | EvaluationReport
    | Heartbeat
    | WorkerInfo
)

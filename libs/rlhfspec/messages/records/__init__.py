"""What the stages say to each other: frozen, torch-free. `wire` encodes them, `loop` says which stage reads what.

Ids are derived, never drawn: a prompt's is `{job}/{step}/{prompt}/{replica}`, and its sample carries the same one, so a
retry is the same sample and a duplicate is dropped by its id. Steps count from 1. Weights version v is the policy
after v optimizer steps; version 0 is the model the job started from, and step s trains version s - 1 into version s.

Example:
    >>> prompt = Prompt(
    ...     id=sample_id("sums", step=3, prompt=7, replica=1), job="sums", step=3, prompt=7, replica=1, text="2+2=",
    ...     token_ids=(50, 43, 50, 61), columns_json='{"answer": "4"}', seed=sample_seed(11, "sums/3/7/1"),
    ...     weights_version=2,
    ... )
    >>> prompt.id, prompt.group_id
    ('sums/3/7/1', 'sums/3/7')
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.messages.records.models import ModelReport

ScoringStage = Literal["reward", "reference", "critic"]
Role = Literal["policy", "critic", "drafter"]
FinishReason = Literal["stop", "length", "error"]
Doing = Literal["working", "waiting", "stopped"]
Purpose = Literal["training", "evaluation"]
# kv: with its KV; tokens: without it, to be computed again there; kept: it stays, and why; lost: the destination
# neither has it nor says so, and it will be delivered again.
MoveOutcome = Literal["kv", "tokens", "kept", "lost"]


def sample_id(job: str, *, step: int, prompt: int, replica: int) -> str:
    """Zero-free and readable; sort by `sort_key`, not by the text.

    >>> sample_id("sums", step=1, prompt=0, replica=12)
    'sums/1/0/12'
    """
    return f"{job}/{step}/{prompt}/{replica}"


def evaluation_id(job: str, *, step: int, prompt: int, replica: int) -> str:
    """Of a held-out prompt, answered by the policy after a step.

    >>> evaluation_id("sums", step=10, prompt=0, replica=1)
    'sums/evaluation-10/0/1'
    """
    return f"{job}/evaluation-{step}/{prompt}/{replica}"


def sample_seed(job_seed: int, record_id: str) -> int:
    """The 64-bit seed of a sample: a hash of the job's seed and the sample's id.

    >>> sample_seed(11, "sums/3/7/1") == sample_seed(11, "sums/3/7/1") != sample_seed(12, "sums/3/7/1")
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{job_seed}:{record_id}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One sample to generate. The replicas of one prompt are `samplesPerPrompt` records with one group id."""

    id: str
    job: str
    step: int
    prompt: int  # place in the step's order, counted on through the rounds of a step's demands
    replica: int
    text: str
    token_ids: tuple[int, ...]
    columns_json: str  # the data row's other columns, as a JSON object, for the rewards
    seed: int  # 64 bits, without sign
    weights_version: int  # the oldest version that may sample it
    purpose: Purpose = "training"  # of an evaluation, `step` is the one after which it is made; 0: before training

    @property
    def group_id(self) -> str:
        return self.id.rpartition("/")[0]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return (self.step, self.prompt, self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished response. `finish_reason` "error" carries its reason and no usable tokens."""

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
    log_probs: tuple[float, ...]  # of each token under the untempered policy
    tempered_log_probs: tuple[float, ...]  # under the distribution really sampled from
    weights_versions: tuple[int, ...]  # that sampled each token
    finish_reason: FinishReason
    error: str = ""
    num_verifications: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    strategies: tuple[tuple[str, int], ...] = ()  # under which plan its tokens were made, in how many steps each
    experts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # layer, and rows each expert ran since a sample said so
    seconds: float = 0.0  # its share of the generator's work: a step's seconds are divided among all that were there
    generator: str = ""  # which one, for the eyes only
    purpose: Purpose = "training"

    @property
    def group_id(self) -> str:
        return self.id.rpartition("/")[0]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return (self.step, self.prompt, self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one scoring stage says of one sample. A failure is a score with `error`, never a silent zero.

    `values`: one number from reward; a number a response token from reference (log-probs) and critic (values).

    >>> Score(id="sums/3/7/1/reward", sample_id="sums/3/7/1", job="sums", step=3, stage="reward", values=(0.5,),
    ...       components=(("exact", 0.0), ("format", 1.0))).values
    (0.5,)
    """

    id: str
    sample_id: str
    job: str
    step: int
    stage: ScoringStage
    values: tuple[float, ...]
    components: tuple[tuple[str, float], ...] = ()  # a reward's sources, unweighted
    weights_version: int = 0  # of the critic
    error: str = ""
    seconds: float = 0.0  # of work for it
    purpose: Purpose = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """New weights are to be had at `uri` (`memory:`, `file:`)."""

    id: str
    job: str
    version: int
    role: Role
    uri: str
    digest: str  # sha256 over names, shapes, types and bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """What a generator's drafter has learnt is to be had at `uri`. May be lost, late or wrong: no token depends on it.

    A record of its own: what a generator may announce is no policy.
    """

    id: str
    job: str
    version: int  # tokens that it has learnt from, each as often as it was used
    uri: str
    digest: str

    @property
    def weights(self) -> Weights:
        """Return the record by which the weight store knows them."""
        return Weights(id=self.id, job=self.job, version=self.version, role="drafter", uri=self.uri, digest=self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """What the prompts stage found when it read the data."""

    id: str
    job: str
    num_prompts: int
    num_held_out: int  # prompts of an evaluation
    last_step: int  # that the epochs fill; 0: the data never ends
    columns: Mapping[str, str] = field(default_factory=dict)  # as data.Prompts.columns has them: for the rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The step needs more prompts than it was first given (dynamic sampling threw some away)."""

    id: str
    job: str
    step: int
    round: int  # 1 is the first demand of a step
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a generator does right now. May be lost: nothing that decides a token or a curve reads it.

    The rebalancer plans with what stands from `worker` on: a step of B sequences takes about `step_seconds +
    sequence_seconds * B`; of each unfinished sequence, its id, how many tokens of its response are there, and how many
    tokens in all (which its KV grows with).
    """

    id: str
    job: str
    generator: str
    step: int
    num_running: int
    num_waiting: int
    num_finished: int
    num_tokens: int  # generated since it started
    tokens_per_second: float  # over the last moments
    accepted_per_verification: float | None  # of drafted tokens; None: nothing was drafted
    strategy: str
    worker: int = 0
    incarnation: str = ""  # of its process: another one holds nothing of what this one held
    host: str = ""  # engines of one host share its memory's bandwidth
    weights_version: int = 0
    is_leaving: bool = False
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    prefill_seconds: float = 0.0  # a token
    prefill_tokens: int = 0  # owed
    num_free_rows: int = 0
    num_free_tokens: int = 0  # that KV blocks are free for
    sample_ids: tuple[str, ...] = ()
    num_generated: tuple[int, ...] = ()
    num_held: tuple[int, ...] = ()
    num_prefilled: int = 0  # tokens run since it started before their sequences could decode: prompts, mostly
    num_found: int = 0  # that would have been, but their KV was there
    learning_seconds: float = 0.0  # in which the drafter learnt, since it started
    saved_seconds: float = 0.0  # by what it learnt, an estimate
    tokens_before_learning: float | None = None  # a verification with drafts; None: it never drafted before it learnt
    tokens_while_learning: float | None = None  # of the last moments; None too where the drafter does not learn
    drafter_version: int = 0  # tokens that its drafter has learnt from, here or at others


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The rebalancer's advice to the source: this sample would be better off there.

    May be lost, late or wrong: that costs balance, never a token.
    """

    id: str  # of the move, wherever it is told of
    job: str
    sample_id: str
    source: int  # numbers of generators
    destination: int
    gain_seconds: float  # of the later end of the two
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """How a move ended, as its source saw it."""

    id: str  # the move's
    job: str
    sample_id: str
    source: int
    destination: int
    how: MoveOutcome
    reason: str = ""  # why it was refused or given up
    num_bytes: int = 0
    num_rounds: int = 0  # of KV sent while the source went on
    num_tokens: int = 0  # that it had
    num_recomputed: int = 0  # of these, those whose KV the destination computes again
    pause_seconds: float = 0.0  # from the source's last step with it until the destination had it, or it went on


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """One move of a plan, as `moves.jsonl` has it."""

    id: str
    sample: str
    source: int
    destination: int
    gain_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the rebalancer decided, and why: a line of `moves.jsonl` (`rlhfspec.runs.folder.moves`). Times are seconds
    from now. `num_wanted`: so many generators would pay; 0: it does not know yet."""

    id: str
    job: str
    num_wanted: int = 0
    why_wanted: str = ""
    ends: Mapping[int, float] = field(default_factory=dict)  # by generator, without moves; empty where there are many
    num_generators: int = 0
    num_samples: int = 0
    latest_end: float = 0.0
    latest_end_after: float = 0.0  # the moves
    moves: tuple[PlannedMove, ...] = ()
    why_not: tuple[str, ...] = ()  # nothing else moves
    dry: Mapping[int, str] = field(default_factory=dict)  # by generator that has nothing to do, what it should do


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One trained step. `metrics` is the line of `steps.jsonl` (docs/run-folder.md)."""

    id: str
    job: str
    metrics: StepMetrics

    @property
    def step(self) -> int:
        return self.metrics.step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """How the policy answers held-out prompts. `evaluation` is the line of `evaluations.jsonl`."""

    id: str
    job: str
    evaluation: Evaluation

    @property
    def step(self) -> int:
        return self.evaluation.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one worker does right now (`rlhfspec.stage.vitals`). May be lost."""

    id: str
    job: str
    stage: str
    worker: int
    doing: Doing
    what: str
    since_seconds: float  # how long it has been doing that
    overdue_seconds: float  # past the deadline of its work; negative: so much is left; -inf: not working
    busy_seconds: float  # working, in all; by its difference over time a worker's utilisation
    trouble: str = ""  # what fails, and is tried again; since when is for observers to say


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker is ready, in this process: where it can be reached, and how its models were found right."""

    id: str  # new with every start of the process
    job: str
    stage: str
    worker: int
    host: str
    pid: int
    grpc_address: str  # host:port of health and weights
    http_address: str  # of /healthz, /readyz and /metrics
    moves_address: str = ""  # host:port where a generator is asked about moves; within one process it has none
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

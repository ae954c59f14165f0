"""RLHFJob: the one schema of the command line, the custom resource and the chart. Strict; torch-free.

YAML is camelCase, Python snake_case. Every field says its unit, its default and the reason for it. What an algorithm
decides by default (`choices.algorithms`) is filled in on reading, so that a resolved job shows everything.

Example:
    >>> job = RLHFJob.model_validate({
    ...     "apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "sums"},
    ...     "spec": {"model": {"path": "m"}, "dataset": {"path": "d.jsonl"}, "algorithm": {"name": "dapo"},
    ...              "rewards": {"sources": [{"type": "function", "function": "rewards:exact"}]}},
    ... })
    >>> job.spec.algorithm.clip_high, job.spec.training.max_staleness
    (0.28, 0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from rlhfspec.choices.algorithms import ALGORITHMS, AlgorithmEntry
from rlhfspec.choices.drafters import SPECULATION_MODES
from rlhfspec.choices.engines import ENGINES
from rlhfspec.choices.links import LINKS_OF_A_JOB
from rlhfspec.job_block import (
    MOST_SECONDS,
    Block,
    Count,
    Fraction,
    Mark,
    Natural,
    Positive,
    Rate,
    Seconds,
    WholeSeconds,
)
from rlhfspec.job_cluster import (
    MANAGER,
    OPERATOR,
    DeletionPolicy,
    PodOptions,
    PodTemplate,
    Replicas,
    Restart,
    Rule,
    Scheduling,
    Storage,
)  # fmt: skip
from rlhfspec.job_rewards import Rewards

API_VERSION = "rlhfspec.io/v1alpha1"
if TYPE_CHECKING:  # names are of tables that a type checker does not run
    AlgorithmName = str
    SpeculationMode = str
    EngineName = str
    LinkName = str
else:
    AlgorithmName = Literal[ALGORITHMS.names]
    SpeculationMode = Literal[SPECULATION_MODES]
    EngineName = Literal[ENGINES.names]
    LinkName = Literal[LINKS_OF_A_JOB]


class Lora(Block):
    rank: Positive = Field(8, description="Rank of the update. 8 is enough for most reward-driven tuning.")
    alpha: Rate = Field(16.0, description="Scale of the update is alpha / rank.")
    dropout: Fraction = Field(0.0, description="0: on-policy log-probs stay exact.")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the layers that get an update."
    )


class Model(Block):
    path: str = Field(min_length=1, description="Policy: a Hugging Face folder or hub id of a causal LM.")
    tokenizer: str | None = Field(None, description="Folder or hub id; null: the one beside the policy.")
    drafter: Annotated[str | None, Mark.RESUMABLE] = Field(
        None, description="Smaller causal LM of the same vocabulary, for speculation."
    )
    reference: str | None = Field(None, description="What KL is measured against; null: the policy as it began.")
    critic: str | None = Field(None, description="Trunk of the critic (ppo); null: a copy of the policy as it began.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="How the trainer keeps weights.")
    lora: Lora | None = Field(None, description="Train a low-rank update instead of all weights.")


class Dataset(Block):
    path: str = Field(min_length=1, description="A .jsonl, .json, .csv or .parquet file, datasets folder, or hub id.")
    split: str = Field("train", description="Of datasets that have splits.")
    prompt_column: str | None = Field(
        "prompt", min_length=1, description="Text to continue; null when messagesColumn is set."
    )
    messages_column: str | None = Field(
        None, min_length=1, description="Chat messages, through the tokenizer's template."
    )
    max_prompt_tokens: Positive = Field(512, description="Longer prompts are left out, and counted.")
    shuffle: bool = Field(True, description="By a function of the seed and the epoch; false: in order.")
    epochs: Annotated[Positive | None, Mark.RESUMABLE] = Field(
        None, description="Passes over the data before the job ends; null: no end."
    )

    @model_validator(mode="before")
    @classmethod
    def _messages_instead(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("messagesColumn") is not None:
            return {"promptColumn": None} | given
        return given


class HeldOut(Block):
    every_steps: Positive = Field(10, description="Steps between evaluations; also before the first and at the end.")
    path: str | None = Field(
        None, min_length=1, description="Held-out data, like dataset.path; null: prompts taken out of the dataset."
    )
    num_prompts: Positive = Field(64, description="Held-out prompts: the first of path, or drawn by the seed.")
    samples_per_prompt: Positive = Field(1, description="Responses to each; always with the same noise.")

    def is_due(self, step: int, last_step: int) -> bool:
        return step % self.every_steps == 0 or step == last_step


class Algorithm(Block):
    """Fields left out take what the paper of the algorithm prescribes, else the default below."""

    name: AlgorithmName = Field("grpo", description="How rewards become advantages and advantages a loss.")
    samples_per_prompt: Positive = Field(8, description="Responses to each prompt; group algorithms need 2 or more.")
    clip_low: Fraction = Field(0.2, description="The ratio is clipped below 1 - clipLow.")
    clip_high: Rate = Field(0.2, description="The ratio is clipped above 1 + clipHigh.")
    ratio_level: Literal["token", "sequence"] = Field("token", description="sequence: GSPO's length-normalised ratio.")
    loss_aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-sum-constant"] = Field(
        "sequence-mean-token-mean", description="How token losses become one number."
    )
    normalize_by_std: bool = Field(
        True, description="Divide a group's advantages by their deviation (grpo, dr-grpo, dapo, gspo)."
    )
    whiten_advantages: bool = Field(False, description="Make a batch's token advantages mean 0, deviation 1.")
    gamma: Fraction = Field(
        1.0, description="Discount a token; 1: a reward counts in full everywhere (ppo, reinforce++)."
    )
    gae_lambda: Fraction = Field(0.95, description="GAE's bias against variance (ppo).")
    value_clip: Rate = Field(0.2, description="Values move at most this far from the old ones (ppo).")
    value_coefficient: Rate = Field(0.5, description="Weight of the mean squared error of values (ppo).")
    kl_coefficient: Rate = Field(0.0, description="Weight of the KL to the reference; 0: no reference stage runs.")
    kl_placement: Literal["loss", "reward"] = Field("loss", description="Where the KL counts.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Schulman's; k3: low variance, >= 0. k1 is for the reward: in a loss its gradient has mean 0.",
    )
    entropy_coefficient: Rate = Field(0.0, description="Weight of the entropy bonus.")
    importance_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Truncated importance correction between generator and trainer: weights above it are cut."
    )
    dynamic_sampling: bool = Field(False, description="Groups whose rewards are all equal are replaced (DAPO).")
    max_demands: Positive = Field(4, description="Rounds of replacement a step before it goes on with what it has.")
    overlong_buffer: Natural = Field(0, description="Tokens before maxTokens in which a penalty grows (DAPO).")
    overlong_penalty: Rate = Field(1.0, description="The penalty at maxTokens.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        chosen = ALGORITHMS.get(str(given.get("name", "grpo")))
        defaults = chosen.defaults if chosen is not None else {}
        return {to_camel(name): value for name, value in defaults.items()} | given

    @property
    def entry(self) -> AlgorithmEntry:
        """What is known of the algorithm by its name alone."""
        return ALGORITHMS[self.name]

    @property
    def shares_prompts(self) -> bool:
        """Has a prompt several answers, so that what was run of it is worth keeping for the next?"""
        return self.samples_per_prompt > 1


class Speculation(Block):
    mode: SpeculationMode = Field(
        "adaptive", description="adaptive chooses at every step, drafter and all; every mode gives the same tokens."
    )


class Generation(Block):
    engine: EngineName = Field("own", description="What generates; own is this project's engine.")
    max_tokens: Positive = Field(256, description="Longest response, in tokens.")
    temperature: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = Field(
        1.0, description="Of sampling, and of the log-probs that are trained. Below 0.01 nothing is left to chance."
    )
    top_k: Natural = Field(0, description="0: every token. A mask makes sampler and trainer disagree.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="1: every token.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Strings that end a response, beside the model's own end."
    )
    speculation: Annotated[Speculation, Mark.RESUMABLE] = Field(Speculation(), description="How drafts are made.")
    ignore_eos: bool = Field(False, description="Go on past the model's own end to maxTokens; for fixed lengths.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="How the engine keeps weights.")
    max_sequences: Annotated[Positive, Mark.RESUMABLE] = Field(
        64, description="Responses generated together by one generator."
    )
    kv_cache_tokens: Annotated[Positive | None, Mark.RESUMABLE] = Field(
        None, description="Memory for KV in tokens; null: for every response."
    )


class Optimizer(Block):
    name: str = Field("AdamW", description="A class of torch.optim, or module:Class.")
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1e-6, description="Small models take more: 3e-5 for a few million parameters."
    )
    arguments: dict[str, Any] = Field({}, description="Passed on: betas, weight_decay, ...")


class Schedule(Block):
    name: str = Field("constant", description="constant, linear, cosine, or a class of torch.optim.lr_scheduler.")
    warmup_steps: Natural = Field(0, description="Optimizer steps over which the rate grows from 0.")
    arguments: dict[str, Any] = Field({}, description="Passed on to a torch schedule.")


class Training(Block):
    steps: Annotated[Positive, Mark.RESUMABLE] = Field(100, description="Generate-and-train rounds.")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(0, description="Of everything random.")
    prompts_per_step: Positive = Field(16, description="Prompts a step; samples are samplesPerPrompt times that.")
    epochs: Positive = Field(1, description="Passes over a step's samples.")
    mini_batches: Positive = Field(1, description="Optimizer steps a pass; samples are split by id order.")
    tokens_per_micro_batch: Positive = Field(4096, description="Packed tokens a forward; the rest is accumulated.")
    share_prompts: bool = Field(
        True, description="Answers to one prompt that are trained together run it once. false: each has its own copy."
    )
    optimizer: Optimizer = Field(Optimizer(), description="Of the policy.")
    critic_optimizer: Optimizer = Field(Optimizer(learningRate=1e-5), description="Of the critic (ppo).")
    schedule: Schedule = Field(Schedule(), description="Of both learning rates.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="Gradients are scaled down to it.")
    autocast: Literal["off", "bfloat16"] = Field("off", description="Mixed precision of the trainer's forward.")
    fuse: Literal["auto", "off"] = Field(
        "off",
        description="auto: actor and critic (ppo) are trained at the same time, each with half of the threads, or on a "
        "rank each where ranks is 2. off: one after the other.",
    )
    exact_on_policy: bool = Field(
        False, description="The trainer's forward runs on the engine's kernels: log-probs equal bit for bit (CPU)."
    )
    max_staleness: Natural = Field(0, description="Versions a sample may lag; 0: synchronous, reproducible.")


class Work(Block):
    workers: Count = Field(1, description="How many compete for the work.")
    deadline_seconds: Seconds = Field(600.0, description="One piece of work may take so long before the run ends.")


class Workers(PodOptions, Work):
    """Of a stage."""


class Trainer(Workers):
    ranks: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Processes on one machine that share the training, by torchrun."
    )


class GeneratorWorkers(Workers):
    workers: Annotated[Count, Mark.MUTABLE] = Field(1, description="How many compete for the work.")
    replicas: Annotated[Replicas | None, Mark.MUTABLE, Mark.CLUSTER_ONLY] = Field(
        None,
        description="In a cluster, how many may run; between the two the rebalancer's advice decides, from `workers` "
        "on. null: always `workers`.",
    )
    prefetch: Natural | None = Field(
        None,
        description="Samples a worker holds beyond what its engine can run, so that a free row never waits for one. "
        "null: 4, or all of one prompt where samples move between generators, so that they share its KV.",
    )
    link: LinkName = Field("auto", description="How KV goes to another generator; auto: shm on one host, else tcp.")


class Roles(Block):
    """One entry a stage of `rlhfspec.loop`, and the two that have a pod in a cluster only."""

    prompts: Workers = Field(Workers(), description="Reads the dataset.")
    generator: GeneratorWorkers = Field(GeneratorWorkers(), description="Generates.")
    reward: Workers = Field(Workers(), description="Scores responses.")
    reference: Workers = Field(Workers(), description="Log-probs under the reference; runs when klCoefficient > 0.")
    critic: Workers = Field(Workers(), description="Values; runs with ppo.")
    trainer: Trainer = Field(Trainer(), description="Learns.")
    rebalancer: Workers = Field(Workers(), description="Says which samples go on at another generator (rebalance).")
    prepare: PodOptions = Field(PodOptions(), description="Checks the job and makes the run folder, before all others.")
    control: PodOptions = Field(PodOptions(), description="Looks on, and reports to the operator.")


class FailurePolicy(Block):
    """With `--processes` a worker that fails is started again. In one process, the first failure ends the run."""

    max_restarts: Natural = Field(
        5, description="Counted failures of one worker since the last trained step; one more ends the run."
    )
    counted: list[Literal["error", "temporary", "killed"]] = Field(
        ["error", "temporary"],
        description="error: it raised, crashed or took too long; temporary: a server was away; killed: by a signal, "
        "such as memory running out. What would only happen again always ends the run.",
    )
    backoff_seconds: Seconds = Field(0.5, description="Before the first restart; doubled for each further one.")
    max_backoff_seconds: Seconds = Field(30.0, description="The longest wait before a restart.")
    rules: Annotated[list[Rule], Mark.CLUSTER_ONLY] = Field(
        [], max_length=32, description="Exceptions by exit code, in a cluster."
    )


class Rebalance(Block):
    """Runs with more than one generator."""

    mode: Literal["auto", "off"] = Field(
        "auto", description="auto: unfinished samples go on at another generator where that pays; their tokens stay."
    )
    interval_seconds: Seconds = Field(0.25, description="Between two plans, at least.")


class Checkpoint(Block):
    every_steps: Positive = Field(10, description="A checkpoint is also written at the end and on Ctrl-C.")
    keep: Positive = Field(2, description="The newest so many stay.")
    export: bool = Field(True, description="At the end, write the policy as a Hugging Face folder.")


class Wandb(Block):
    project: str = Field(min_length=1, description="Needs the wandb package and a login.")
    entity: str | None = Field(None, description="null: the default of the login.")


class Observability(Block):
    view: Literal["auto", "live", "plain", "off"] = Field("auto", description="auto: live in a terminal, else lines.")
    tensorboard: bool = Field(False, description="Write event files into the run folder.")
    wandb: Wandb | None = Field(None, description="Also report there.")
    sample_texts: Natural = Field(4, description="Responses that the summary shows, of the beginning and the end.")
    traces: bool = Field(True, description="Write where each sample's time went into the run folder.")
    otlp_endpoint: str | None = Field(
        None, pattern=r"^https?://\S+$", description="Also send traces and metrics to this OpenTelemetry collector."
    )


class Spec(Block):
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="Where models run; auto: on a GPU if there is one."
    )
    model: Model
    dataset: Dataset
    evaluation: HeldOut | None = Field(
        None, description="Answers to held-out prompts are scored now and then; the best checkpoint is kept."
    )
    algorithm: Algorithm = Field(default_factory=Algorithm)
    generation: Generation = Generation()
    rewards: Rewards
    training: Training = Training()
    roles: Annotated[Roles, Mark.RESUMABLE] = Roles()
    failure_policy: Annotated[FailurePolicy, Mark.RESUMABLE] = FailurePolicy()
    rebalance: Annotated[Rebalance, Mark.RESUMABLE] = Rebalance()
    checkpoint: Annotated[Checkpoint, Mark.RESUMABLE] = Checkpoint()
    observability: Annotated[Observability, Mark.RESUMABLE] = Observability()
    suspend: Annotated[bool, Mark.MUTABLE, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Field(
        False, description="true: end after a checkpoint and free everything; false again: go on from there."
    )
    active_deadline_seconds: Annotated[WholeSeconds | None, Mark.MUTABLE, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Field(
        None, description="The job fails when it has run so long, suspended time left out; null: no limit."
    )
    pre_running_deadline_seconds: Annotated[WholeSeconds | None, Mark.MUTABLE, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = (
        Field(
            None,
            description="It fails when not every pod is ready after so long, such as for want of nodes; null: never.",
        )
    )
    deletion_policy: Annotated[DeletionPolicy, Mark.MUTABLE, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = DeletionPolicy()
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=MOST_SECONDS)] | None, Mark.MUTABLE, Mark.RESUMABLE, Mark.CLUSTER_ONLY
    ] = Field(
        None, description="So long after its end the job is deleted with its pods; the run folder stays. null: never."
    )
    scheduling: Annotated[Scheduling, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Scheduling()
    pod_template: Annotated[PodTemplate, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        {}, description="Merged into every pod of the job, before the podTemplate of its role: one toleration for all."
    )
    storage: Annotated[Storage, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Storage()
    restart: Annotated[Restart, Mark.MUTABLE, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Restart()
    managed_by: Annotated[str | None, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Field(
        None, max_length=63, pattern=MANAGER,
        description=f"Who runs the job in a cluster, such as kueue.x-k8s.io/multikueue; null: {OPERATOR}. The operator "
        "leaves a job of somebody else entirely alone. Never changes.",
    )  # fmt: skip

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return self.dataset.max_prompt_tokens + self.generation.max_tokens

    @property
    def moves_samples(self) -> bool:
        """Do samples go on at another generator where that pays?"""
        generator = self.roles.generator
        most = max(generator.workers, generator.replicas.max if generator.replicas else 1)
        return most > 1 and self.rebalance.mode == "auto" and ENGINES[self.generation.engine].is_movable

    @property
    def prefetch(self) -> int:
        """What is held cannot go to another generator that has room, so few is better; but what may move mends that,
        and then a whole group at one generator runs its prompt once."""
        given = self.roles.generator.prefetch
        if given is not None:
            return given
        return max(4, self.algorithm.samples_per_prompt) if self.moves_samples else 4

    @property
    def pulled_at_a_time(self) -> int:
        """Samples of one prompt, so that they share its KV; and no more, so that other generators get theirs."""
        return max(min(self.algorithm.samples_per_prompt, self.prefetch), 1)

    @property
    def samples_in_flight(self) -> int:
        """That a generator may be asked for at a time: those of every step that staleness lets begin."""
        training = self.training
        return training.prompts_per_step * self.algorithm.samples_per_prompt * (1 + training.max_staleness)


class Metadata(Block):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$", description="Small letters, digits, dashes.")
    labels: Annotated[dict[str, str], Mark.RESUMABLE] = Field({}, description="For Kubernetes; not read here.")
    annotations: Annotated[dict[str, str], Mark.RESUMABLE] = Field({}, description="For Kubernetes; not read here.")
    namespace: Annotated[str | None, Mark.RESUMABLE] = Field(None, description="For Kubernetes; not read here.")


class RLHFJob(Block):
    api_version: Literal["rlhfspec.io/v1alpha1"]
    kind: Literal["RLHFJob"]
    metadata: Metadata
    spec: Spec

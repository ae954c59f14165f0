"""Strict, torch-free schema of a job, shared by command line, custom resource and chart; camelCase in YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from rlhfspec.job.block import MOST_SECONDS, Block, Fraction, Mark, Natural, Positive, Rate, WholeSeconds
from rlhfspec.job.choices.algorithms import ALGORITHMS, AlgorithmEntry
from rlhfspec.job.choices.drafters import AUTO, NONE
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.cluster import (  # fmt: skip
    DEFAULT_MANAGER,
    MANAGER,
    DeletionPolicy,
    PodTemplate,
    Restart,
    Scheduling,
    Storage,
)
from rlhfspec.job.generation import Generation, Serving
from rlhfspec.job.rewards import Rewards
from rlhfspec.job.roles import FailurePolicy, Rebalance, Roles

API_VERSION = "rlhfspec.io/v1alpha1"
if TYPE_CHECKING:  # a type checker cannot evaluate a Literal of a table's names
    AlgorithmName = str
else:
    AlgorithmName = Literal[ALGORITHMS.names]


class Lora(Block):
    """Low-rank adaptation (LoRA) of the policy."""

    rank: Positive = Field(8, description="Rank of the update; 8 is enough for most RL training.")
    alpha: Rate = Field(16.0, description="Scaling: the update is multiplied by alpha / rank.")
    dropout: Fraction = Field(
        0.0, description="Dropout on the input of the update; with 0 on-policy log-probs stay exact."
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the modules that get a LoRA adapter; all-linear: every linear layer."
    )


class Model(Block):
    """The models of the run: a hub id, or a folder in Hugging Face format."""

    path: str = Field(min_length=1, description="Policy to train: a Hugging Face folder or hub id of a causal LM.")
    tokenizer: str | None = Field(None, description="Folder or hub id of the tokenizer; null: the policy's own.")
    drafter: Annotated[str | None, Mark.RESUMABLE] = Field(
        AUTO,
        description="Draft model for speculative decoding: a smaller causal LM with the same vocabulary, or an EAGLE-3 "
        "drafter; self: the policy with quantised weights; auto: self where it makes generation faster; mtp: the "
        "policy's own MTP layer; null: none.",
    )
    reference: str | None = Field(
        None, description="Reference model of the KL; null: the policy as it was at the start."
    )
    critic: str | None = Field(
        None, description="Model that the critic of ppo starts from; null: the policy as it was at the start."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Data type of the trainer's weights; auto: float32, so that no small update is lost."
    )
    lora: Lora | None = Field(None, description="Train a LoRA adapter; null: train all weights.")

    @field_validator("drafter", mode="before")
    @classmethod
    def _no_drafter(cls, given: Any) -> Any:
        return None if given == NONE else given


class Dataset(Block):
    """The prompts to train on."""

    path: str = Field(
        min_length=1, description="A .jsonl, .json, .csv or .parquet file, a folder saved by datasets, or a hub id."
    )
    split: str = Field("train", description="Split to use, if the dataset has several.")
    prompt_column: str | None = Field(
        "prompt", min_length=1, description="Column with the prompt as text; null when messagesColumn is set."
    )
    messages_column: str | None = Field(
        None, min_length=1, description="Column with chat messages, formatted by the tokenizer's chat template."
    )
    max_prompt_tokens: Positive = Field(
        512, description="Longest prompt, in tokens; rows with longer prompts are skipped and counted."
    )
    shuffle: bool = Field(
        True, description="Shuffle the rows in every epoch, by the seed; false: keep the order of the data."
    )
    epochs: Annotated[Positive | None, Mark.RESUMABLE] = Field(
        None, description="Passes over the data after which the run ends, even before training.steps; null: no limit."
    )

    @model_validator(mode="before")
    @classmethod
    def _messages_instead(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("messagesColumn") is not None:
            return {"promptColumn": None} | given
        return given


class HeldOut(Block):
    """Evaluation on held-out prompts."""

    every_steps: Positive = Field(
        10, description="Steps between two evaluations; also evaluates before the first step and after the last."
    )
    path: str | None = Field(
        None, min_length=1, description="Evaluation data, like dataset.path; null: hold prompts out of the dataset."
    )
    num_prompts: Positive = Field(
        64, description="Number of evaluation prompts: the first ones of path, or drawn from the dataset by the seed."
    )
    samples_per_prompt: Positive = Field(
        1, description="Responses generated for each evaluation prompt, always with the same random seeds."
    )

    def is_due(self, step: int, last_step: int) -> bool:
        return step % self.every_steps == 0 or step == last_step


class Algorithm(Block):
    """The RL algorithm. Fields that are left out take the default of the chosen algorithm."""

    name: AlgorithmName = Field("grpo", description="Algorithm that turns rewards into advantages and a loss.")
    samples_per_prompt: Positive = Field(
        8, description="Responses generated for each prompt (group size); algorithms that compare them need 2 or more."
    )
    clip_low: Fraction = Field(0.2, description="Lower clip range of the policy ratio: it is clipped at 1 - clipLow.")
    clip_high: Rate = Field(0.2, description="Upper clip range of the policy ratio: it is clipped at 1 + clipHigh.")
    ratio_level: Literal["token", "sequence"] = Field(
        "token", description="Importance ratio of each token, or of a whole sequence divided by its length (GSPO)."
    )
    loss_aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-sum-constant"] = Field(
        "sequence-mean-token-mean",
        description="How the losses of tokens are averaged or summed into the loss of the batch.",
    )
    normalize_by_std: bool = Field(
        True, description="Divide the advantages of a group by their standard deviation (grpo, dr-grpo, dapo, gspo)."
    )
    whiten_advantages: bool = Field(
        False, description="Scale the token advantages of a step to mean 0 and standard deviation 1."
    )
    gamma: Fraction = Field(
        1.0, description="Discount factor per token; with 1 a reward counts in full at every token (ppo, reinforce++)."
    )
    gae_lambda: Fraction = Field(
        0.95, description="Lambda of generalized advantage estimation: lower means more bias, less variance (ppo)."
    )
    value_clip: Rate = Field(
        0.2, description="Clip range of the values: how far they may move from the old values (ppo)."
    )
    value_coefficient: Rate = Field(0.5, description="Coefficient of the value loss (ppo).")
    kl_coefficient: Annotated[Rate, Mark.RECORDED] = Field(
        0.0, description="Coefficient of the KL to the reference model; with 0 no reference model is loaded."
    )
    kl_placement: Literal["loss", "reward"] = Field(
        "loss", description="Add the KL to the loss, or subtract it from the reward of each token."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Schulman's estimator of the KL. k3 has low variance and is never negative; use k1 in the reward "
        "only.",
    )
    entropy_coefficient: Rate = Field(0.0, description="Coefficient of the entropy bonus.")
    importance_cap: Rate | None = Field(
        None,
        description="Cap of the importance weights that correct for differences between generator and trainer; 0: off; "
        "null: 2 where they compute in different precision, else off.",
    )
    dynamic_sampling: bool = Field(
        False, description="Replace groups whose rewards are all equal, by sampling further prompts (DAPO)."
    )
    max_demands: Positive = Field(
        4, description="Rounds of dynamic sampling in a step, before it continues with the groups it has."
    )
    overlong_buffer: Natural = Field(
        0, description="Length of the interval before maxTokens in which the overlong penalty grows, in tokens (DAPO)."
    )
    overlong_penalty: Rate = Field(1.0, description="Overlong penalty of a response that reaches maxTokens (DAPO).")

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
        return ALGORITHMS[self.name]

    @property
    def shares_prompts(self) -> bool:
        return self.samples_per_prompt > 1


class Optimizer(Block):
    """An optimizer."""

    name: str = Field("AdamW", description="Optimizer: a class of torch.optim, or module:Class.")
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False), Mark.RECORDED] = Field(
        1e-6, description="Peak learning rate; small models need more: 3e-5 for a few million parameters."
    )
    arguments: dict[str, Any] = Field(
        {}, description="Further arguments of the optimizer, such as betas or weight_decay."
    )


class Schedule(Block):
    """A learning rate schedule."""

    name: str = Field(
        "constant", description="Schedule: constant, linear, cosine, or a class of torch.optim.lr_scheduler."
    )
    warmup_steps: Natural = Field(0, description="Optimizer steps over which the learning rate rises from 0.")
    arguments: dict[str, Any] = Field({}, description="Arguments of a schedule class of torch, such as step_size.")


class Training(Block):
    """Length, batches, optimizers and checks of the training."""

    steps: Annotated[Positive, Mark.RECORDED] = Field(
        100, description="Number of training steps; each generates responses and trains on them."
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(
        0, description="Random seed for data order, sampling and initialisation."
    )
    prompts_per_step: Positive = Field(
        16, description="Prompts in a step; a step has samplesPerPrompt times as many samples."
    )
    epochs: Positive = Field(1, description="Passes over the samples of a step.")
    mini_batches: Positive = Field(
        1, description="Mini-batches, and so optimizer steps, in a pass; samples are split in the order of their ids."
    )
    tokens_per_micro_batch: Positive = Field(
        4096, description="Tokens packed into one forward pass; gradients are accumulated over a mini-batch."
    )
    share_prompts: bool = Field(
        True,
        description="Compute a prompt once for all responses to it in a forward pass; false: once for each response.",
    )
    optimizer: Optimizer = Field(Optimizer(), description="Optimizer of the policy.")
    critic_optimizer: Optimizer = Field(Optimizer(learningRate=1e-5), description="Optimizer of the critic (ppo).")
    schedule: Schedule = Field(Schedule(), description="Learning rate schedule of policy and critic.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="Gradients are clipped to this norm.")
    autocast: Literal["auto", "off", "bfloat16"] = Field(
        "auto",
        description="Mixed precision in the trainer's forward pass; auto: bfloat16 on a GPU where model.dtype is auto "
        "too, off on a CPU.",
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Keep only the inputs of layers and compute the rest again in the backward pass (on); auto: if "
        "memory is short, except on a CPU.",
    )
    fuse: Literal["auto", "off"] = Field(
        "off",
        description="Train actor and critic (ppo) at the same time (auto), each on its own rank where the trainer has "
        "two; off: in turn.",
    )
    exact_on_policy: bool = Field(
        False,
        description="Run the trainer's forward pass on the engine's kernels: log-probs agree bit for bit (CPU only).",
    )
    stop_on_collapse: Annotated[bool, Mark.RESUMABLE] = Field(
        False, description="End the run, with a checkpoint, once an evaluation warns of a collapsed policy."
    )
    max_staleness: Natural = Field(
        0, description="Number of weights versions that a sample may lag behind; 0: synchronous and reproducible."
    )


class Checkpoint(Block):
    """Checkpoints of the trainer."""

    every_steps: Positive = Field(
        10, description="Steps between two checkpoints; one is also written at the end and on Ctrl-C."
    )
    keep: Positive = Field(2, description="Number of newest checkpoints to keep.")
    export: bool = Field(
        True, description="At the end, save the best evaluated policy, or else the last, in Hugging Face format."
    )


class Wandb(Block):
    """Reporting to Weights & Biases."""

    project: str = Field(min_length=1, description="Project in Weights & Biases; needs the wandb package and a login.")
    entity: str | None = Field(None, description="User or team; null: the default of the login.")


class Observability(Block):
    """Views, records and exports of a run. Nothing here changes a result."""

    view: Literal["auto", "live", "plain", "off"] = Field(
        "auto", description="Display in the terminal; auto: live if standard output is a terminal, else plain lines."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard event files into the run folder.")
    wandb: Wandb | None = Field(None, description="Report to Weights & Biases; null: off.")
    by_column: str | None = Field(
        None, min_length=1, description="Dataset column; rewards are also reported for each of its values. null: none."
    )
    sample_texts: Natural = Field(
        4, description="Number of responses shown in the summary, from the beginning and from the end of the run."
    )
    traces: bool = Field(True, description="Record a trace of every sample in the run folder, for `rlhfspec trace`.")
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="URL of an OpenTelemetry collector that traces and metrics are also sent to; null: none.",
    )


class Spec(Block):
    """Model, data, algorithm and resources of a job."""

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device of all models; auto: a GPU if there is one, but the CPU with training.exactOnPolicy.",
    )
    share_gpus: Annotated[bool, Mark.RESUMABLE] = Field(
        False,
        description="With --processes, let processes share a GPU where there are fewer GPUs than processes that run a "
        "model; false: such a run is refused.",
    )
    model: Model
    dataset: Dataset
    evaluation: HeldOut | None = Field(
        None, description="Evaluate on held-out prompts and keep the best checkpoint; null: no evaluation."
    )
    algorithm: Algorithm = Field(default_factory=Algorithm)
    generation: Generation = Generation()
    rewards: Rewards
    training: Training = Training()
    roles: Annotated[Roles, Mark.RESUMABLE] = Roles()
    failure_policy: Annotated[FailurePolicy, Mark.RESUMABLE] = FailurePolicy()
    rebalance: Annotated[Rebalance, Mark.RESUMABLE] = Rebalance()
    serving: Annotated[Serving, Mark.RESUMABLE] = Serving()
    checkpoint: Annotated[Checkpoint, Mark.RESUMABLE] = Checkpoint()
    observability: Annotated[Observability, Mark.RESUMABLE] = Observability()
    suspend: Annotated[bool, Mark.MUTABLE, Mark.CLUSTER_ONLY] = Field(
        False, description="true: write a checkpoint and delete the pods; false: run, or continue from the checkpoint."
    )
    active_deadline_seconds: Annotated[WholeSeconds | None, Mark.MUTABLE, Mark.CLUSTER_ONLY] = Field(
        None,
        description="Time limit of the job in seconds, without suspended time; it fails afterwards. null: no limit.",
    )
    pre_running_deadline_seconds: Annotated[WholeSeconds | None, Mark.MUTABLE, Mark.CLUSTER_ONLY] = Field(
        None, description="Seconds after which the job fails if not every pod is ready; null: no limit."
    )
    deletion_policy: Annotated[DeletionPolicy, Mark.MUTABLE, Mark.CLUSTER_ONLY] = DeletionPolicy()
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=MOST_SECONDS)] | None, Mark.MUTABLE, Mark.CLUSTER_ONLY
    ] = Field(
        None,
        description="Seconds after which an ended job and its pods are deleted; the run folder stays. null: never.",
    )
    scheduling: Annotated[Scheduling, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Scheduling()
    pod_template: Annotated[PodTemplate, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        {},
        description="Merged into every pod of the job, before the podTemplate of its role; for example a toleration.",
    )
    storage: Annotated[Storage, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Storage()
    restart: Annotated[Restart, Mark.MUTABLE, Mark.CLUSTER_ONLY] = Restart()
    managed_by: Annotated[str | None, Mark.RESUMABLE, Mark.CLUSTER_ONLY] = Field(
        None, max_length=63, pattern=MANAGER,
        description=f"Controller that manages the job, such as kueue.x-k8s.io/multikueue; null: {DEFAULT_MANAGER}. The "
        "operator ignores jobs of other controllers. Immutable.",
    )  # fmt: skip

    @property
    def max_context(self) -> int:
        return self.dataset.max_prompt_tokens + self.generation.max_tokens

    @property
    def moves_samples(self) -> bool:
        generator = self.roles.generator
        most = max(generator.workers, generator.replicas.max if generator.replicas else 1)
        return most > 1 and self.rebalance.mode == "auto" and self.has_movable_samples

    @property
    def has_movable_samples(self) -> bool:
        return ENGINES[self.generation.engine.name].is_movable

    def num_processes(self, stage: str) -> int:
        several = {"trainer": self.roles.trainer.ranks, "generator": self.roles.generator.tensor_parallel}
        return several.get(stage, 1)

    @property
    def prefetch(self) -> int:
        """Return the number of samples fetched beyond an engine's capacity; by default few if samples cannot move."""
        given = self.roles.generator.prefetch
        if given is not None:
            return given
        return max(4, self.algorithm.samples_per_prompt) if self.moves_samples else 4

    @property
    def pulled_at_a_time(self) -> int:
        """Return the number of samples pulled at a time, at most a prompt's group, which shares the prompt's KV."""
        return max(min(self.algorithm.samples_per_prompt, self.prefetch), 1)

    @property
    def samples_in_flight(self) -> int:
        """Return the maximum number of samples in flight: those of a step, times one plus the allowed staleness."""
        training = self.training
        return training.prompts_per_step * self.algorithm.samples_per_prompt * (1 + training.max_staleness)


class Metadata(Block):
    """Name of the job, and metadata for Kubernetes."""

    name: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$",
        description="Name of the job: lower case letters, digits and dashes. It is part of every sample's id.",
    )
    labels: Annotated[dict[str, str], Mark.RESUMABLE] = Field(
        {}, description="Labels for Kubernetes; `rlhfspec run` ignores them."
    )
    annotations: Annotated[dict[str, str], Mark.RESUMABLE] = Field(
        {}, description="Annotations for Kubernetes; `rlhfspec run` ignores them."
    )
    namespace: Annotated[str | None, Mark.RESUMABLE] = Field(
        None, description="Namespace in Kubernetes; `rlhfspec run` ignores it."
    )


class RLHFJob(Block):
    api_version: Literal["rlhfspec.io/v1alpha1"]
    kind: Literal["RLHFJob"]
    metadata: Metadata
    spec: Spec

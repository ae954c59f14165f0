"""Roles of a run: workers, failure policy and rebalancing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhfspec.job.block import Block, Count, Mark, Natural, Seconds
from rlhfspec.job.choices.links import LINKS_OF_A_JOB
from rlhfspec.job.cluster import Name, PodOptions, Replicas, Rule

if TYPE_CHECKING:  # a type checker cannot evaluate a Literal of a table's names
    LinkName = str
else:
    LinkName = Literal[LINKS_OF_A_JOB]


class Work(Block):
    """The workers of a stage, and how long their work may take."""

    workers: Count = Field(1, description="Number of workers of this role.")
    deadline_seconds: Seconds = Field(
        600.0, description="Time limit of one piece of work, in seconds; the run fails when it is exceeded."
    )


class Workers(PodOptions, Work):
    """A role that runs a stage of the loop."""


class Trainer(Workers):
    """The role that trains."""

    nodes: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Number of nodes for training: in a cluster one pod each, which needs storage.claim; with "
        "--processes all run on this machine.",
    )
    ranks_per_node: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Number of processes of a node; those of all nodes share the training with FSDP2."
    )

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Number of processes of a node that hold each layer together, for layers larger than a GPU; FSDP2 "
        "shards the parts over the rest.",
    )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class GeneratorWorkers(Workers):
    """The role that generates."""

    workers: Annotated[Count, Mark.MUTABLE] = Field(1, description="Number of workers of this role.")
    replicas: Annotated[Replicas | None, Mark.MUTABLE, Mark.CLUSTER_ONLY] = Field(
        None,
        description="Autoscaling in a cluster: bounds between which the rebalancer chooses the number of generators, "
        "starting at `workers`; null: always `workers`.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Number of processes, each with a GPU, that hold the model of a generator together: its weights "
        "and KV heads are divided.",
    )
    prefetch: Natural | None = Field(
        None,
        description="Samples fetched beyond those that the engine can run, so that it never waits; null: 4, or at "
        "least samplesPerPrompt if samples move.",
    )
    prefill_workers: Natural = Field(
        0,
        description="Number of workers, the first ones, that prefill all prompts, and then hand samples over to the "
        "others; 0: all workers do both.",
    )
    link: LinkName = Field(
        "auto", description="How the KV cache of a moved sample is transferred; auto: shm within a host, else tcp."
    )
    weights: Literal["auto", "group", "store"] = Field(
        "auto",
        description="How weights are sent between processes: group, by NCCL or gloo; store, by file or gRPC; auto: on "
        "GPUs the quicker one, else store.",
    )


class GatewayWorkers(Workers):
    """The role that answers OpenAI clients; the run never waits for it."""

    workers: Annotated[int, Field(ge=0, le=1), Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        0, description="1: serve the policy in a cluster while it trains; elsewhere --serve does."
    )
    deadline_seconds: Seconds = Field(
        600.0, description="Time limit of its start, in seconds; it restarts when that is exceeded."
    )
    token_secret: Annotated[Name | None, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        None, description="Secret whose key `token` clients must send; null: the operator creates one."
    )


class Roles(Block):
    """The roles of a run. prepare, control and gateway have pods in a cluster only."""

    prompts: Workers = Field(Workers(), description="Reads the dataset and publishes the prompts of each step.")
    generator: GeneratorWorkers = Field(GeneratorWorkers(), description="Generates the responses.")
    reward: Workers = Field(Workers(), description="Scores responses with the rewards.")
    reference: Workers = Field(
        Workers(), description="Computes log-probs under the reference model; runs if algorithm.klCoefficient > 0."
    )
    critic: Workers = Field(Workers(), description="Computes values; runs with ppo.")
    trainer: Trainer = Field(Trainer(), description="Trains the policy and publishes its weights.")
    rebalancer: Workers = Field(
        Workers(),
        description="Decides which samples move to another generator; runs with several, unless rebalance.mode is off.",
    )
    gateway: GatewayWorkers = Field(GatewayWorkers(), description="Answers OpenAI clients.")
    prepare: PodOptions = Field(
        PodOptions(), description="Checks the job and creates the run folder before the other pods start."
    )
    control: PodOptions = Field(PodOptions(), description="Watches the run and reports its status to the operator.")


class FailurePolicy(Block):
    """Restarts of workers that fail. In a run of one process the first failure ends the run."""

    max_restarts: Natural = Field(
        5, description="Counted failures that a worker may have since the last trained step; one more fails the run."
    )
    counted: list[Literal["error", "temporary", "killed"]] = Field(
        ["error", "temporary"],
        description="Failures that count. error: exception, crash or timeout; temporary: a server was unreachable; "
        "killed: by a signal. Permanent errors always fail the run.",
    )
    backoff_seconds: Seconds = Field(
        0.5, description="Delay before the first restart, in seconds; doubled for each further restart."
    )
    max_backoff_seconds: Seconds = Field(30.0, description="Longest delay before a restart, in seconds.")
    rules: Annotated[list[Rule], Mark.CLUSTER_ONLY] = Field(
        [], max_length=32, description="Rules by exit code, in a cluster; the first that matches decides."
    )


class Rebalance(Block):
    """Moving unfinished samples between generators; it needs more than one generator."""

    mode: Literal["auto", "off"] = Field(
        "auto",
        description="auto: move unfinished samples to another generator when that saves time; tokens stay the same.",
    )
    interval_seconds: Seconds = Field(
        0.25, description="Shortest time between two plans of the rebalancer, in seconds."
    )

"""Job fields that take effect in a cluster only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfspec.job.block import Block, Count, Mark

# Every role that has a pod, equal to `cluster.names.ROLES`.
Role = Literal[
    "prepare", "control", "prompts", "generator", "reward", "reference", "critic", "trainer", "rebalancer", "gateway"
]  # fmt: skip
Name = Annotated[str, Field(min_length=1, max_length=253)]
DEFAULT_MANAGER = "rlhfspec.io/operator"  # as in managedBy
MANAGER = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9][A-Za-z0-9._/-]*$"
OBJECT_STORE = r"^(s3|gs|az|abfss)://[^/]+(/.*)?$"
PodTemplate = dict[Literal["metadata", "spec"], dict[str, Any]]
ExitCode = Annotated[int, Field(ge=1, le=255)]


class PodOptions(Block):
    """Options of the pods of a role."""

    resources: Annotated[
        dict[Literal["requests", "limits"], dict[str, int | str]], Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY
    ] = Field(
        {},
        description="Requests and limits of the container, such as limits: {nvidia.com/gpu: 1}, fractions as text "
        '("500m"). Those left out come from the chart (`jobs.resources`) or the namespace.',
    )
    image: Annotated[str | None, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        None,
        min_length=1,
        max_length=512,
        description="Image of the role's container; null: the operator's image for the role.",
    )
    pod_template: Annotated[PodTemplate, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        {},
        description="Merged into the role's pods like a strategic merge patch: labels and annotations of metadata, a "
        "pod spec. The container is called worker.",
    )


class Replicas(Block):
    """Bounds of the number of generators, which is chosen while the job runs."""

    min: Count = Field(1, description="Minimum number of generators.")
    max: Count = Field(description="Maximum number of generators.")


class DeletionPolicy(Block):
    """Fate of finished pods. Their logs go with them; the run folder always stays."""

    succeeded: Literal["keep", "delete"] = Field(
        "keep", description="What happens to the pods of a job that succeeded."
    )
    failed: Literal["keep", "delete"] = Field(
        "keep", description="What happens to the pods of a job that failed; keep them to see why."
    )


class Scheduling(Block):
    """Scheduling of the job's pods."""

    gang: Literal["none", "kueue", "volcano", "coscheduling"] = Field(
        "none",
        description="Gang scheduler that starts all pods of the job at once or none; none: each starts when it fits.",
    )
    queue: Name | None = Field(None, description="Queue of kueue or volcano; null: the scheduler's default.")
    topology_key: Name | None = Field(
        None, description="Node label that generators are spread over, such as topology.kubernetes.io/zone; null: none."
    )
    priority_class: Name | None = Field(
        None, description="PriorityClass of all pods of the job; null: the chart's class for each role, if it has any."
    )


class Storage(Block):
    """Place of data, models and the run folder: a claim, or an object store."""

    claim: Name | None = Field(
        None,
        description="PersistentVolumeClaim for data, models and the run folder, where relative paths start; "
        "ReadWriteMany for pods on several nodes. null: the operator's default claim.",
    )
    uri: str | None = Field(
        None, min_length=1, max_length=1024, pattern=OBJECT_STORE,
        description="Object store for data, models and the run folder, instead of a claim, such as s3://bucket/team. "
        "Pods work on copies; checkpoints are uploaded.",
    )  # fmt: skip
    secret: Name | None = Field(
        None,
        description="Secret in the job's namespace with the credentials for uri as environment variables, such as "
        "AWS_ACCESS_KEY_ID; null: the identity of the pods.",
    )
    run_folder: str | None = Field(
        None, min_length=1, max_length=1024,
        description="Run folder in the claim or below uri; null: runs/NAME-UID, so that a recreated job starts anew.",
    )  # fmt: skip


class Restart(Block):
    """Restart of pods by hand: set another id."""

    id: str = Field("", max_length=63, description="Any text; changing it restarts the pods.")
    roles: list[Role] = Field(
        [], max_length=16, description="Roles to restart; if empty, the whole job restarts from its checkpoint."
    )


class Rule(Block):
    """A rule for workers that exit. Failures that match no rule are counted."""

    roles: list[Role] = Field(
        [], max_length=16, description="Roles that the rule applies to, never gateway; if empty, all."
    )
    exit_codes: list[ExitCode] = Field(
        min_length=1,
        max_length=64,
        description="Exit codes that match. 75 means that a server was unreachable, 78 a permanent error.",
    )
    action: Literal["FailJob", "Ignore", "Restart"] = Field(
        description="FailJob: fail the job; Ignore: restart the worker without counting; Restart: restart it and count."
    )

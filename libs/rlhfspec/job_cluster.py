"""What a job says of a cluster, and only of a cluster: on one machine these fields are left aside, and `rlhfspec run`
says which (`job_file.remarks`). All are optional.

Example:
    >>> Replicas.model_validate({"min": 1, "max": 4}).max
    4
    >>> PodOptions.model_validate({"resources": {"limits": {"nvidia.com/gpu": 1}}}).resources["limits"]
    {'nvidia.com/gpu': 1}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfspec.job_block import Block, Count, Mark

# Every role that has a pod: `cluster.names.ROLES`, as what a field may say.
Role = Literal[
    "prepare", "control", "prompts", "generator", "reward", "reference", "critic", "trainer", "rebalancer"
]  # fmt: skip
Name = Annotated[str, Field(min_length=1, max_length=253)]
OPERATOR = "rlhfspec.io/operator"  # as managedBy names it
MANAGER = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9][A-Za-z0-9._/-]*$"
OBJECT_STORE = r"^(s3|gs|az|abfss)://[^/]+(/.*)?$"
PodTemplate = dict[Literal["metadata", "spec"], dict[str, Any]]
ExitCode = Annotated[int, Field(ge=1, le=255)]


class PodOptions(Block):
    """Of each of a role's pods."""

    resources: Annotated[
        dict[Literal["requests", "limits"], dict[str, int | str]], Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY
    ] = Field(
        {},
        description="Kubernetes' requests and limits of the role's container, such as limits: {nvidia.com/gpu: 1}; "
        "left out: the namespace's own defaults.",
    )
    image: Annotated[str | None, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        None, min_length=1, max_length=512, description="Of the role's container; null: the operator's for the role."
    )
    pod_template: Annotated[PodTemplate, Mark.MUTABLE_WHILE_SUSPENDED, Mark.CLUSTER_ONLY] = Field(
        {},
        description="Merged into each pod of the role, as kubectl patch does: containers, volumes and variables by "
        "name (the role's container is called worker). metadata: labels and annotations; spec: a pod's.",
    )


class Replicas(Block):
    """How many generators run is then decided while the job does."""

    min: Count = Field(1, description="The fewest generators that are left running.")
    max: Count = Field(description="The most that are started, however far behind generation is.")


class DeletionPolicy(Block):
    """What becomes of finished pods. Their logs end with them; the run folder always stays."""

    succeeded: Literal["keep", "delete"] = Field("keep", description="Of a job that succeeded.")
    failed: Literal["keep", "delete"] = Field("keep", description="Of one that failed: keep them to see why.")


class Scheduling(Block):
    gang: Literal["none", "kueue", "volcano", "coscheduling"] = Field(
        "none", description="Who starts all pods of the job or none; none: each starts as soon as it fits."
    )
    queue: Name | None = Field(None, description="Queue of kueue or volcano; null: the provider's default.")
    topology_key: Name | None = Field(
        None, description="Label of nodes, such as topology.kubernetes.io/zone: generators are spread over its values."
    )
    priority_class: Name | None = Field(None, description="Of the job's pods; null: the cluster's default.")


class Storage(Block):
    claim: Name | None = Field(
        None,
        description="PersistentVolumeClaim of the job's namespace for data, models and the run folder; relative paths "
        "begin there. ReadWriteMany when pods land on several nodes; null: the operator's default claim.",
    )
    uri: str | None = Field(
        None, min_length=1, max_length=1024, pattern=OBJECT_STORE,
        description="In place of a claim: where in an object store data and models are, and the run folder is kept, "
        "such as s3://bucket/team. Pods work on copies of their own; the trainer's goes there with each checkpoint.",
    )  # fmt: skip
    secret: Name | None = Field(
        None,
        description="Of uri: Secret of the job's namespace with its credentials as variables, such as "
        "AWS_ACCESS_KEY_ID; null: the pods' own identity.",
    )
    run_folder: str | None = Field(
        None, min_length=1, max_length=1024,
        description="Folder within the claim or below uri; null: runs/NAME-UID, so that a job made again begins anew.",
    )  # fmt: skip


class Restart(Block):
    """To start pods again by hand: set another id."""

    id: str = Field("", max_length=63, description="Any text; pods started under another one are started again.")
    roles: list[Role] = Field([], max_length=16, description="Only these; none: the whole job, from its checkpoint.")


class Rule(Block):
    """For a worker that ended. The first rule that fits decides; without one the counting below does."""

    roles: list[Role] = Field([], max_length=16, description="Of which roles; none: of all.")
    exit_codes: list[ExitCode] = Field(
        min_length=1, max_length=64, description="That it fits. 75: a server is away; 78: would only happen again."
    )
    action: Literal["FailJob", "Ignore", "Restart"] = Field(
        description="FailJob: end the job; Ignore: start the worker again, uncounted; Restart: again, and counted."
    )

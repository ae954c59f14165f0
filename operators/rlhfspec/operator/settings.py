"""Settings that the chart writes as one JSON file.

Example:
    >>> images = {"slim": "rlhfspec:slim", "cpu": "rlhfspec:cpu", "cuda": "rlhfspec:cuda"}
    >>> told = {"release": "rl", "namespace": "rlhf", "images": images, "nats_url": "n", "report_url": "r", "claim": ""}
    >>> OperatorFile.model_validate(told).namespaces, OperatorFile.model_validate(told).claim
    (('rlhf',), None)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.job.cluster import Role
from rlhfspec.operator.allowed_fields import Allowed

# (namespace, job's name, job's uid, run's uid, role, job's creation time) -> data of the role's Secret
Credentials = Callable[[str, str, str, str, str, datetime], Mapping[str, bytes]]
# (run's uid, worker, uid of the worker's last pod) -> proof that the operator made the worker's next pod
Proof = Callable[[str, str, str], str]


class SettingsPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageNames(SettingsPart):
    slim: str
    cpu: str
    cuda: str


class GatewayIngress(SettingsPart):
    """Ingress of each job's gateway, at a host of its own below `host`."""

    host: str
    class_name: str = ""
    annotations: dict[str, str] = {}
    tls_secret: str = ""

    def host_of(self, job: str, job_uid: str) -> str:
        """Return the host of a job's gateway, which no other job can claim.

        >>> GatewayIngress(host="chat.example.com").host_of("sums", "6f1c42ab-01")
        'sums-6f1c42ab.chat.example.com'
        """
        return f"{job}-{job_uid[:8]}.{self.host}"


class OperatorFile(SettingsPart):
    release: str = Field(description="Prefix of all object names of the release, such as its Lease.")
    namespace: str = Field(description="Namespace of the release.")
    scope: Literal["cluster", "namespaced"] = "namespaced"
    namespace_label: str = Field("rlhfspec.io/jobs=enabled", description="Label of job namespaces, in scope cluster.")
    namespace_kit: tuple[dict[str, Any], ...] = Field((), description="Objects to create in each such namespace.")
    job_namespaces: tuple[str, ...] = Field((), description="Namespaces with jobs; empty: the release's own.")
    images: ImageNames
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    claim: str | None = Field(None, description="PersistentVolumeClaim of a job that names none.")
    nats_url: str
    redis_url: str | None = None
    report_url: str
    otlp_endpoint: str | None = None
    resources: dict[str, dict[str, Any]] = Field({}, description="Requests and limits by role; jobs may override them.")
    shared_memory: str = Field("1Gi", description="Size of /dev/shm in every pod.")
    gpu_resources: tuple[str, ...] = ("nvidia.com/gpu",)
    pod_template: dict[Literal["metadata", "spec"], dict[str, Any]] = Field({}, description="Template of all job pods.")
    priority_classes: dict[Role, str] = Field({}, description="Defaults by role.")
    chooses_user: bool = Field(True, description="If false, the cluster chooses user and groups of pods.")
    coscheduler: str = "scheduler-plugins-scheduler"
    kueue: bool = Field(False, description="Jobs may wait in queues of Kueue; its Workloads are watched.")
    gateway_ingress: GatewayIngress | None = Field(None, description="Expose gateways outside the cluster.")
    network_policies: bool = Field(False, description="Create policies of each job, beside the chart's.")
    allowed: Allowed = Field(Allowed(), description="Pod fields that jobs may set.")
    max_workers: int = Field(1000, ge=1, le=5000, description="Maximum pods per job; a larger job is refused.")

    @model_validator(mode="before")
    @classmethod
    def _empty_is_none(cls, given: Any) -> Any:
        """Treat empty strings as unset, because chart templates write them."""
        return (
            {key: value for key, value in given.items() if value not in ("", None)}
            if isinstance(given, dict)
            else given
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the settings file, or raise InvalidRequest."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise InvalidRequest("--settings", str(path), f"cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first, *_ = error.errors(include_url=False, include_input=False)
            where = ".".join(map(str, first["loc"]))
            hint = did_you_mean(where, cls.model_fields) if first["type"] == "extra_forbidden" else ""
            raise InvalidRequest("--settings", str(path), f"{where}: {first['msg']}{hint}") from None

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Return the watched namespaces, or () if a label selects them."""
        return () if self.scope == "cluster" else self.job_namespaces or (self.namespace,)


class ChartSettings(OperatorFile):
    """Settings for reconciles. `credentials` returns the data of a role's Secret."""

    credentials: Credentials
    proof: Proof

    @classmethod
    def of(cls, told: OperatorFile, credentials: Credentials, proof: Proof) -> Self:
        return cls(**dict(told), credentials=credentials, proof=proof)

"""Fields of pods that jobs may set, unless the chart's `jobs.allowed` lists others."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rlhfspec.cluster import names
from rlhfspec.job.cluster import Role

CONTAINERS_PATH, VOLUMES_PATH = "spec.containers", "spec.volumes"
FIELDS = (
    "metadata.labels",
    *(f"spec.{name}" for name in (
        "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "resourceClaims", "schedulerName",
        "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints",
    )),
    *(f"{VOLUMES_PATH}.{name}" for name in (
        "name", "configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected.defaultMode",
        "projected.sources.configMap", "projected.sources.downwardAPI", "projected.sources.secret", "secret",
    )),
    *(f"{CONTAINERS_PATH}.{name}" for name in (
        "name", "resources", "env.name=HF_TOKEN", "env.name=NCCL_*", "env.name=OMP_NUM_THREADS", "env.value",
        "env.valueFrom.configMapKeyRef", "env.valueFrom.fieldRef", "env.valueFrom.resourceFieldRef",
        "env.valueFrom.secretKeyRef", "securityContext.allowPrivilegeEscalation=false",
        "securityContext.capabilities.drop=ALL", "securityContext.runAsNonRoot=true",
    )),
)  # fmt: skip
CODE_FIELDS = tuple(
    f"{CONTAINERS_PATH}.{name}" for name in (
        "args", "command", "env", "envFrom", "image", "imagePullPolicy", "ports.containerPort", "ports.name",
        "ports.protocol", "restartPolicy", "volumeMounts", "workingDir",
    )
)  # fmt: skip


class Allowed(BaseModel):
    """Fields that a job may set in its pods: `PATH` with everything below it, or `PATH=VALUE` with wildcards `*`.

    Paths have no list indices, and `spec.containers` covers init containers too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fields: tuple[str, ...] = Field(FIELDS, description="Fields of the pods of every role.")
    code_fields: tuple[str, ...] = Field(CODE_FIELDS, description="Further fields of roles that run the user's code.")
    code_roles: tuple[Role, ...] = Field(("reward",), description="Roles that run the user's code.")
    label: str = Field(
        f"{names.GROUP}/jobs-may-use",
        description="Label, with the value true, of Secrets, ConfigMaps and claims that jobs may name.",
    )

    def of_role(self, role: str) -> tuple[str, ...]:
        return self.fields + (self.code_fields if role in self.code_roles else ())

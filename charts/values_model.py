"""The chart's values: what may be set, its default, and what it is for. values.yaml, values.schema.json and the table
of docs/chart.md are made from it (`make chart`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kubernetes.client import V1PodSpec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model
from pydantic.alias_generators import to_camel

from rlhfspec.cluster.names import ROLES, TORCH_ROLES
from rlhfspec.operator import allowed_fields as operator

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
Name = Annotated[str, StringConstraints(pattern=f"^{LABEL}$")]
NameOrNone = Annotated[str, StringConstraints(pattern=rf"^({LABEL}(\.{LABEL})*)?$", max_length=253)]
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
Quantity = Annotated[str, StringConstraints(pattern=QUANTITY)] | Annotated[int, Field(ge=0)]
Cidr = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F:.]+/[0-9]{1,3}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


Auto = Literal["auto", "always", "never"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


def part(default: type[Part], what: str) -> Any:
    return Field(default_factory=default, description=what)


class Resources(Part):
    requests: dict[str, Quantity] = Field({}, description="what a pod is guaranteed")
    limits: dict[str, Quantity] = Field({}, description="most that a pod may use")


def resources(cpu: str, memory: str, limit: str, what: str) -> Any:
    made = Resources(requests={"cpu": cpu, "memory": memory}, limits={"memory": limit})
    return Field(default_factory=lambda: made.model_copy(deep=True), description=what)


class Pod(Part):
    """What clusters ask of pods, said by the component that has them."""

    node_selector: dict[str, str] = Field({}, description="labels of nodes where it may run")
    tolerations: list[dict[str, Any]] = Field([], description="tolerations of the pods")
    affinity: dict[str, Any] = Field({}, description="replaces the chart's own")
    priority_class_name: NameOrNone = ""
    pod_labels: dict[str, str] = Field({}, description="added to the chart's own")
    pod_annotations: dict[str, str] = Field({}, description="added to the chart's own")
    pod_security_context: dict[str, Any] = Field({}, description="merged over the chart's own, see openshift")
    security_context: dict[str, Any] = Field(
        {}, description="security context of its container, merged over the chart's own"
    )
    env: list[dict[str, Any]] = Field([], description="environment variables of its container, after the chart's own")


class Account(Part):
    annotations: dict[str, str] = Field({}, description="annotations of the ServiceAccount, such as an IAM role")


class Image(Part):
    repository: str = Field(min_length=1)
    tag: str = ""
    digest: Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""


def image(repository: str, tag: str, what: str) -> Any:
    return Field(default_factory=lambda: Image(repository=repository, tag=tag), description=what)


Registry = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*)?$")]


class Images(Part):
    """A tag that is empty is the chart's appVersion; a digest wins over the tag."""

    registry: Registry = Field(
        "",
        description="where you pushed slim, cpu and cuda, which are not published; used for each repository that names "
        "no registry itself",
    )
    server_registry: Registry = Field("docker.io", description="registry of nats and redis, such as a mirror")
    slim: Image = image("rlhfspec/slim", "", "without torch: operator, dashboard, and roles that compute nothing")
    cpu: Image = image("rlhfspec/cpu", "", "with torch, for pods that ask for no GPU")
    cuda: Image = image("rlhfspec/cuda", "", "with torch and CUDA, for pods that ask for a GPU")
    nats: Image = image("library/nats", "2.12.2-alpine", "bundled NATS; its entrypoint is the server")
    redis: Image = image("valkey/valkey", "9.0-alpine", "bundled Redis; its entrypoint is the server, built with TLS")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="pull policy of all images"
    )
    pull_secrets: list[Name] = Field(
        [], description="pull Secrets; they must exist in every namespace with pods of the release or of jobs"
    )


class Operator(Pod):
    replicas: int = Field(2, ge=1, le=5, description="one leads, the others stand by")
    scope: Literal["namespace", "cluster"] = Field(
        "namespace",
        description="namespace: jobs run in `jobNamespaces`; cluster: in every namespace with `namespaceLabel`",
    )
    job_namespaces: list[Name] = Field(
        [], description="existing namespaces for jobs; empty: RELEASE-NAMESPACE-jobs, which is created"
    )
    namespace_label: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9./_-]+=[A-Za-z0-9._-]*$")] = Field(
        "rlhfspec.io/jobs=enabled",
        description="with scope cluster: label of namespaces for jobs; the operator creates there what jobs need",
    )
    gang: list[Literal["kueue", "volcano", "coscheduling"]] = Field(
        [], description="values jobs may set as `scheduling.gang`; the operator may create their Workloads or PodGroups"
    )
    resources: Resources = resources("100m", "192Mi", "512Mi", "resources of each replica")
    service_account: Account = part(Account, "")


def _of_role(role: str) -> Any:
    cpu, memory = ("200m", "1Gi") if role in TORCH_ROLES else ("50m", "256Mi")
    made = Resources(requests={"cpu": cpu, "memory": memory})
    return Field(default_factory=lambda: made.model_copy(deep=True))


RoleResources = create_model(  # type: ignore[call-overload]
    "RoleResources", __base__=Part, **{role: (Resources, _of_role(role)) for role in ROLES}
)


ByRole = create_model(  # type: ignore[call-overload]
    "ByRole", __base__=Part, **dict.fromkeys(ROLES, (NameOrNone, ""))
)


def _schema_of(kind: str) -> dict[str, Any]:
    """
    >>> _schema_of("List[V1Toleration]"), _schema_of("str")
    ({'type': ['array', 'null'], 'items': {'type': 'object'}}, {'type': ['string', 'null']})
    """
    if kind.startswith("List["):
        return {"type": ["array", "null"], "items": {"type": "object"}}
    return {"type": [{"str": "string", "int": "integer", "bool": "boolean"}.get(kind, "object"), "null"]}


_OF_POD_SPECS = {V1PodSpec.attribute_map[name]: _schema_of(kind) for name, kind in V1PodSpec.openapi_types.items()}


class PodTemplate(Part):
    metadata: dict[Literal["labels", "annotations"], dict[str, str]] = {}
    spec: dict[str, Any] = Field(
        {},
        description="tolerations, nodeSelector, containers: [{name: worker, ...}], ...",
        json_schema_extra={"properties": _OF_POD_SPECS},
    )


class Allowed(Part):
    """Defaults of the operator: whatever is not listed is refused."""

    fields: list[Annotated[str, Field(min_length=1)]] = Field(
        list(operator.Allowed().fields),
        description="fields of the pods of every role: `PATH`, with all below it, or `PATH=VALUE`, where * is any text",
    )
    code_fields: list[Annotated[str, Field(min_length=1)]] = Field(
        list(operator.Allowed().code_fields), description="further fields, for the roles that run the user's code"
    )
    code_roles: list[Literal[ROLES]] = Field(  # type: ignore[valid-type]
        list(operator.Allowed().code_roles), description="roles that run the user's code"
    )
    label: str = Field(
        operator.Allowed().label,
        min_length=1,
        description="label, with the value `true`, of Secrets, ConfigMaps and claims that jobs may name",
    )


class Ingress(Part):
    """Always with TLS: the cookie of a visitor is sent over HTTPS alone."""

    enabled: bool = Field(
        False, description="HTTPS from outside; TLS ends at your ingress controller; set ingressFrom too"
    )
    class_name: NameOrNone = Field("", description="empty: the cluster's default")
    host: NameOrNone = Field("", description="such as rlhf.example.com")
    annotations: dict[str, str] = Field({}, description="for your controller or cert-manager")
    tls_secret: NameOrNone = Field("", description="Secret with its certificate; empty: the controller's own")


class GatewayIngress(Ingress):
    enabled: bool = Field(
        False,
        description="HTTPS from outside; TLS ends at your ingress controller; set ingressFrom too; takes effect when a "
        "gateway restarts; delete old Ingresses by hand",
    )
    host: NameOrNone = Field("", description="such as chat.example.com, for NAME-UID.chat.example.com of each job")
    annotations: dict[str, str] = Field({}, description="for your controller")
    tls_secret: NameOrNone = Field(
        "", description="Secret with a certificate of *.HOST in each job namespace; empty: the controller's own"
    )


class Gateway(Part):
    ingress: GatewayIngress = part(GatewayIngress, "")
    ingress_from: list[dict[str, Any]] = Field(
        [], description="NetworkPolicy peers that may reach them; `kubectl port-forward` always may"
    )


class Jobs(Part):
    allowed: Allowed = part(Allowed, "what a job may set in its pods, see docs/rights.md")
    resources: RoleResources = part(RoleResources, "by role: requests and limits for what the job does not set")  # type: ignore[valid-type]
    shared_memory: Quantity = Field("1Gi", description="size of /dev/shm in every pod")
    pod_template: PodTemplate = part(
        PodTemplate, "merged into every pod of every job, before the job's own podTemplate"
    )
    service_account: Account = part(Account, "")
    priority_classes: ByRole = part(  # type: ignore[valid-type]
        ByRole, "PriorityClass by role, for jobs without scheduling.priorityClass; see priorityClasses"
    )
    gpu_resources: list[Annotated[str, Field(min_length=1)]] = Field(
        ["nvidia.com/gpu", "nvidia.com/mig-*"],
        description="names of GPU resources, * for the rest of a name; pods with such a limit run the image cuda",
    )
    otlp_endpoint: Annotated[str, StringConstraints(pattern=r"^(https?://[^\s]+)?$")] = Field(
        "", description="URL of an OpenTelemetry collector, for jobs that name none; see networkPolicy.egress.all"
    )
    coscheduler: str = Field("scheduler-plugins-scheduler", min_length=1, description="schedulerName of coscheduling")
    gateway: Gateway = part(Gateway, "where clients reach the gateways of jobs")
    max_workers: int = Field(
        1000, ge=1, le=5000, description="most pods of a job, all roles together; a job that asks for more is refused"
    )


class ExternalNats(Part):
    url: Annotated[str, StringConstraints(pattern=r"^(tls://[^\s/@]+)?$")] = Field(
        "", description="URL of your own NATS, if `nats.enabled` is false: `tls://host:4222`"
    )
    existing_secret: NameOrNone = Field(
        "",
        description="Secret in the release's namespace with `account.seed` (of an account with JetStream) and `ca.pem`",
    )
    cidrs: list[Cidr] = Field(["0.0.0.0/0"], description="its addresses, for the NetworkPolicies")


class Persistence(Part):
    enabled: bool = Field(True, description="keep streams if a node is lost; false: an emptyDir")
    size: Quantity = Field("10Gi")
    storage_class: NameOrNone = Field("", description="empty: the cluster's default")


class Nats(Pod):
    enabled: bool = Field(True, description="bundle a NATS server")
    persistence: Persistence = part(Persistence, "volume of its streams")
    resources: Resources = resources("200m", "256Mi", "2Gi", "resources of its pod")
    external: ExternalNats = part(ExternalNats, "your own server instead")


class ExternalRedis(Part):
    url: Annotated[str, StringConstraints(pattern=r"^(rediss://[^\s/@]+)?$")] = Field(
        "", description="URL of your own Redis, if `redis.enabled` is false: `rediss://host:6379`"
    )
    existing_secret: NameOrNone = Field(
        "", description="Secret in the release's namespace with `ca.pem`, and the operator's `username` and `password`"
    )
    cidrs: list[Cidr] = Field(["0.0.0.0/0"], description="its addresses, for the NetworkPolicies")


class Redis(Pod):
    enabled: bool = Field(True, description="bundle a Redis; it holds only data that may be lost")
    resources: Resources = resources("50m", "64Mi", "256Mi", "resources of its pod")
    external: ExternalRedis = part(ExternalRedis, "your own server instead")


class CreateClaim(Part):
    enabled: bool = Field(True, description="create a claim in every job namespace unless `storage.claim` names one")
    size: Quantity = Field("100Gi")
    storage_class: NameOrNone = Field("", description="empty: the cluster's default")
    access_modes: list[Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]] = Field(
        ["ReadWriteMany"], min_length=1, max_length=1, description="ReadWriteOnce: all pods of a job run on one node"
    )


class Storage(Part):
    claim: NameOrNone = Field("", description="existing claim in the job namespaces, for jobs that name none")
    create: CreateClaim = part(CreateClaim, "the claim to create")


class Dashboard(Pod):
    enabled: bool = Field(True, description="the web dashboard, read-only")
    storage: Auto = Field(
        "auto", description="show past steps from the run folders; auto: if all nodes can mount the created claim"
    )
    resources: Resources = resources("50m", "128Mi", "512Mi", "resources of its pod")
    service_account: Account = part(Account, "")
    ingress: Ingress = part(Ingress, "")
    ingress_from: list[dict[str, Any]] = Field(
        [], description="NetworkPolicy peers that may reach it; `kubectl port-forward` always may"
    )


class Outside(Part):
    cidr: Cidr = Field(description="destination")
    except_: list[Cidr] = Field([], alias="except", description="excluded parts of it")
    ports: list[Port] = Field(min_length=1, description="TCP ports")


PRIVATE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"]
HUB = [Outside(cidr="0.0.0.0/0", **{"except": PRIVATE}, ports=[443])]


def _egress(role: str) -> Any:
    what = {
        "prepare": "to the hub that models and data come from",
        "reward": "to HTTP rewards",
        "trainer": "to trackers",
        "all": "of every pod of a job, such as to an OpenTelemetry collector",
    }.get(role, "")
    places = HUB if role == "prepare" else []
    return Field(default_factory=lambda: [each.model_copy() for each in places], description=what)


Egress = create_model(  # type: ignore[call-overload]
    "Egress", __base__=Part, **{role: (list[Outside], _egress(role)) for role in ("all", *ROLES)}
)


class NetworkPolicy(Part):
    enabled: bool = Field(True, description="deny connections that docs/chart.md's table of edges does not list")
    dns: list[dict[str, Any]] = Field(
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        min_length=1,
        description="NetworkPolicy peers that answer DNS",
    )
    api_server: list[Outside] = Field(
        [Outside(cidr="0.0.0.0/0", ports=[443, 6443])], min_length=1, description="addresses of the API server"
    )
    prometheus: list[dict[str, Any]] = Field(
        [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}],
        description="NetworkPolicy peers that scrape metrics",
    )
    egress: Egress = part(Egress, "destinations outside the release that pods of a role may reach")  # type: ignore[valid-type]


class Monitoring(Part):
    pod_monitor: Auto = Field("auto", description="PodMonitors for operator and jobs; auto: where their API exists")
    prometheus_rule: Auto = Field("auto", description="alerts; auto: where their API exists")
    labels: dict[str, str] = Field({}, description="labels by which your Prometheus finds both")
    interval: Annotated[str, StringConstraints(pattern=r"^[0-9]+(ms|s|m)$")] = Field(
        "15s", description="scrape interval"
    )


class GrafanaDashboards(Part):
    enabled: bool = Field(False, description="create dashboards as ConfigMaps, for Grafana's sidecar")
    label: str = Field(
        "grafana_dashboard", min_length=1, description="label by which the sidecar finds them (value `1`)"
    )


class PriorityClasses(Part):
    enabled: bool = Field(
        False, description="create RELEASE-trainer and RELEASE-generator, and use them for these roles"
    )
    trainer: int = Field(1000, ge=-1000000000, le=1000000000)
    generator: int = Field(500, ge=-1000000000, le=1000000000)


class Budgets(Part):
    enabled: bool = Field(True, description="for operator, NATS, Redis, dashboard: at most one pod unavailable")


class TopologySpread(Part):
    enabled: bool = Field(True, description="spread the operator's replicas")
    topology_key: str = Field("kubernetes.io/hostname", min_length=1, description="node label to spread over")


class Values(Part):
    name_override: NameOrNone = Field("", max_length=40, description="replaces `rlhfspec` in names and labels")
    fullname_override: NameOrNone = Field("", max_length=40, description="replaces RELEASE in all names")
    openshift: Auto = Field(
        "auto", description="let the cluster choose user and groups of all pods, also of jobs; auto: where SCCs exist"
    )
    images: Images = part(Images, "")
    operator: Operator = part(Operator, "")
    jobs: Jobs = part(Jobs, "")
    nats: Nats = part(Nats, "")
    redis: Redis = part(Redis, "")
    storage: Storage = part(Storage, "")
    dashboard: Dashboard = part(Dashboard, "")
    network_policy: NetworkPolicy = part(NetworkPolicy, "")
    monitoring: Monitoring = part(Monitoring, "")
    grafana_dashboards: GrafanaDashboards = part(GrafanaDashboards, "")
    priority_classes: PriorityClasses = part(PriorityClasses, "")
    pod_disruption_budgets: Budgets = part(Budgets, "")
    topology_spread: TopologySpread = part(TopologySpread, "")
    global_: dict[str, Any] = Field({}, alias="global", description="values of a parent chart; not read")

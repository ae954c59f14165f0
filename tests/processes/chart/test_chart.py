"""The chart agrees with the code, renders safely and refuses wrong values."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import CHART, HELM, MONITORING, REGISTRY, ROOT, named, needs_helm, of_kind, pods, rendered, settings, template

from rlhfspec.cluster import names
from rlhfspec.messages.loop import STAGES
from rlhfspec.operator.allowed_fields import Allowed
from rlhfspec.operator.settings import OperatorFile
from rlhfspec.operator.shared.release import AUTHORITIES, NATS_ACCOUNT, REDIS_LOGIN

sys.path.insert(0, str(ROOT / "charts"))
generate = importlib.import_module("generate")
EVERYTHING = {
    "grafanaDashboards": {"enabled": True}, "priorityClasses": {"enabled": True},
    "monitoring": {"podMonitor": "always", "prometheusRule": "always"},
}  # fmt: skip
EXTERNAL = {
    "nats": {"enabled": False, "external": {"url": "tls://nats.example:4333", "existingSecret": "my-nats"}},
    "redis": {"enabled": False, "external": {"url": "rediss://redis.example", "existingSecret": "my-redis"}},
}
CLUSTER = {"operator": {"scope": "cluster"}}


def test_generated_chart_files_are_up_to_date() -> None:
    made = generate.files()
    assert len(made) >= 9
    assert not [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text() != text], "make chart"


NO_PODS = {"cli", "supervisor", "tiny"}  # folders of services that no pod runs


def test_stages_agree_in_the_chart_the_images_and_the_network_map() -> None:
    stages, roles = {stage.name for stage in STAGES}, set(names.ROLES)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert roles == set(values["jobs"]["resources"]) == set(values["networkPolicy"]["egress"]) - {"all"}
    skaffold = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
    started = {test["image"]: set(test["custom"][0]["command"].rpartition('"')[2].split()) for test in skaffold["test"]}
    assert set().union(*started.values()) == roles | {"operator", "dashboard"} > stages
    assert started["rlhfspec/cpu"] == set(names.TORCH_ROLES)
    folders = {path.name for path in (ROOT / "services" / "rlhfspec").iterdir() if (path / "__init__.py").exists()}
    assert folders - NO_PODS == set().union(*started.values()) - {"operator"}


def test_skaffold_builds_what_the_dockerfile_has_and_the_chart_runs() -> None:
    skaffold = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
    added = [patch["value"] for patch in skaffold["profiles"][0]["patches"] if patch["path"].startswith("/build")]
    targets = {each["image"]: each["docker"]["target"] for each in [*skaffold["build"]["artifacts"], *added]}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert targets == {values["images"][name]["repository"]: name for name in ("slim", "cpu", "cuda")}
    assert set(targets.values()) <= set(re.findall(r"^FROM \S+ AS (\S+)", _dockerfile(), re.MULTILINE))


def _dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def test_the_dockerfile_copies_what_exists_and_ends_as_a_user_that_is_not_root() -> None:
    copied = [w for line in re.findall(r"^COPY (?!--from)(.+)$", _dockerfile(), re.MULTILINE) if (w := line.split())]
    sources = {source for *froms, _ in copied for source in froms}
    assert all((ROOT / source).exists() for source in sources)
    assert {"libs", "kernels", "services", "operators", "pyproject.toml", "constraints.txt"} <= sources
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == kept, ".dockerignore lets through what is copied"
    users = _users_of_stages()
    assert {users[target] for target in ("slim", "cpu", "cuda")} == {"65532:65532"}


def _users_of_stages() -> dict[str, str]:
    users: dict[str, str] = {}
    for stage in re.split(r"^(?=FROM )", _dockerfile(), flags=re.MULTILINE)[1:]:
        words = stage.split()
        own = re.findall(r"^USER (\S+)", stage, re.MULTILINE)
        users[words[3]] = own[-1] if own else users.get(words[1], "root")
    return users


def test_extras_that_the_images_install_exist() -> None:
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    asked = {name for group in re.findall(r"'\.\[([a-z,]+)\]'", _dockerfile()) for name in group.split(",")}
    assert asked
    assert asked <= extras


@needs_helm
@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, EXTERNAL, CLUSTER], ids=["plain", "everything", "external", "cluster"]
)
def test_every_pod_keeps_to_the_restricted_standard(values: dict[str, Any]) -> None:
    found = pods(rendered(values))
    assert {name.partition("/")[0] for name, _ in found} >= {"Deployment", "Job", "Pod"}
    for name, pod in found:
        assert pod["spec"]["securityContext"]["runAsNonRoot"], name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["spec"]["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert not context["allowPrivilegeEscalation"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name


@needs_helm
def test_only_pods_that_call_the_api_server_get_a_token() -> None:
    has = {name: pod["spec"].get("automountServiceAccountToken") for name, pod in pods(rendered())}
    asks = {f"Deployment/rlhfspec-{name}" for name in ("operator", "dashboard")} | {"Job/rlhfspec-install"}
    assert {name for name, token in has.items() if token} == asks
    assert None not in has.values(), "said of every pod"
    assert all(account["automountServiceAccountToken"] is False for account in of_kind(rendered(), "ServiceAccount"))


@needs_helm
@pytest.mark.parametrize("values", [{}, CLUSTER], ids=["namespace", "cluster"])
def test_nobody_may_touch_secrets_of_the_cluster_and_only_the_install_hook_reads_any(values: dict[str, Any]) -> None:
    objects = rendered(values)
    everywhere = {binding["roleRef"]["name"] for binding in of_kind(objects, "ClusterRoleBinding")}
    for role in of_kind(objects, "ClusterRole"):
        if any("secrets" in rule["resources"] for rule in role["rules"]):
            assert role["metadata"]["name"] not in everywhere
    named_rules = [(role["metadata"]["name"], rule) for role in of_kind(objects, "Role") for rule in role["rules"]]
    reading = [(name, rule) for name, rule in named_rules if {"get", "list", "watch"} & set(rule["verbs"])]
    assert {name for name, rule in reading if "secrets" in rule["resources"]} == {"rlhfspec-install"}
    rules = [rule for role in of_kind(objects, "Role", "ClusterRole") for rule in role["rules"]]
    assert not any("*" in [*rule["resources"], *rule["verbs"]] for rule in rules)


@needs_helm
def test_a_namespaced_operator_has_rights_in_the_job_namespaces_alone() -> None:
    objects = rendered({"operator": {"jobNamespaces": ["team-b", "team-a", "team-a"]}})
    granted = [role for role in of_kind(objects, "Role") if role["metadata"]["name"] == "rlhfspec-jobs"]
    assert [role["metadata"]["namespace"] for role in granted] == ["team-a", "team-b"]
    bound = {binding["roleRef"]["name"] for binding in of_kind(objects, "ClusterRoleBinding")}
    assert bound == {"ml-rlhfspec-operator", "ml-rlhfspec-dashboard"}
    reviews = [rule for name in bound for rule in named(objects, "ClusterRole", name)["rules"]]
    assert {resource for rule in reviews for resource in rule["resources"]} == {"tokenreviews", "subjectaccessreviews"}
    assert {verb for rule in reviews for verb in rule["verbs"]} == {"create"}


@needs_helm
def test_with_a_label_the_operator_makes_what_the_chart_makes_for_named_namespaces() -> None:
    """The operator gets no right on pods or Secrets but through the binding that it makes."""
    kinds = ("ServiceAccount", "PersistentVolumeClaim", "NetworkPolicy")
    team = rendered({"operator": {"jobNamespaces": ["team"]}})
    wanted = {(each["kind"], each["metadata"]["name"]): each.get("spec") for each in of_kind(team, *kinds)
              if each["metadata"].get("namespace") == "team"}  # fmt: skip
    objects = rendered(CLUSTER)
    kit = settings(objects)["namespace_kit"]
    made = {(each["kind"], each["metadata"]["name"]): each.get("spec") for each in of_kind(kit, *kinds)}
    assert made.keys() == wanted.keys()
    assert made == wanted
    assert not [each for each in kit if "namespace" in each["metadata"]]
    [binding] = of_kind(kit, "RoleBinding")
    granted = named(objects, "ClusterRole", binding["roleRef"]["name"])["rules"]
    assert granted == named(team, "Role", "rlhfspec-jobs")["rules"]
    everywhere = named(objects, "ClusterRole", "ml-rlhfspec-operator")["rules"]
    assert not {"pods", "secrets", "configmaps", names.PLURAL} & {x for rule in everywhere for x in rule["resources"]}
    [bind] = [rule for rule in everywhere if "bind" in rule["verbs"]]
    assert bind["resourceNames"] == [binding["roleRef"]["name"]]
    assert all(rule.get("resourceNames") for rule in everywhere if "patch" in rule["verbs"])


@needs_helm
@pytest.mark.parametrize("values", [{}, EXTERNAL, CLUSTER], ids=["plain", "external", "cluster"])
def test_the_operator_reads_the_settings_it_is_given(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(settings(rendered(values))))
    told = OperatorFile.read(tmp_path / "settings.json")
    assert told.release == "rlhfspec"
    assert told.claim == "rlhfspec-storage"
    assert told.report_url == f"https://rlhfspec-operator.ml.svc:{names.REPORT_PORT}"
    assert told.scope == ("cluster" if values is CLUSTER else "namespaced")
    assert told.nats_url == ("tls://nats.example:4333" if values is EXTERNAL else "tls://rlhfspec-nats.ml.svc:4222")


@needs_helm
def test_the_operator_service_selects_the_leading_replica() -> None:
    service = named(rendered(), "Service", "rlhfspec-operator")
    assert service["spec"]["selector"][names.LEADER] == "true"
    labels = named(rendered(), "Deployment", "rlhfspec-operator")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() - {(names.LEADER, "true")} <= labels.items()
    assert names.LEADER not in labels, "each replica says it itself"


@needs_helm
def test_jobs_have_a_namespace_of_their_own_by_default() -> None:
    """In the release's own they could name the keys that sign their credentials."""
    objects = rendered({"operator": {"jobNamespaces": []}})
    space = named(objects, "Namespace", "ml-jobs")["metadata"]
    assert space["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert space["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert settings(objects)["job_namespaces"] == ["ml-jobs"]
    for kind, name in (("Role", "rlhfspec-jobs"), ("ServiceAccount", names.SERVICE_ACCOUNT)):
        assert named(objects, kind, name)["metadata"]["namespace"] == "ml-jobs"
    assert not of_kind(rendered({"operator": {"jobNamespaces": ["team"]}}), "Namespace")
    assert not of_kind(rendered(CLUSTER), "Namespace")


@needs_helm
def test_objects_that_jobs_need_stay_when_the_release_is_removed() -> None:
    policy = ("helm.sh/resource-policy", "keep")
    kept = {each["kind"] for each in rendered() if policy in each["metadata"].get("annotations", {}).items()}
    assert kept == {"CustomResourceDefinition", "PersistentVolumeClaim", "ServiceAccount"}
    [crd] = of_kind(rendered(), "CustomResourceDefinition")
    assert crd["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"


@needs_helm
def test_names_begin_with_the_release_and_say_rlhfspec_once() -> None:
    assert named(rendered(release="my-rlhfspec"), "StatefulSet", "my-rlhfspec-nats")
    assert named(rendered({"nameOverride": "rl"}, release="try"), "StatefulSet", "try-rl-nats")
    for name, values in (("try-rlhfspec", {}), ("mine", {"fullnameOverride": "mine"})):
        objects = rendered(values, release="try")
        assert named(objects, "StatefulSet", f"{name}-nats")
        arguments = named(objects, "Job", f"{name}-install")["spec"]["template"]["spec"]["containers"][0]["args"]
        assert arguments == ["--namespace", "ml", "--release", name]


@needs_helm
def test_alerts_and_monitors_are_made_where_their_api_exists() -> None:
    both, never = ("PodMonitor", "PrometheusRule"), {"monitoring": {"podMonitor": "never", "prometheusRule": "never"}}
    made = of_kind(rendered({}, "--api-versions", MONITORING), *both)
    assert {each["kind"] for each in made} == set(both)
    [endpoint] = named(made, "PodMonitor", "rlhfspec-operator")["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True, "a job's namespace, which it counts by, is not replaced by its own"
    assert not of_kind(rendered(), *both)
    assert not of_kind(rendered(never, "--api-versions", MONITORING), *both)


@needs_helm
def test_external_servers_leave_out_the_bundled_ones() -> None:
    objects = rendered(EXTERNAL)
    assert of_kind(objects, "StatefulSet") == []
    operator = named(objects, "Deployment", "rlhfspec-operator")["spec"]["template"]["spec"]
    [keys] = [volume for volume in operator["volumes"] if volume["name"] == "keys"]
    sources = [source["secret"]["name"] for source in keys["projected"]["sources"]]
    assert sources == ["rlhfspec-keys", "my-nats", "my-redis"]
    files = {item["path"] for source in keys["projected"]["sources"] for item in source["secret"].get("items", ())}
    assert files == {NATS_ACCOUNT, *AUTHORITIES, *REDIS_LOGIN}, "as the operator looks for them"


@needs_helm
@pytest.mark.parametrize("example", sorted((CHART / "examples").iterdir()), ids=lambda path: path.stem)
def test_values_of_the_shipped_examples_pass_helm_lint(example: Path) -> None:
    subprocess.run([HELM, "lint", "--strict", str(CHART), "--values", str(example)], check=True, capture_output=True)
    objects = rendered(yaml.safe_load(example.read_text()))
    told = OperatorFile.model_validate(settings(objects))
    assert told.resources["generator"]["limits"][told.gpu_resources[0]] == 1
    taint = {"key": told.gpu_resources[0], "operator": "Exists", "effect": "NoSchedule"}
    assert told.pod_template["spec"]["tolerations"] == [taint]
    assert all(pod["spec"]["nodeSelector"] == {"pool": "system"} for _, pod in pods(objects))


def images(values: dict[str, Any]) -> set[str]:
    return {container["image"] for _, pod in pods(rendered(values)) for container in pod["spec"]["containers"]}


@needs_helm
def test_images_have_one_registry_and_a_digest_wins_over_a_tag() -> None:
    assert images({}) == {
        f"{REGISTRY}/rlhfspec/slim:0.1.0", "docker.io/library/nats:2.12.2-alpine", "docker.io/valkey/valkey:9.0-alpine",
    }  # fmt: skip
    digest = f"sha256:{'0a' * 32}"
    said = {"serverRegistry": "mirror.example:5000", "slim": {"tag": "mine", "digest": digest}}
    said |= {"redis": {"repository": "localhost/redis", "tag": "7"}}
    nats = "mirror.example:5000/library/nats:2.12.2-alpine"
    found = {f"{REGISTRY}/rlhfspec/slim@{digest}", nats, "localhost/redis:7"}
    assert images({"images": said}) == found
    told = settings(rendered({"images": said}))["images"]
    assert told["slim"] == f"{REGISTRY}/rlhfspec/slim@{digest}"
    assert told["cuda"] == f"{REGISTRY}/rlhfspec/cuda:0.1.0"


@needs_helm
def test_without_images_nothing_is_installed_and_one_line_says_what_to_do() -> None:
    code, said = template({}, registry="")
    assert code != 0
    assert "images.registry: no images are published" in said
    place = said.partition("three commands of ")[2].split(",")[0]
    page, _, heading = place.partition("#")
    assert f"\n## {heading.capitalize()}\n" in (ROOT / page).read_text()
    for there in ({"pullPolicy": "Never"}, {"slim": {"tag": "built"}}, {"slim": {"repository": "r.example/slim"}}):
        assert template({"images": there}, registry="")[0] == 0, there


POD: dict[str, Any] = {
    "nodeSelector": {"pool": "system"}, "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}}, "priorityClassName": "high", "podLabels": {"team": "a"},
    "podAnnotations": {"sidecar.example/inject": "false"}, "podSecurityContext": {"supplementalGroups": [7]},
    "securityContext": {"seLinuxOptions": {"level": "s0"}}, "env": [{"name": "HTTPS_PROXY", "value": "http://p"}],
}  # fmt: skip
PODS = dict.fromkeys(("operator", "nats", "redis", "dashboard"), POD)


@needs_helm
def test_every_pod_gets_the_placement_and_labels_of_its_component() -> None:
    before, after = dict(pods(rendered())), dict(pods(rendered(PODS)))
    assert len(after) == 6
    for name, pod in after.items():
        spec, plain = pod["spec"], before[name]
        for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert spec[key] == POD[key], (name, key)
        assert plain["metadata"]["labels"] | POD["podLabels"] == pod["metadata"]["labels"], name
        assert (
            plain["metadata"].get("annotations", {}).items() - {("checksum/settings", "")}
            | POD["podAnnotations"].items()
            == pod["metadata"]["annotations"].items()
        ), name
        assert spec["securityContext"] == plain["spec"]["securityContext"] | POD["podSecurityContext"], name
        [container], [usual] = spec["containers"], plain["spec"]["containers"]
        assert container["securityContext"] == usual["securityContext"] | POD["securityContext"], name
        assert container["env"] == [*usual.get("env", []), *POD["env"]], name
    changed = {name for name, pod in dict(pods(rendered({"redis": POD}))).items() if pod != before[name]}
    assert changed == {"StatefulSet/rlhfspec-redis"}


@needs_helm
def test_pod_labels_of_a_user_cannot_hide_a_pod_from_its_service() -> None:
    objects = rendered({"operator": {"podLabels": {names.COMPONENT: "mine"}}})
    deployment = named(objects, "Deployment", "rlhfspec-operator")["spec"]
    assert deployment["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()


@needs_helm
@pytest.mark.parametrize("values", [{"openshift": "always"}, {"openshift": "auto"}, {"openshift": "never"}], ids=str)
def test_openshift_chooses_users_itself(values: dict[str, Any]) -> None:
    objects = rendered(values, "--api-versions", "security.openshift.io/v1")
    chosen = values["openshift"] != "never"
    for name, pod in pods(objects):
        fixed = {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"} & pod["spec"]["securityContext"].keys()
        assert not fixed if chosen else len(fixed) == 4, name
    assert settings(objects)["chooses_user"] is not chosen


@needs_helm
def test_service_accounts_carry_the_annotations_of_a_cloud_role() -> None:
    role = {"serviceAccount": {"annotations": {"cloud.example/role": "writer"}}}
    accounts = of_kind(rendered({"operator": role, "dashboard": role, "jobs": role}), "ServiceAccount")
    marked = {each["metadata"]["name"] for each in accounts if "cloud.example/role" in each["metadata"]["annotations"]}
    assert marked == {"rlhfspec-operator", "rlhfspec-dashboard", names.SERVICE_ACCOUNT}
    [job] = [each for each in accounts if each["metadata"]["name"] == names.SERVICE_ACCOUNT]
    assert job["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@needs_helm
def test_the_operator_gets_pod_templates_gpus_and_priorities_for_jobs() -> None:
    jobs = {
        "podTemplate": {"spec": {"tolerations": [{"key": "gpu"}]}}, "gpuResources": ["amd.com/gpu"],
        "priorityClasses": {"generator": "mine"},
    }  # fmt: skip
    told = OperatorFile.model_validate(settings(rendered({"jobs": jobs, "priorityClasses": {"enabled": True}})))
    assert told.pod_template == {"metadata": {}} | jobs["podTemplate"]
    assert told.gpu_resources == ("amd.com/gpu",)
    assert told.allowed == Allowed()
    assert told.priority_classes == {"trainer": "rlhfspec-trainer", "generator": "mine"}


@needs_helm
def test_the_dashboard_has_an_ingress_with_tls_that_the_network_lets_through() -> None:
    ingress = {"enabled": True, "host": "rl.example", "className": "nginx", "tlsSecret": "cert"}
    ingress |= {"annotations": {"a": "b"}}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
    objects = rendered({"dashboard": {"ingress": ingress, "ingressFrom": [peer]}})
    made = named(objects, "Ingress", "rlhfspec-dashboard")
    assert made["metadata"]["annotations"] == {"a": "b"}
    assert made["spec"]["ingressClassName"] == "nginx"
    assert made["spec"]["tls"] == [{"hosts": ["rl.example"], "secretName": "cert"}]
    [rule] = made["spec"]["rules"]
    [path] = rule["http"]["paths"]
    service = named(objects, "Service", path["backend"]["service"]["name"])
    assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]
    assert named(objects, "NetworkPolicy", "rlhfspec-dashboard")["spec"]["ingress"][0]["from"] == [peer]
    assert not of_kind(rendered(), "Ingress")


@needs_helm
def test_gateways_have_an_ingress_and_the_right_to_make_it_where_the_values_say_so() -> None:
    ingress = {"enabled": True, "host": "chat.example", "className": "nginx", "tlsSecret": "cert"}
    peer = {"podSelector": {"matchLabels": {"app": "agents"}}}
    objects = rendered({"jobs": {"gateway": {"ingress": ingress, "ingressFrom": [peer]}}})
    told = OperatorFile.model_validate(settings(objects)).gateway_ingress
    assert told is not None
    assert told.model_dump() == {"host": "chat.example", "class_name": "nginx", "annotations": {}, "tls_secret": "cert"}
    opened = named(objects, "NetworkPolicy", "rlhfspec-gateway")["spec"]["ingress"]
    assert {"from": [peer], "ports": [{"protocol": "TCP", "port": names.SERVE_PORT}]} in opened
    plain = rendered()
    assert OperatorFile.model_validate(settings(plain)).gateway_ingress is None
    ports = [rule["ports"] for rule in named(plain, "NetworkPolicy", "rlhfspec-gateway")["spec"]["ingress"]]
    assert ports == [[{"protocol": "TCP", "port": names.HTTP_PORT}]], (
        "nobody reaches a gateway unless the values say so"
    )
    assert [any("ingresses" in rule["resources"] for rule in _rules_on_jobs(each)) for each in (objects, plain)] == [
        True, False
    ]  # fmt: skip


def _rules_on_jobs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return named(objects, "Role", "rlhfspec-jobs")["rules"]  # type: ignore[no-any-return]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"operatr": {}}, "operatr"),
    ({"operator": {"replica": 1}}, "replica"),
    ({"operator": {"replicas": "two"}}, "/operator/replicas"),
    ({"operator": {"replicas": 0}}, "/operator/replicas"),
    ({"operator": {"replicas": 2.5}}, "/operator/replicas"),
    ({"operator": {"scope": "everywhere"}}, "/operator/scope"),
    ({"operator": {"scope": "cluster", "jobNamespaces": ["team"]}}, "operator.jobNamespaces"),
    ({"operator": {"namespaceLabel": "jobs"}}, "/operator/namespaceLabel"),
    ({"operator": {"jobNamespaces": "team"}}, "/operator/jobNamespaces"),
    ({"operator": {"jobNamespaces": ["Team"]}}, "/operator/jobNamespaces/0"),
    ({"operator": {"resources": {"cpu": "1"}}}, "cpu"),
    ({"operator": {"resources": {"requests": {"cpu": "a lot"}}}}, "/operator/resources/requests/cpu"),
    ({"operator": {"gang": ["slurm"]}}, "/operator/gang/0"),
    ({"images": {"slim": {"repository": ""}}}, "/images/slim/repository"),
    ({"images": {"slim": {"tag": 1.0}}}, "/images/slim/tag"),
    ({"images": {"slim": {"digest": "sha256:00"}}}, "/images/slim/digest"),
    ({"images": {"serverRegistry": "https://mirror"}}, "/images/serverRegistry"),
    ({"operator": {"tolerations": {"key": "gpu"}}}, "/operator/tolerations"),
    ({"nats": {"nodeSelector": ["gpu"]}}, "/nats/nodeSelector"),
    ({"dashboard": {"ingress": {"enabled": True}}}, "dashboard.ingress.host"),
    ({"dashboard": {"ingress": {"enabled": True, "host": "a.example"}}}, "dashboard.ingressFrom"),
    ({"jobs": {"gateway": {"ingress": {"enabled": True}}}}, "jobs.gateway.ingress.host"),
    ({"jobs": {"gateway": {"ingress": {"enabled": True, "host": "a.example"}}}}, "jobs.gateway.ingressFrom"),
    ({"jobs": {"podTemplate": {"spce": {}}}}, "/jobs/podTemplate"),
    ({"jobs": {"podTemplate": {"spec": {"tolerations": "abc"}}}}, "/jobs/podTemplate/spec/tolerations"),
    ({"jobs": {"podTemplate": {"spec": {"tolerations": ["abc"]}}}}, "/jobs/podTemplate/spec/tolerations/0"),
    ({"jobs": {"podTemplate": {"spec": {"nodeSelector": "gpu"}}}}, "/jobs/podTemplate/spec/nodeSelector"),
    ({"jobs": {"podTemplate": {"spec": {"affinity": []}}}}, "/jobs/podTemplate/spec/affinity"),
    ({"jobs": {"priorityClasses": {"trainers": "high"}}}, "/jobs/priorityClasses"),
    ({"jobs": {"gpuResource": "nvidia.com/gpu"}}, "gpuResource"),
    ({"openshift": True}, "/openshift"),
    ({"fullnameOverride": "Mine"}, "/fullnameOverride"),
    ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
    ({"images": {"pullSecrets": [{"name": "x"}]}}, "/images/pullSecrets/0"),
    ({"nats": {"enabled": "yes"}}, "/nats/enabled"),
    ({"nats": {"persistence": {"size": "10 GB"}}}, "/nats/persistence/size"),
    ({"nats": {"external": {"url": "nats://plain:4222"}}}, "/nats/external/url"),
    ({"nats": {"external": {"url": "tls://user:password@host"}}}, "/nats/external/url"),
    ({"nats": {"enabled": False}}, "nats.external.url"),
    ({"nats": {"enabled": False, "external": {"url": "tls://n:4222"}}}, "nats.external.existingSecret"),
    ({"redis": {"external": {"url": "redis://plain"}}}, "/redis/external/url"),
    ({"redis": {"enabled": False}}, "redis.external.url"),
    ({"redis": {"persistence": {}}}, "persistence"),
    ({"storage": {"claim": "My Claim"}}, "/storage/claim"),
    ({"storage": {"create": {"accessModes": ["ReadOnlyMany"]}}}, "/storage/create/accessModes/0"),
    ({"storage": {"create": {"accessModes": []}}}, "/storage/create/accessModes"),
    ({"jobs": {"resources": {"generators": {}}}}, "generators"),
    ({"jobs": {"resources": {"trainer": {"limits": {"memory": "-1"}}}}}, "/jobs/resources/trainer/limits/memory"),
    ({"networkPolicy": {"dns": []}}, "/networkPolicy/dns"),
    ({"networkPolicy": {"egress": {"reward": [{"cidr": "10.0.0.1", "ports": [80]}]}}}, "/egress/reward/0/cidr"),
    ({"networkPolicy": {"egress": {"rewards": []}}}, "rewards"),
    ({"networkPolicy": {"apiServer": [{"cidr": "0.0.0.0/0", "ports": [70000]}]}}, "/networkPolicy/apiServer/0/ports/0"),
    ({"monitoring": {"podMonitor": True}}, "/monitoring/podMonitor"),
    ({"monitoring": {"interval": "often"}}, "/monitoring/interval"),
    ({"grafanaDashboards": {"label": ""}}, "/grafanaDashboards/label"),
    ({"priorityClasses": {"trainer": 2000000000}}, "/priorityClasses/trainer"),
    ({"dashboard": None}, "dashboard"),
]  # fmt: skip


@needs_helm
@pytest.mark.parametrize(("values", "key"), WRONG, ids=lambda it: it if isinstance(it, str) else "")
def test_a_wrong_value_is_refused_and_its_key_is_named(values: dict[str, Any], key: str) -> None:
    code, said = template(values)
    assert code != 0, "it was taken"
    assert key in said


@needs_helm
def test_values_accept_the_globals_of_an_umbrella_chart() -> None:
    assert template({"global": {"anything": 1}})[0] == 0


@needs_helm
@pytest.mark.parametrize("gang", [[], ["kueue"], ["volcano"]])
def test_kueue_is_watched_where_jobs_may_name_it(gang: list[str]) -> None:
    things = rendered({"operator": {"gang": gang}})
    rules = [rule for thing in of_kind(things, "Role", "ClusterRole") for rule in thing["rules"]]
    asked = {resource for rule in rules if "kueue.x-k8s.io" in rule["apiGroups"] for resource in rule["resources"]}
    assert asked == ({"workloads", "workloads/status", "resourceflavors"} if "kueue" in gang else set())
    assert OperatorFile.model_validate(settings(things)).kueue is ("kueue" in gang)

"""Gateways of jobs: how clients reach them, and that no run waits for them or fails with them."""

import base64
from typing import Any

import pytest
from operator_world import SETTINGS, World, job_body, running

from rlhfspec.operator.settings import GatewayIngress

Json = dict[str, Any]
SERVED: Json = {"gateway": {"workers": 1}}
POD, SERVICE, CLIENTS, KEYS = "sums-gateway-0", "gateway-sums-6f1c-42", "sums-clients-6f1c-42", "sums-gateway-6f1c-42"
URL = f"http://{SERVICE}.rl.svc:8000/v1"


def serving(world: World) -> tuple[str, str, str]:
    condition = next(each for each in world.status["conditions"] if each["type"] == "Serving")
    return condition["status"], condition["reason"], condition["message"]


def gateway_of(world: World) -> Json:
    return world.pods[POD]["spec"]["containers"][0]  # type: ignore[no-any-return]


def test_clients_find_address_and_token_of_a_gateway_in_the_status() -> None:
    world = running(roles=SERVED)
    assert world.status["serving"] == {"url": URL, "tokenSecret": CLIENTS}
    assert serving(world) == ("True", "Serving", f"{URL}, with the token in Secret {CLIENTS}")
    service = world.objects["Service", SERVICE]["spec"]
    assert service["selector"].items() <= world.pods[POD]["metadata"]["labels"].items()
    [port] = service["ports"]
    assert port["port"] in [each["containerPort"] for each in gateway_of(world)["ports"]]
    data = world.objects["Secret", CLIENTS]["data"]
    assert {name: base64.b64decode(value) for name, value in data.items()} == {"token": b"t0ken"}, "and no key"
    assert '"serve_port": 8000' in world.objects["ConfigMap", "sums-connections-6f1c-42"]["data"]["connections.json"]


def test_a_gateway_is_ready_while_a_generator_answers_and_lives_without_one() -> None:
    gateway = gateway_of(running(roles=SERVED))
    assert gateway["image"] == SETTINGS.images.slim
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "serve", "scheme": "HTTP"}
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http", "scheme": "HTTP"}


def test_a_job_without_a_gateway_has_nothing_of_it() -> None:
    world = running()
    assert not [name for _, name in world.objects if "gateway" in name or "clients" in name]
    assert "serving" not in world.status
    assert "Serving" not in {each["type"] for each in world.status["conditions"]}
    assert "serve_port" not in world.objects["ConfigMap", "sums-connections-6f1c-42"]["data"]["connections.json"]


def test_a_token_of_the_user_takes_the_place_of_ours() -> None:
    roles = {"gateway": {"workers": 1, "tokenSecret": "mine"}}
    refused = World(job_body(roles=roles))
    refused.settle()
    assert refused.status["message"].startswith("spec.roles.gateway.tokenSecret: Secret mine does not exist, or has no")
    unused = running(roles={"gateway": {"tokenSecret": "mine"}})
    assert "serving" not in unused.status
    world = World(job_body(roles=roles), labelled={"mine"})
    world.to_running()
    assert ("Secret", CLIENTS) not in world.objects
    assert world.status["serving"]["tokenSecret"] == "mine"
    token = {"secretKeyRef": {"name": "mine", "key": "token"}}
    assert {"name": "RLHFSPEC_SERVE_TOKEN", "valueFrom": token} in gateway_of(world)["env"]


def test_no_run_waits_for_its_gateway() -> None:
    world = World(job_body(roles=SERVED))
    world.to_starting()
    for name in world.pods:
        if name != POD:
            world.run_pod(name)
    world.settle()
    assert (world.phase, serving(world)[:2]) == ("Running", ("False", "GatewayNotReady"))
    world.run_all().settle()
    assert [event.message for event in world.events if event.reason == "Serving"] == [serving(world)[2]]


def test_a_gateway_without_generators_does_not_serve() -> None:
    world = running(roles=SERVED)
    world.end_pod("sums-generator-0", 1)
    world.run_pod(POD, ready=False)
    world.settle()
    assert serving(world) == ("False", "NoGeneratorReady", "no generator is ready")
    assert "NotServing" in {event.reason for event in world.events}


@pytest.mark.parametrize("code", [1, 78, 137, 0])
def test_a_gateway_that_keeps_failing_never_fails_a_job(code: int) -> None:
    rules = [{"exitCodes": [1], "action": "FailJob"}]
    world = running(roles=SERVED, failurePolicy={"maxRestarts": 1, "rules": rules})
    for _ in range(25):
        world.end_pod(POD, code).settle()
        assert world.phase == "Running"
        world.pass_time(31.0).wind_down()
        world.run_all().settle()
    assert world.made == [POD] * 25
    assert world.status["restarts"]["counted"] == 0, "of those that may end the run"


def test_the_gateway_goes_when_the_job_has_ended() -> None:
    world = running(roles=SERVED)
    world.end_pod("sums-trainer-0", 0, "completed: step 10").wind_down()
    assert world.phase == "Succeeded"
    assert POD not in world.pods
    assert serving(world)[:2] == ("False", "Succeeded")


def test_a_refused_gateway_stops_no_other_pod() -> None:
    world = World(job_body(roles=SERVED), refuse={"gateway": "exceeded quota"})
    world.to_running()
    assert POD not in world.pods
    assert world.healthy()[1] == "QuotaExceeded"


def test_a_refused_secret_of_a_gateway_stops_no_other_pod() -> None:
    world = World(job_body(roles=SERVED), refuse={KEYS: "exceeded quota: secrets"})
    world.to_running()
    assert POD not in world.pods
    assert world.healthy()[1:] == ("QuotaExceeded", f"{KEYS}: exceeded quota: secrets")
    world.end_pod("sums-generator-0", 1).settle()
    world.pass_time(31.0).settle()  # both are due, and the Secret is refused anew
    assert world.pods["sums-generator-0"]["status"]["phase"] == "Pending"
    world.refuse.clear()
    world.pass_time(6.0).settle()
    assert POD in world.pods
    world.run_all().settle()
    assert world.healthy()[0] == "True"


def test_troubles_of_others_are_named_before_those_of_a_gateway() -> None:
    world = World(job_body(roles=SERVED))
    world.to_starting()
    full = world.condition("PodScheduled", False, "Unschedulable", "0/3 nodes are available: 3 Insufficient cpu.")
    world.pods[POD]["status"]["conditions"] = [full]
    for name in world.pods:
        if name != POD:
            world.run_pod(name)
    world.settle()
    assert world.healthy()[1] == "Unschedulable", "when there is no other"
    world.end_pod("sums-generator-0", 137, reason="OOMKilled").settle()
    assert world.healthy()[1] == "OOMKilled"


def test_a_refusal_is_forgotten_when_the_gateway_is_switched_off() -> None:
    world = World(job_body(roles=SERVED), refuse={SERVICE: "denied the request"})
    world.to_running()
    assert world.healthy()[1] == "PodRefused"
    world.edit(suspend=True).wind_down()
    world.edit(suspend=False, roles={}).settle()
    assert world.healthy()[0] == "True"


def test_the_address_in_the_status_is_that_which_the_gateway_got() -> None:
    outside = SETTINGS.model_copy(update={"gateway_ingress": GatewayIngress(host="chat.example")})
    world = running(roles=SERVED)
    world.settings = outside
    world.settle()
    assert world.status["serving"]["url"] == URL, "until it restarts, and gets an Ingress"
    world.end_pod(POD, 1).settle()
    world.pass_time(31.0).settle()
    assert world.status["serving"]["url"] == "https://sums-6f1c-42.chat.example/v1"
    assert ("Ingress", SERVICE) in world.objects


def test_a_refused_service_of_a_gateway_comes_after_the_other_pods() -> None:
    world = World(job_body(roles=SERVED))
    world.settle()
    world.run_all().settle()
    made = world.end_pod("sums-prepare-0", 0, "prepared").plan().create
    names = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert names.index(("Pod", "sums-trainer-0")) < names.index(("Service", SERVICE)) < names.index(("Pod", POD))
    assert names.index(("Pod", "sums-trainer-0")) < min(map(names.index, (("Secret", KEYS), ("Secret", CLIENTS))))


def test_a_gang_starts_without_its_gateway() -> None:
    world = running(roles=SERVED, scheduling={"gang": "volcano"})
    [group] = [each for (kind, _), each in world.objects.items() if kind == "PodGroup"]
    assert group["spec"]["minMember"] == len(world.pods) - 2, "nor with `prepare`"
    assert "scheduling.k8s.io/group-name" not in world.pods[POD]["metadata"]["annotations"]


def test_kueue_does_not_count_a_gateway() -> None:
    """Kueue takes eight sets of pods, and admits all or none."""
    world = World(
        job_body(
            roles=SERVED | {"generator": {"replicas": {"min": 1, "max": 2}}}, scheduling={"gang": "kueue"},
            algorithm={"name": "ppo", "klCoefficient": 0.1}, model={"path": "tiny:llama", "critic": "tiny:critic"},
        ),
        SETTINGS.model_copy(update={"kueue": True}),
        flavors={"spot": {"nodeLabels": {"pool": "spot"}}},
    )  # fmt: skip
    world.settle()
    sets = [each["name"] for each in world.workload["spec"]["podSets"]]
    assert (len(sets), "gateway" in sets) == (8, False)
    world.admit()
    world.to_running()
    assert world.pods[POD]["spec"]["nodeSelector"] == {"pool": "spot"}, "with control"


def test_a_gateway_is_reached_from_outside_at_a_host_of_its_own() -> None:
    outside = GatewayIngress(host="chat.example", class_name="nginx", annotations={"a": "b"}, tls_secret="cert")
    world = running(SETTINGS.model_copy(update={"gateway_ingress": outside}), roles=SERVED)
    made, host = world.objects["Ingress", SERVICE], "sums-6f1c-42.chat.example"
    assert world.status["serving"]["url"] == f"https://{host}/v1"
    assert (made["metadata"]["annotations"], made["spec"]["ingressClassName"]) == ({"a": "b"}, "nginx")
    assert made["spec"]["tls"] == [{"hosts": [host], "secretName": "cert"}]
    [rule] = made["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], backend) == (host, {"name": SERVICE, "port": {"name": "serve"}})
    assert [each["name"] for each in world.objects["Service", SERVICE]["spec"]["ports"]] == ["serve"]

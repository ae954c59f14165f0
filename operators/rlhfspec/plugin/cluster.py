"""The cluster as the user's kubeconfig shows it: objects as the API server writes them, errors in one line.

Example:
    >>> answer_of(b'{"message": "pods is forbidden"}', 403)
    'pods is forbidden'
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhfspec.cluster import names
from rlhfspec.errors import ClusterUnavailable, InvalidRequest, did_you_mean

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Json = dict[str, Any]
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0
CONTAINER = "worker"  # a pod's own, beside what a podTemplate may add


@dataclass(frozen=True, slots=True)
class Where:
    """As given on the command line; None: what the kubeconfig says."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


class Cluster:
    """One namespace of it."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._client, self.namespace = _connected(where)

    def jobs(self) -> list[Json]:
        return list(self._get("rlhfjobs", self._jobs_path())["items"])

    def job(self, name: str) -> Json:
        try:
            return self._get(f"rlhfjob {name}", f"{self._jobs_path()}/{name}")
        except _Missing:
            there = [job["metadata"]["name"] for job in self.jobs()]
            problem = f"there is no such job in namespace {self.namespace}"
            raise InvalidRequest("JOB", name, problem + (did_you_mean(name, there) or _listed(there))) from None

    def change_job(self, name: str, patch: Json) -> Json:
        self.job(name)
        return self._call(f"change of {name}", "PATCH", f"{self._jobs_path()}/{name}", patch)

    def pods(self, job: str, role: str | None = None) -> list[Json]:
        """In the order of the map, then by number."""
        selector = f"{names.JOB}={job}" + (f",{names.ROLE}={role}" if role else "")
        found = self._get("pods", f"{self._path()}/pods", labelSelector=selector)["items"]
        return sorted(found, key=_order)

    def pod(self, name: str) -> Json | None:
        try:
            return self._get(f"pod {name}", f"{self._path()}/pods/{name}")
        except _Missing:
            return None

    def create_pod(self, pod: Json) -> Json:
        return self._call("a pod", "POST", f"{self._path()}/pods", pod)

    def delete_pod(self, name: str) -> None:
        with suppress(_Missing):
            self._call(f"deletion of {name}", "DELETE", f"{self._path()}/pods/{name}", {"gracePeriodSeconds": 0})

    def evict(self, name: str) -> None:
        """Its process gets SIGTERM; a PodDisruptionBudget may forbid it."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": self.namespace},
        }
        self._call(f"eviction of {name}", "POST", f"{self._path()}/pods/{name}/eviction", body)

    def warnings(self, names_: set[str]) -> list[Json]:
        """About objects of these names, the newest last."""
        events = self._get("events", f"{self._path()}/events", fieldSelector="type=Warning")["items"]
        mine = [event for event in events if event["involvedObject"].get("name") in names_]
        return sorted(mine, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")

    def log(self, pod: str, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines as the kubelet keeps them, each after its time."""
        query = {"container": CONTAINER, "timestamps": "true", "follow": str(follow).lower()}
        query |= {"tailLines": str(tail)} if tail is not None else {}
        with _errors_of(f"log of {pod}"):
            answer = self._client.call_api(
                "GET",
                self._url(f"{self._path()}/pods/{pod}/log", query),
                header_params=self._headers(),
                _request_timeout=(CONNECT_SECONDS, None if follow else ANSWER_SECONDS),
            ).response
            if answer.status >= 400:
                raise _refusal(f"log of {pod}", answer.data, answer.status)
            yield from _lines(answer)

    def kubectl(self, *words: str) -> list[str]:
        """A command line of kubectl for the same place: for what needs a terminal or a stream."""
        program = shutil.which("kubectl")
        if program is None:
            raise InvalidRequest("kubectl", None, "is not on the PATH; commands that run something in a pod need it")
        where = self._where
        options = ["--namespace", self.namespace]
        options += ["--context", where.context] if where.context else []
        options += ["--kubeconfig", where.kubeconfig] if where.kubeconfig else []
        return [program, *options, *words]

    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    def _jobs_path(self) -> str:
        return f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{self.namespace}/{names.PLURAL}"

    def _get(self, asked: str, path: str, **query: str) -> Json:
        return self._call(asked, "GET", path, query=query)

    def _call(self, asked: str, method: str, path: str, body: Json | None = None, query: Json | None = None) -> Json:
        headers = self._headers()
        headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with _errors_of(asked):
            timeout = (CONNECT_SECONDS, ANSWER_SECONDS)
            url = self._url(path, query or {})
            answer = self._client.call_api(
                method, url, header_params=headers, body=body, _request_timeout=timeout
            ).response
            data = answer.data
        if answer.status >= 400:
            raise _refusal(asked, data, answer.status)
        found: Json = json.loads(data)
        return found

    def _url(self, path: str, query: Json) -> str:
        from urllib.parse import urlencode

        return f"{self._client.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], None, None, None)
        return headers


class _Missing(ClusterUnavailable):
    """Of a name that is not there, or a kind that nobody installed."""


def answer_of(body: bytes, code: int) -> str:
    """What a Status says, on one line."""
    try:
        text = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace") or f"HTTP {code}"
    return " ".join(text.split())


def _refusal(asked: str, body: bytes, code: int) -> ClusterUnavailable:
    said = answer_of(body, code)
    if code == 404 and names.PLURAL in asked and "not find the requested resource" in said:
        return ClusterUnavailable(asked, "it knows no RLHFJob: install the chart first")
    if code == 404:
        return _Missing(asked, said)
    return ClusterUnavailable(asked, said)


def _connected(where: Where) -> tuple[ApiClient, str]:
    import yaml
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, active = config.list_kube_config_contexts(config_file=where.kubeconfig)  # type: ignore[no-untyped-call]
        chosen = next((each for each in contexts if each["name"] == where.context), active)
        settings = client.Configuration()
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=where.kubeconfig, context=where.context, client_configuration=settings, persist_config=False
        )
    except (ConfigException, OSError, yaml.YAMLError) as error:
        problem = f"cannot be used: {' '.join(str(error).split())}"
        raise InvalidRequest("kubeconfig", where.context or where.kubeconfig, problem) from None
    settings.retries = 0
    return client.ApiClient(settings), where.namespace or chosen["context"].get("namespace") or "default"


@contextmanager
def _errors_of(asked: str) -> Iterator[None]:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (HTTPError, ApiException) as error:
        cause = getattr(error, "reason", None) or error
        raise ClusterUnavailable(asked, f"no answer: {' '.join(str(cause).split())}") from None


def _lines(answer: Any) -> Iterator[str]:
    rest = b""
    for piece in answer.stream(1 << 16, decode_content=False):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def _order(pod: Json) -> tuple[int, int]:
    labels = pod["metadata"].get("labels") or {}
    role, worker = labels.get(names.ROLE, ""), labels.get(names.WORKER, "")
    place = names.ROLES.index(role) if role in names.ROLES else len(names.ROLES)
    return place, int(worker) if worker.isdecimal() else 0


def _listed(there: list[str]) -> str:
    return f"; there are {', '.join(sorted(there)[:10])}" if there else "; there is none at all"

"""Admission webhooks of tests: a small HTTPS server of this machine, which the API server asks.

    with webhook(cluster, "sidecars", add_sidecars, namespace="rlhf"): ...

What it answers: JSON patches of what is asked about; or a status code of HTTP, as a service that is broken does.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cluster import ControlPlane
from manifests import pod

Patches = list[dict[str, Any]]
Answer = Callable[[dict[str, Any]], Patches | int]  # to the object that is asked about
ADMISSION = "admissionregistration.k8s.io/v1"
KIND = "MutatingWebhookConfiguration"


@contextmanager
def webhook(
    cluster: ControlPlane, name: str, answer: Answer, *, namespace: str, url: str = "", timeout_seconds: int = 10
) -> Iterator[None]:
    """Of the pods that are made in that namespace. `url`: somebody else's, who is asked instead."""
    with _served(cluster, name, answer) as ours:
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        asked = {
            "name": f"{name}.example.com",
            "clientConfig": {"url": url or ours, "caBundle": base64.b64encode(cluster.authority.pem).decode()},
            "rules": [rule],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "failurePolicy": "Fail",
            "timeoutSeconds": timeout_seconds,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        cluster.apply({"apiVersion": ADMISSION, "kind": KIND, "metadata": {"name": name}, "webhooks": [asked]})
        try:
            cluster.wait_for("it is asked", lambda: _is_asked(cluster, name, namespace), seconds=30)
            yield
        finally:
            cluster.kubectl("delete", KIND.lower(), name)


def _is_asked(cluster: ControlPlane, name: str, namespace: str) -> bool:
    """A webhook is configured some moments before it is asked."""
    how = ("create", "-n", namespace, "-f", "-", "--dry-run=server", "-o", "yaml")
    said = cluster.kubectl(*how, stdin=json.dumps(pod("probe")), check=False)
    return f"{name}.example.com" in said or ASKED in said


ASKED = "webhook-was-asked"  # an annotation that each answer adds


@contextmanager
def _served(cluster: ControlPlane, name: str, answer: Answer) -> Iterator[str]:
    certificate, key = cluster.authority.issue(f"webhook-{name}", "webhook", hosts=(cluster.address, "localhost"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = _Server((cluster.address, 0), _handler(answer))
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://{cluster.address}:{server.server_port}/pods"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """The API server hung up: nobody waits for the answer any more."""


def _handler(answer: Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = answer(review["request"]["object"])
            if isinstance(said, int):
                return self.send_error(said)
            patches = [_annotation(review["request"]["object"]), *said]
            patch = base64.b64encode(json.dumps(patches).encode()).decode()
            allowed = {"uid": review["request"]["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
            body = json.dumps(
                {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": allowed}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _annotation(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["metadata"].get("annotations"):
        return {"op": "add", "path": f"/metadata/annotations/{ASKED}", "value": "true"}
    return {"op": "add", "path": "/metadata/annotations", "value": {ASKED: "true"}}

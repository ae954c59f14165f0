"""What tests do with any Kubernetes, however it was started: kubectl, helm, waiting, and a client."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.build import binaries_folder


class ToolFailed(RuntimeError):
    """kubectl or helm ended with an error; the message is what it said."""


class Kubernetes:
    @property
    def kubeconfig(self) -> Path:
        """Of the cluster's administrator."""
        raise NotImplementedError

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """What it printed; a refusal is an error with kubectl's own words. `check=False`: errors are printed, too."""
        return self._run("kubectl", args, stdin, check)

    def helm(self, *args: str, check: bool = True) -> str:
        return self._run("helm", args, None, check)

    def get(self, *args: str) -> Any:
        """`kubectl get ... -o json` as Python."""
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        """On the server's side, by one manager: a second time with less takes away."""
        self.kubectl("apply", "--server-side", "-f", "-", stdin="\n".join(json.dumps(each) for each in objects))

    def define(self, crd: dict[str, Any], *, seconds: float = 30.0) -> None:
        """Applies a CustomResourceDefinition, and waits until it is served. `kubectl wait` fails where there are no
        conditions yet."""
        self.apply(crd)
        self.wait_for(f"{crd['metadata']['name']} to be served", lambda: self._is_served(crd), seconds=seconds)

    def _is_served(self, crd: dict[str, Any]) -> bool:
        conditions = self.get("crd", crd["metadata"]["name"]).get("status", {}).get("conditions") or ()
        return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)

    def wait_for(self, what: str, is_so: Callable[[], bool], *, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds} s: {what}")
            time.sleep(0.2)

    def client(self) -> Any:
        """An `ApiClient` of the `kubernetes` package: `kubernetes.client.CoreV1Api(cluster.client())`."""
        from kubernetes import config

        return config.new_client_from_config(str(self.kubeconfig))

    def _run(self, name: str, args: tuple[str, ...], stdin: str | None, check: bool) -> str:
        command = [str(binaries_folder() / name), f"--kubeconfig={self.kubeconfig}", *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=600)
        if check and done.returncode:
            raise ToolFailed(f"{name} {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout if check else done.stdout + done.stderr

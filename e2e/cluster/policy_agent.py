"""Keeps the rules of policies.py in force on every node: watches pods, policies and namespaces.

python -m cluster.policy_agent KUBECONFIG node1=rlhf3n1 node2=rlhf3n2
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.api import Api
from cluster.policies import CHAIN, World, pod_of, rules

PODS, NAMESPACES = "/api/v1/pods", "/api/v1/namespaces"
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"


class Watched:
    """One kind of object as it is now; sets an event when any of them changes."""

    def __init__(self, api: Api, path: str, changed: threading.Event) -> None:
        self._api, self._path, self._changed = api, path, changed
        self._items: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self.listed = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def items(self) -> list[Mapping[str, Any]]:
        with self._lock:
            return list(self._items.values())

    def _follow(self) -> None:
        while True:
            try:
                self._follow_once()
            except (OSError, ValueError) as error:  # a server that restarts; an answer cut off in the middle
                print(f"{self._path}: watching again: {error}", flush=True)
                time.sleep(0.2)

    def _follow_once(self) -> None:
        answer = self._api.get(self._path)
        with self._lock:
            self._items = {item["metadata"]["uid"]: item for item in answer["items"]}
        self.listed.set()
        self._changed.set()
        for event in self._api.watch(self._path, answer["metadata"]["resourceVersion"]):
            item = event["object"]
            if event["type"] == "ERROR":
                raise OSError(str(item))  # that version is too old by now: list again
            if event["type"] != "BOOKMARK":
                with self._lock:
                    self._items.pop(item["metadata"]["uid"], None)
                    if event["type"] != "DELETED":
                        self._items[item["metadata"]["uid"]] = item
                self._changed.set()


def apply(namespace: str, text: str) -> None:
    """At once: chains are replaced in one step, so that there is no moment without them."""
    inside = ["nsenter", f"--net=/run/netns/{namespace}"]
    subprocess.run([*inside, "iptables-restore", "--noflush", "-w", "5"], input=text, text=True, check=True)
    # In mangle, which comes before the tables that kube-proxy and the pod network write to.
    jump = ["FORWARD", "-j", CHAIN]
    there = [*inside, "iptables", "-w", "5", "-t", "mangle", "-C", *jump]
    if subprocess.run(there, stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*inside, "iptables", "-w", "5", "-t", "mangle", "-I", *jump], check=True)


def main() -> None:
    api = Api(Path(sys.argv[1]))
    nodes = dict(each.split("=") for each in sys.argv[2:])
    changed = threading.Event()
    pods, policies, namespaces = (Watched(api, path, changed) for path in (PODS, POLICIES, NAMESPACES))
    for watched in (pods, policies, namespaces):
        watched.listed.wait()
    applied: dict[str, str] = {}
    while True:
        changed.clear()
        labels = {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in namespaces.items()}
        running = tuple(pod for item in pods.items() if (pod := pod_of(item)))
        world = World(running, tuple(policies.items()), labels)
        for node, namespace in nodes.items():
            if (text := rules(world, node)) != applied.get(node):
                apply(namespace, text)
                applied[node] = text
                print(f"{node}: {text.count(chr(10))} lines", flush=True)
        changed.wait()


if __name__ == "__main__":
    main()

"""Measure the operator's CPU time to reconcile many jobs against an in-memory API server.

Written objects and changed pods go through the cache, as watches deliver them.

python bench/operator_looks.py --jobs 200 --generators 4
python bench/operator_looks.py --profile steady
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from rlhfspec.cluster import names
from rlhfspec.cluster.api import ApiResponse, path_of
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.looks import Reconciler
from rlhfspec.operator.looking.queue import Key
from rlhfspec.operator.settings import ChartSettings, ImageNames
from rlhfspec.operator.shared.credentials import new_keys
from rlhfspec.operator.shared.release import credentials_by, proof_by

Json = dict[str, Any]
EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo.yaml"
NAMESPACE = "many"


class Server:
    """In-memory stand-in for the `Api` calls of reconciling. Each write makes a new version."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.num_writes = 0
        self._versions = count(1)

    async def create(self, thing: Json, *, dry_run: bool = False) -> ApiResponse:
        return await self.apply(thing)

    async def apply(self, thing: Json) -> ApiResponse:
        metadata = thing["metadata"]
        path = path_of(thing["apiVersion"], thing["kind"], metadata["namespace"], metadata["name"])
        if path not in self.objects:
            metadata = metadata | {"uid": f"uid-{len(self.objects)}", "creationTimestamp": now()}
            self.objects[path] = thing | {"metadata": metadata, "status": {"phase": "Pending"}}
        return self._wrote(path)

    async def write_status(self, namespace: str, name: str, uid: str, version: str, status: Json) -> ApiResponse:
        path = job_path(name)
        self.objects[path] = self.objects[path] | {"status": status}
        return self._wrote(path)

    async def merge(self, version: str, kind: str, namespace: str, name: str, patch: Json) -> ApiResponse:
        path = path_of(version, kind, namespace, name)
        thing = self.objects[path]
        self.objects[path] = thing | {"metadata": thing["metadata"] | patch["metadata"]}
        return self._wrote(path)

    def _wrote(self, path: str) -> ApiResponse:
        self.num_writes += 1
        return ApiResponse(200, self.touch(path))

    def touch(self, path: str) -> Json:
        """Return a copy of the object with a new resource version, as a watch delivers it."""
        thing = self.objects[path]
        thing["metadata"] = thing["metadata"] | {"resourceVersion": str(next(self._versions))}
        told: Json = json.loads(json.dumps(thing))
        return told

    def say(self, path: str, status: Json) -> Json:
        """Set an object's status, as the kubelet does for a pod."""
        self.objects[path] = self.objects[path] | {"status": status}
        return self.touch(path)


class Bench:
    def __init__(self, num_jobs: int, num_generators: int) -> None:
        self.server, self.cache = Server(), Cache()
        server: Any = self.server
        self.looks = Reconciler(self.cache, server, settings())
        self.keys: list[Key] = [(NAMESPACE, f"job-{number}") for number in range(num_jobs)]
        for _, name in self.keys:
            body = yaml.safe_load(EXAMPLE.read_text())
            made = {"namespace": NAMESPACE, "name": name, "uid": f"uid-of-{name}", "creationTimestamp": now()}
            body["metadata"] = made | {"generation": 1}
            body["spec"]["roles"] = {"generator": {"workers": num_generators}}
            self.server.objects[job_path(name)] = body

    def told_of_jobs(self) -> int:
        for _, name in self.keys:
            self.cache.put_job(self.server.touch(job_path(name)))
        return len(self.keys)

    async def look_at_all(self) -> int:
        for key in self.keys:
            await self.looks.reconcile(key)
        return len(self.keys)

    def prepared(self) -> int:
        for key in self.keys:
            ended = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now()}}
            self._say(f"{key[1]}-{names.PREPARE}-0", "Succeeded", ended, ready=False)
        return len(self.keys)

    async def come_in(self) -> int:
        """Make pods ready one by one and reconcile after each, as if the queue merged no events."""
        num_looks = 0
        for key in self.keys:
            for pod in self.cache.pods(key):
                if pod.role != names.PREPARE:
                    self._say(pod.name, "Running", {"running": {"startedAt": now()}}, ready=True)
                    await self.looks.reconcile(key)
                    num_looks += 1
        return num_looks

    def _say(self, name: str, phase: str, state: Json, *, ready: bool) -> None:
        container = {"name": "worker", "state": state, "ready": ready}
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now()}
        status = {"phase": phase, "containerStatuses": [container], "conditions": [condition]}
        self.cache.put_pod(self.server.say(path_of("v1", "Pod", NAMESPACE, name), status))

    @property
    def num_pods(self) -> int:
        return sum(len(self.cache.pods(key)) for key in self.keys)


def settings() -> ChartSettings:
    keys = new_keys()
    return ChartSettings(
        release="rl",
        namespace="rlhf",
        images=ImageNames(slim="rlhfspec:slim", cpu="rlhfspec:cpu", cuda="rlhfspec:cuda"),
        credentials=credentials_by(keys),
        proof=proof_by(keys),
        nats_url="tls://rl-nats.rlhf.svc:4222",
        redis_url="rediss://rl-redis.rlhf.svc:6379",
        report_url="https://rl-operator.rlhf.svc:8443",
        claim="shared",
    )


def job_path(name: str) -> str:
    return path_of(f"{names.GROUP}/{names.VERSION}", names.KIND, NAMESPACE, name)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--generators", type=int, default=4)
    parser.add_argument("--profile", help="the phase whose functions are listed")
    asked = parser.parse_args()
    bench = Bench(asked.jobs, asked.generators)

    def all_looks() -> int:
        return asyncio.run(bench.look_at_all())

    phases: dict[str, Callable[[], int]] = {
        "told": bench.told_of_jobs,
        "open": all_looks,
        "prepared": bench.prepared,
        "start": all_looks,
        "come-in": lambda: asyncio.run(bench.come_in()),
        "steady": all_looks,
    }
    print(f"{'phase':10} {'times':>6} {'CPU ms each':>12} {'CPU s':>7} {'writes':>7}")
    for name, phase in phases.items():
        profile, writes, began = cProfile.Profile(), bench.server.num_writes, time.process_time()
        times = profile.runcall(phase) if name == asked.profile else phase()
        seconds = time.process_time() - began
        written = bench.server.num_writes - writes
        print(f"{name:10} {times:6} {1000 * seconds / times:12.3f} {seconds:7.2f} {written:7}")
        if name == asked.profile:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
    print(f"{asked.jobs} jobs, {bench.num_pods} pods")


if __name__ == "__main__":
    main()

"""A trainer of two nodes of two ranks: pods that meet by a Service, through NetworkPolicies, and begin again together,
beside a generator of two processes or two generators that have weights by a process group.

`E2E_WHOLE=1` kills ten times instead of twice. What these runs must give is what the same ranks give as processes of
this machine, bit for bit. One process adds up the gradients of four ranks in another order: it is within 1e-4.
"""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster.tools import ToolFailed
from installed import IMAGES, NAMESPACE, Installed, Job, curve_of, example, on_the_laptop

from rlhfspec.cluster import names

CLUSTER = {"images": IMAGES}
pytestmark = [pytest.mark.own, pytest.mark.timeout(3600)]
TRAINERS, GENERATOR = ("sums-trainer-0", "sums-trainer-1"), "sums-generator-0"
KILLS: tuple[tuple[str, int], ...] = (("trainer", 3), ("generator", 1))  # a role, and which of its processes
if os.environ.get("E2E_WHOLE"):
    parts = [("generator", 0), ("generator", 1)]
    KILLS = (*[("trainer", rank) for rank in range(4)], *parts, *[("trainer", rank) for rank in (2, 0, 3, 1)])
LOSSES = ("policy_loss", "kl", "grad_norm", "entropy")
RANKS: dict[str, Any] = {"nodes": 2, "ranksPerNode": 2}


def sums(steps: int, **roles: Any) -> dict[str, Any]:
    training = {
        "steps": steps, "optimizer": {"learningRate": 1e-5}, "exactOnPolicy": False, "promptsPerStep": 4,
    }  # fmt: skip
    policy = {"maxRestarts": 50, "backoffSeconds": 0.1, "maxBackoffSeconds": 0.1}
    job = example(
        "grpo", evaluation=None, training=training, checkpoint={"everySteps": 1}, failurePolicy=policy, roles=roles
    )
    return job | {"metadata": {"name": "sums"}}


def test_whichever_process_is_killed_its_set_alone_begins_again_and_nothing_is_lost(
    installed: Installed, tmp_path: Path
) -> None:
    steps = 3 * len(KILLS) + 2
    alone = on_the_laptop(sums(steps), tmp_path / "alone")
    whole = sums(steps, trainer=RANKS, generator={"tensorParallel": 2})
    ranks = on_the_laptop(whole, tmp_path / "ranks", "--processes")
    run, draw = installed.submit(whole), random.Random(0)
    run.wait_for_phase("Running", seconds=400)
    for number, (role, which) in enumerate(KILLS, start=1):
        struck(run, role, which, draw.uniform(0, 2))
        assert run.status["restarts"]["total"] == number
    run.wait_for_phase("Succeeded", seconds=900)
    assert run.status["restarts"]["total"] == len(KILLS)
    assert run.curve() == curve_of(ranks), "bit for bit: ranks add up in the same order, killed or not"
    assert len(run.curve()) == steps
    for ours, theirs in zip(run.curve(), curve_of(alone), strict=True):
        assert ours["reward"] == theirs["reward"]
        for name in LOSSES:
            assert ours[name] == pytest.approx(theirs[name], rel=0, abs=1e-4), name
    assert samples_of(run.folder) == samples_of(alone), "each once, with the tokens of one process"
    run.delete()


def test_weights_come_by_a_group_and_by_the_store_where_a_generator_was_killed(
    installed: Installed, tmp_path: Path
) -> None:
    steps = 16  # more than pass while a pod is made again
    by_store = sums(steps, trainer=RANKS, generator={"workers": 2, "weights": "store"})
    stores = on_the_laptop(by_store, tmp_path, "--processes")
    run = installed.submit(sums(steps, trainer=RANKS, generator={"workers": 2, "weights": "group"}))
    run.wait_for_phase("Running", seconds=400)
    to_both = "to 2 generators by group"
    run.wait("a version goes to both by the group", lambda: said(run, "trainer-0", to_both) > 0, seconds=400)
    before = uids(run)
    os.kill(process_of(run, "generator", 0), signal.SIGKILL)
    run.wait("it is there again", lambda: are_ready(run, {GENERATOR}, before), seconds=400)
    sent = said(run, "trainer-0", to_both)
    run.wait("both are in again", lambda: said(run, "trainer-0", to_both) > sent, seconds=400)
    # Logs are read while the generators run: their pods go when the job ends.
    by_group = "weights came by the group"
    run.wait("the one in its second life says so", lambda: said(run, "generator-0", by_group) > 0, seconds=60)
    assert said(run, "generator-1", by_group) > said(run, "generator-1", "by the store")
    assert {name for name, uid in uids(run).items() if uid != before[name]} == {GENERATOR}
    run.wait_for_phase("Succeeded", seconds=600)
    assert run.curve() == curve_of(stores)
    assert samples_of(run.folder) == samples_of(stores)
    run.delete()


REACHES = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"


def test_two_jobs_of_a_namespace_do_not_reach_each_others_ranks(installed: Installed) -> None:
    jobs = [sums(200, trainer=RANKS, generator={"workers": 2}) for _ in range(2)]
    for job, name in zip(jobs, ("ours", "theirs"), strict=True):  # not that of the jobs above, which may have failed
        job["metadata"] = {"name": name}
    ours, theirs = (installed.submit(job) for job in jobs)
    for run in (ours, theirs):
        run.wait_for_phase("Running", seconds=400)
        run.wait_for_step(1, seconds=400)

    def reaches(run: Job, source: str, other: Job, to: str, port: int) -> bool:
        [address] = [
            pod["status"]["podIP"] for pod in other.pods() if pod["metadata"]["name"] == f"{other.name}-{to}"
        ]  # fmt: skip
        command = ("python", "-c", REACHES, address, str(port))
        try:
            run.kubectl("exec", f"{run.name}-{source}", "-n", NAMESPACE, "--", *command)
        except ToolFailed:
            return False
        return True

    for run, other in ((ours, theirs), (theirs, ours)):
        assert reaches(run, "trainer-1", run, "trainer-0", names.RANKS_PORT), "its own"
        assert reaches(run, "generator-1", run, "generator-0", names.MOVES_PORT), "its own"
        for source in ("trainer-1", "generator-1"):
            for to, port in (("trainer-0", names.RANKS_PORT), ("generator-0", names.MOVES_PORT)):
                assert not reaches(run, source, other, to, port), (run.name, source, to)
    ours.delete()
    theirs.delete()


def struck(run: Job, role: str, which: int, pause: float) -> None:
    """When the run is a step further, in the middle of whatever it is."""
    step = run.step
    run.wait_for_step(step + 1, seconds=400)
    with suppress(TimeoutError):
        run.wait("the next step", lambda: run.step > step + 1, seconds=pause)
    before = uids(run)
    os.kill(process_of(run, role, which), signal.SIGKILL)
    if role == "trainer":
        worker, named = f"trainer-{which // 2}", f"(rank {which} of 4 on node {which // 2})"
    else:
        # The first process says of the others how they ended, in words, which a status does not show.
        worker, named = (
            "generator-0",
            "ended with exit code 1; details: kubectl rlhf why" if which else "killed by SIGKILL",
        )
    run.wait(f"{named} is named", lambda: named in last_words(run, worker), seconds=60)
    of_the_set = set(TRAINERS if role == "trainer" else (GENERATOR,))
    seconds = run.wait("the set is there again", lambda: are_ready(run, of_the_set, before), seconds=400)
    print(f"{role} {which} was killed at step {step + 1}: its set was ready again after {seconds:.0f} s")
    assert {name for name, uid in uids(run).items() if uid != before[name]} == of_the_set, "no other pod was made again"


def last_words(run: Job, worker: str) -> str:
    return str(run.status["internal"].get("workers", {}).get(worker))


def uids(run: Job) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in run.pods()}


def are_ready(run: Job, names: set[str], before: dict[str, str]) -> bool:
    """New pods of these names; the first of a set is ready once all ranks have met."""
    ready = {
        pod["metadata"]["name"]
        for pod in run.pods()
        if pod["metadata"]["uid"] != before[pod["metadata"]["name"]]
        and any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
    }
    return names <= ready


def said(run: Job, worker: str, words: str) -> int:
    """How often its pod's log says it."""
    log = run.kubectl("logs", f"{run.name}-{worker}", "-n", NAMESPACE, check=False)
    return sum(words in line for line in log.splitlines())


def process_of(run: Job, role: str, which: int) -> int:
    """A rank of the trainer, or a part of the first generator, as this machine numbers its processes."""
    name = TRAINERS[which // 2] if role == "trainer" else GENERATOR
    [pod] = [pod for pod in run.pods(role) if pod["metadata"]["name"] == name]
    [container] = pod["status"]["containerStatuses"]
    wanted = rank_of_trainer(run, name, which) if role == "trainer" else 1 - which  # 0: known by what it was told
    for pid in sorted(int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()):
        with suppress(OSError):  # it ended meanwhile
            if container["containerID"].rpartition("/")[2] not in Path(f"/proc/{pid}/cgroup").read_text():
                continue
            inside = int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()[-1])
            told = Path(f"/proc/{pid}/environ").read_text().split("\0")
            if inside == wanted or (wanted == 0 and f"RANK={which}" in told):
                return pid
    raise AssertionError(f"{role} {which} does not run\n{run.evidence()}")


def rank_of_trainer(run: Job, pod: str, rank: int) -> int:
    """As its pod numbers its processes."""
    log = run.kubectl("logs", pod, "-n", NAMESPACE).splitlines()
    [pid] = [json.loads(line)["pid"] for line in log if f'"rank": {rank}' in line]
    return int(pid)


def samples_of(folder: Path) -> list[tuple[str, list[int], float]]:
    """All of a run: two lines of one sample would be two."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [(line["id"], line["tokens"], line["reward"]) for line in lines]

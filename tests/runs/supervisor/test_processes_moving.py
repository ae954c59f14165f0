import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from advice import Adviser, Listener
from faults.processes import named, slowed
from runs import train, write_job
from started import Started, eventually, hold_rewards
from traced_moves import check_traces

from rlhfspec.messages.records import Move

LONG = (
    "roles.generator.workers=2",
    "generation.maxTokens=192",
    "generation.kvCacheTokens=65536",
    "training.promptsPerStep=8",
    "training.steps=6",
)
GRPO = ("generation.speculation.mode=adaptive", "roles.generator.link=shm")
PPO = ("generation.speculation.mode=suffix", "roles.generator.link=tcp", 'generation.stop=["N!", "xB"]')


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize(
    ("algorithm", "ways"), [({"name": "grpo"}, GRPO), ({"name": "ppo", "samplesPerPrompt": 2}, PPO)], ids=str
)
def test_random_moves_every_50_ms_change_no_bit_of_the_curve(
    algorithm: dict[str, Any], ways: tuple[str, ...], job_file: Path, starting: Callable[..., Started]
) -> None:
    """One run has drafts over shared memory; one has other drafts, stop strings and a critic over TCP."""
    policy = yaml.safe_load(job_file.read_text())["spec"]["model"]["path"]
    write_job(job_file.parent, Path(policy).parent, **algorithm)
    hold = hold_rewards(job_file, "0 many")
    whole = train(job_file, "one", *LONG, *ways)
    run = starting("many", *LONG, *ways)
    run.until("6 steps of")
    generators = [run.pid_of("generator", worker) for worker in (0, 1)]
    with Adviser(run.folder / "processes" / "connections.json", seed=1) as adviser:
        with slowed(*generators):  # however quick the machine is, samples are there long enough to be moved
            hold.unlink()
            eventually(lambda: adviser.outcomes["kv"] >= 10 or run.process.poll() is not None, "ten have moved")
        code, output = run.ended()
    assert code == 0, output
    print(dict(adviser.outcomes), f"of {adviser.num_advised} advised")
    check_alike(run, whole)
    assert adviser.outcomes["kv"] >= 10, (adviser.outcomes, adviser.moved[-3:])
    num_moves, most = check_traces(run.folder)
    print(f"{num_moves} moves are in the traces, at most {most} of one sample")
    assert num_moves >= 10


class Hostile(Listener):
    num_floods = 0

    def advice(self, job: str) -> list[Move]:
        if self.num_floods >= 3 or not any(load.sample_ids for load in self.loads.values()):
            return []
        self.num_floods += 1
        samples = [sample for load in self.loads.values() for sample in load.sample_ids]
        ways = ((0, 1), (1, 0), (0, 0), (1, 1), (0, 7), (9, 0), (2**31, 2**31))
        return [
            Move(
                id=f"{job}/flood/{self.num_floods}/{number}", job=job,
                sample_id=f"nobody's/{number}" if number % 8 else samples[number % len(samples)],
                source=ways[number % len(ways)][0], destination=ways[number % len(ways)][1],
                gain_seconds=-1e300, reason="x" * 100,
            )
            for number in range(10_000)
        ]  # fmt: skip


def test_a_rebalancer_that_is_killed_held_or_talks_nonsense_costs_balance_and_nothing_else(
    job_file: Path, starting: Callable[..., Started]
) -> None:
    hold = hold_rewards(job_file, "1 many")
    whole = train(job_file, "one", *LONG)
    run = starting("many", *LONG)
    with Hostile(run.folder / "processes" / "connections.json") as hostile:
        run.until("step 1/")
        uid = run.connections["uid"]
        os.kill(first := run.pid_of("rebalancer"), signal.SIGKILL)
        assert "started again" in run.until("rebalancer 0: killed by SIGKILL")
        eventually(lambda: [pid for pid in named(uid, "rebalancer-0") if pid != first], "there is another one")
        hold.write_text("4 many")
        run.until("step 4/")
        for pid in named(uid, "rebalancer-0"):
            os.kill(pid, signal.SIGSTOP)  # for as long as the run lasts
        hold.unlink()
        run.until("step 6/")
        for pid in named(uid, "rebalancer-0"):
            os.kill(pid, signal.SIGCONT)
        code, output = run.ended()
    assert code == 0, output
    check_alike(run, whole)
    assert hostile.num_floods, "it was heard"
    followed = [moved for moved in hostile.moved if "/flood/" in moved.id]
    print(f"{len(followed)} of {hostile.num_advised} hostile moves were looked at; {dict(hostile.outcomes)}")
    assert len(followed) < hostile.num_advised / 4, "the rest of a flood is lost"
    assert all(moved.how == "kept" or moved.sample_id.startswith("letters/") for moved in followed)


def check_alike(run: Started, whole: list[dict[str, Any]]) -> None:
    assert run.curve() == whole
    one, many = ((run.job_file.parent / out / "samples.jsonl").read_bytes() for out in ("one", run.out))
    assert one == many

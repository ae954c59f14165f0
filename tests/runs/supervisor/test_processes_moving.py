"""Samples of processes move, also from a generator that leaves; runs without room end soon."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from advice import Adviser, Listener
from disks import fill
from faults.processes import named, slowed
from runs import curve_of, samples_of, train, write_job
from started import OFF, Started, caught, eventually, hold_rewards
from traced_moves import check_traces

from rlhfspec.messages.records import Move
from rlhfspec.simulator.serving import ServingCosts

LONG = ("generation.maxTokens=192", "training.promptsPerStep=8", "training.steps=6")
LONG += ("roles.generator.workers=2", "generation.kvCacheTokens=65536")
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
    run.check_alike(whole)
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


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
def test_a_rebalancer_killed_held_or_mad_costs_balance_alone(job_file: Path, starting: Callable[..., Started]) -> None:
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
    run.check_alike(whole)
    assert hostile.num_floods, "it was heard"
    followed = [moved for moved in hostile.moved if "/flood/" in moved.id]
    print(f"{len(followed)} of {hostile.num_advised} hostile moves were looked at; {dict(hostile.outcomes)}")
    assert len(followed) < hostile.num_advised / 4, "the rest of a flood is lost"
    assert all(moved.how == "kept" or moved.sample_id.startswith("letters/") for moved in followed)


LEAVING = ("generation.maxTokens=440", "training.promptsPerStep=4", "training.steps=2", "generation.ignoreEos=true")
LEAVING += ("roles.generator.workers=2", "generation.kvCacheTokens=65536")


def test_samples_of_a_leaving_generator_continue_at_another(job_file: Path, starting: Callable[..., Started]) -> None:
    """The generator leaves in the second step; the first is held until the test is ready."""
    hold = hold_rewards(job_file, "0 many")
    whole = train(job_file, "one", *LEAVING)
    run = starting("many", *LEAVING)
    run.until("(7 of 7)")
    generators = [run.pid_of("generator", worker) for worker in (0, 1)]
    with Listener(run.folder / "processes" / "connections.json") as listener:
        eventually(lambda: len(listener.loads) > 1, "both generators are heard")
        for pid in generators:
            os.kill(pid, signal.SIGSTOP)
        hold.unlink()
        worker = caught(
            generators, lambda: in_the_middle(listener), "a generator has samples in mid-answer", still_seconds=0.05
        )[0]
        with slowed(*generators):
            os.kill(generators[worker], signal.SIGTERM)
            eventually(lambda: not named(run.connections["uid"], f"generator-{worker}"), "it is gone")
        code, output = run.ended()
    assert code == 0, output
    assert f"generator {worker} left: another program stopped it" in output, "by itself, before anybody ended it"
    run.check_alike(whole)
    assert [moved.how for moved in listener.moved if "/leave/" in moved.id].count("kv") >= 2, listener.moved
    assert set(listener.outcomes) <= {"kv", "kept"}, listener.moved
    assert sum(moved.num_recomputed for moved in listener.moved) == 0
    # Had anything been delivered again, or been computed again, more tokens would have been made than there are.
    assert sum(listener.num_tokens.values()) == num_tokens(samples_of(job_file, "many"))


def in_the_middle(listener: Listener) -> list[int]:
    """Return generators with samples in mid-answer, if there is another generator to move to."""
    loads = list(listener.loads.values())
    begun = {load.worker: sum(number > 16 for number in load.num_generated) for load in loads}
    return [worker for worker, number in begun.items() if number >= 3 and len(loads) > 1]


def num_tokens(samples: bytes) -> int:
    return sum(len(json.loads(line)["tokens"]) for line in samples.splitlines())


APART = ("generation.maxTokens=192", "generation.ignoreEos=true", "training.promptsPerStep=6", "training.steps=5")
APART += ("generation.kvCacheTokens=65536", "roles.generator.workers=3", "roles.generator.prefillWorkers=1")


def test_with_prefill_workers_no_decoder_prefills_and_kills_change_no_bit(
    job_file: Path, starting: Callable[..., Started]
) -> None:
    """The prefill worker is killed in one step, a decoder in another."""
    whole = train(job_file, "one", *APART, "roles.generator.prefillWorkers=0", "roles.generator.workers=1")
    run = starting("many", *APART)
    run.until("(8 of 8)")
    with Listener(run.folder / "processes" / "connections.json") as listener:
        for step, worker in ((1, 0), (2, 1)):
            run.until(f"step {step}/")
            os.kill(run.pid_of("generator", worker), signal.SIGKILL)
        code, output = run.ended()
    assert code == 0, output
    run.check_alike(whole)
    assert listener.loads[0].num_prefilled > 0
    assert [listener.loads[decoder].num_prefilled for decoder in (1, 2)] == [0, 0]
    handed_over = [moved for moved in listener.moved if "/prefilled/" in moved.id and moved.how == "kv"]
    print(f"{len(handed_over)} handed over: {dict(listener.outcomes)}, {listener.num_tokens}")
    assert all(sum(listener.num_tokens[life] for life in listener.num_tokens if f"/{n}/" in life) for n in (1, 2))
    assert len(handed_over) >= 10
    costs = ServingCosts.model_validate_json((run.folder / "costs.json").read_bytes())
    assert len(costs.prompts) == 6
    assert costs.seconds(1, 1) > 0


def test_a_disk_full_at_the_start_is_refused_with_the_needed_room(job_file: Path, small_disk: Path) -> None:
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job_file)]
    done = subprocess.run([*command, "--out", str(small_disk / "out")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{small_disk}/out: disk full: the run's servers need 8.4 MB, and ")
    assert "Traceback" not in done.stderr
    assert list(small_disk.iterdir()) == [], "nothing was begun"


def test_full_disk_is_named_in_last_output_line(job_file: Path, disk: Path, starting: Callable[..., Started]) -> None:
    run = starting("disk/out", "training.steps=3000", "observability.traces=false")
    run.until(" 1/3000 ")
    fill(disk)
    output = run.ends(1)
    assert "No space left on device" in output
    assert "started again" not in output
    assert "the outcome cannot be written: " in output.splitlines()[-1], "nor the manifest"
    assert "disk full" in output.splitlines()[-1] or "storage full" in output.splitlines()[-1]


@pytest.mark.whole("a run of processes, to see one error")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="without unshare /dev/shm cannot be made small")
def test_weights_that_exceed_shared_memory_train_the_same_curve(job_file: Path) -> None:
    """Shared memory has .3 MB, where containers default to 64 MB. The curve is the same."""
    whole = train(job_file, "one")
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job_file), "--set", OFF]
    script = 'mount -t tmpfs -o size=300k tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", *command, "--out", str(job_file.parent / "many")],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    [told] = [line for line in done.stderr.splitlines() if line.startswith("/dev/shm has")]
    assert told.endswith(f"using {job_file.parent}/many/processes instead")
    assert curve_of(job_file, "many") == whole

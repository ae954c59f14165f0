import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from advice import Listener
from faults.processes import named, slowed
from runs import train
from started import Started, caught, eventually, hold_rewards

LONG = (
    "roles.generator.workers=2",
    "generation.maxTokens=440",
    "generation.ignoreEos=true",
    "generation.kvCacheTokens=65536",
    "training.promptsPerStep=4",
    "training.steps=2",
)


def test_what_runs_at_a_leaving_generator_goes_on_elsewhere(job_file: Path, starting: Callable[..., Started]) -> None:
    """The generator leaves in the second step; the first is held until the test is ready."""
    hold = hold_rewards(job_file, "0 many")
    whole = train(job_file, "one", *LONG)
    run = starting("many", *LONG)
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
    assert f"generator {worker} left: another program asked it to" in output, "by itself, before anybody ended it"
    assert run.curve() == whole
    one, many = ((job_file.parent / out / "samples.jsonl").read_bytes() for out in ("one", "many"))
    assert one == many
    assert [moved.how for moved in listener.moved if "/leave/" in moved.id].count("kv") >= 2, listener.moved
    assert set(listener.outcomes) <= {"kv", "kept"}, listener.moved
    assert sum(moved.num_recomputed for moved in listener.moved) == 0
    # Had anything been delivered again, or been computed again, more tokens would have been made than there are.
    assert sum(listener.num_tokens.values()) == num_tokens(many)


def in_the_middle(listener: Listener) -> list[int]:
    """Return generators with samples in mid-answer, if there is another generator to move to."""
    loads = list(listener.loads.values())
    begun = {load.worker: sum(number > 16 for number in load.num_generated) for load in loads}
    return [worker for worker, number in begun.items() if number >= 3 and len(loads) > 1]


def num_tokens(samples: bytes) -> int:
    return sum(len(json.loads(line)["tokens"]) for line in samples.splitlines())

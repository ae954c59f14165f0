"""Trial of the engine vLLM under faults; by the law its samples equal those of our engine in one process."""

from collections.abc import Callable
from pathlib import Path

from advice import Adviser
from runs import answers_of, train, write_data, write_job, write_models

from faults import processes
from faults.harness import Disturbed, FaultyRun
from faults.schedule import schedule
from faults.trial import OVERRIDES, again
from rlhfspec.tiny.random_models import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

VLLM = "generation.engine=vllm"
CHILD = "child"
STRUCK = (CHILD, "generator-0", "generator-1")
QUIET_SECONDS = 900.0  # two children that start anew, on a machine that has other things to do
LONG = ("generation.maxTokens=96", "generation.ignoreEos=true", "generation.maxSequences=8")


class VllmRun(FaultyRun):
    def _found(self, uid: str, target: str) -> list[int]:
        found = {pid: _is_child(pid) for pid in processes.of_run(uid)}
        if target == CHILD:
            return [pid for pid, is_child in found.items() if is_child][:1]
        return [pid for pid in super()._found(uid, target) if not found.get(pid, False)]


def _is_child(pid: int) -> bool:
    try:
        return b"vllm/inside/serve.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def trial(folder: Path, seed: int, num_kills: int, say: Callable[[str], None], *, held_seconds: float) -> VllmRun:
    with again(seed, f"--vllm --kills {num_kills}"):
        return _trial(folder, seed, num_kills, say, held_seconds)


def _trial(folder: Path, seed: int, num_kills: int, say: Callable[[str], None], held_seconds: float) -> VllmRun:
    write_models(folder, random_model("llama", seed=0, vocab_size=VOCAB_SIZE, head_dim=32))
    write_data(folder)
    job, overrides = write_job(folder, folder, name="grpo"), [*OVERRIDES, *LONG]
    with Adviser(folder / "faults" / "processes" / "connections.json", seed) as adviser:
        run = VllmRun(job, folder / "faults", [*overrides, VLLM, "training.steps=100000"], say)
        run.quiet_seconds = QUIET_SECONDS
        with run.started():
            run.strike_and_interrupt(schedule(seed, num_kills, STRUCK, most_held_seconds=held_seconds))
    say(f"  {run.num_steps} steps; moves: {dict(adviser.outcomes)} of {adviser.num_advised} advised")
    train(job, "undisturbed", *overrides, f"training.steps={run.num_steps}")
    one, other = (answers_of(folder / out) for out in ("undisturbed", "faults"))
    if one != other:
        others = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
        raise Disturbed(f"{len(others)} of {len(one)} samples are others, such as {min(others)}")
    say(f"  {len(one)} samples, equal to those of our own engine without faults")
    return run

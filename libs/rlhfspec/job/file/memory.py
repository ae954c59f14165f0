"""Lower bounds of the memory that a job needs on this machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from rlhfspec.job import RLHFJob
from rlhfspec.job.file.paths import resolve
from rlhfspec.job.file.problems import Finding

SAMPLE_BYTES = 1_100  # a prompt, its sample and its score, with one token each
ENGINE_BYTES = 16 << 20  # of an engine with a model of a few million parameters


def check_memory(job: RLHFJob, base: Path, *, available_bytes: int | None = None) -> Iterator[Finding]:
    """Yield findings if the job needs more than the free memory; with a GPU, models are not counted."""
    free = free_bytes() if available_bytes is None else available_bytes
    training = job.spec.training
    num_samples = training.prompts_per_step * job.spec.algorithm.samples_per_prompt * (1 + training.max_staleness)
    if num_samples * SAMPLE_BYTES > free:
        needs = f"{num_samples:,} samples are in flight at once and need at least {_gib(num_samples * SAMPLE_BYTES)}"
        yield Finding(
            field="spec.training.promptsPerStep", value=training.prompts_per_step,
            problem=f"{needs}; {_gib(free)} are free",
            depends_on=("spec.algorithm.samplesPerPrompt", "spec.training.maxStaleness"),
        )  # fmt: skip
    workers = job.spec.roles.generator.workers
    needed = workers * max(ENGINE_BYTES, _engine_bytes(job, base))
    if workers > 1 and needed > free and not Path("/dev/nvidiactl").exists():
        yield Finding(
            field="spec.roles.generator.workers", value=workers,
            problem=f"each holds its own model; together they need at least {_gib(needed)}, and {_gib(free)} are free",
            depends_on=("spec.model.path",),
        )  # fmt: skip


def _engine_bytes(job: RLHFJob, base: Path) -> int:
    folder = Path(resolve(job.spec.model.path, base))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    return size // 2 if job.spec.generation.dtype == "bfloat16" else size


def weights_bytes(job: RLHFJob, base: Path, *, num_versions: int) -> int:
    """Return the bytes of `num_versions` published versions of policy and critic, or 0 if unknown."""
    model = job.spec.model
    handed_out = [model.path, *([model.critic or model.path] if job.spec.algorithm.entry.has_critic else [])]
    size = sum(_num_parameters(Path(resolve(path, base))) for path in handed_out)
    return num_versions * size * (2 if model.dtype == "bfloat16" else 4)


def _num_parameters(folder: Path) -> int:
    """Count parameters by safetensors headers; other files count as float32."""
    if not folder.is_dir():
        return 0
    files = list(folder.glob("*.safetensors"))
    return sum(map(_num_numbers, files)) or sum(file.stat().st_size for file in folder.glob("*.bin")) // 4


def _num_numbers(file: Path) -> int:
    with file.open("rb") as opened:
        try:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError):  # the loader reports it
            return 0


def free_bytes() -> int:
    """Return the bytes that this process may still allocate, within its container."""
    meminfo = Path("/proc/meminfo")
    found = [1 << 62]
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) << 10)
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()).isdecimal():
        found.append(int(most) - int((group / "memory.current").read_text()))
    return min(found)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"

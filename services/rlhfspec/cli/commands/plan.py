from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfspec.cli.commands.job import Job, Set
from rlhfspec.cli.problems import exit_on_problems, refuse
from rlhfspec.job import RLHFJob, Spec
from rlhfspec.job.file import read_job
from rlhfspec.job.file.paths import named_models, with_resolved_paths
from rlhfspec.supervisor.gpus import deal

if TYPE_CHECKING:
    from rlhfspec.training.planning.needs import Needs
    from rlhfspec.training.planning.shape import ModelShape


def plan(
    job: Job,
    overrides: Set = None,
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="GB|NAME", help="Memory of a GPU: 80, or h100, h200, b200, a100, ...")
    ] = "h100",
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs of one machine.  [default: one per process]")
    ] = None,
) -> None:
    """Print placement and memory needs from model configurations alone; refuse what cannot fit."""
    from rlhfspec.huggingface.devices import settled
    from rlhfspec.training.planning.needs import BYTES, counts, memory_of, needs_of, sum_of, weights_seconds

    with exit_on_problems():
        read = with_resolved_paths(read_job(job, overrides or []), job.parent)
        size = memory_of(gpu_memory)
        spec = settled(read.spec, "cuda")
        shapes = _shapes(spec)
        needs = needs_of(spec, shapes, size, counts(read))
        too_full = list(_too_full(read, needs, gpus, size))
    policy = shapes["path"]
    typer.echo(f"{job}: on GPUs of {size / 1e9:.0f} GB")
    typer.echo(
        f"  model       {policy.kind}, {policy.num_parameters / 1e9:.1f} B parameters, {policy.num_layers} layers"
    )
    for each in needs:
        typer.echo(f"  {each.role:<11} {each.count} x {sum_of(each)}" + "".join(f"; {note}" for note in each.notes))
    version = policy.num_parameters * BYTES[spec.model.dtype]
    ways = ", ".join(f"{seconds:.0f} s by {way}" for way, seconds in weights_seconds(version))
    typer.echo(f"  weights     {version / 1e9:.1f} GB a version: {ways}")
    if too_full:
        refuse("\n".join([f"{job}: does not fit", *(f"  {line}" for line in too_full)]))


def _shapes(spec: Spec) -> dict[str, ModelShape]:
    from rlhfspec.training.planning.shape import shape_at

    return {
        name: shape_at(path, field=f"spec.model.{name}")
        for name, path in named_models(spec.model).items()
        if name != "tokenizer"
    }


def _too_full(job: RLHFJob, needs: list[Needs], gpus: int | None, size: int) -> list[str]:
    from rlhfspec.training.planning.needs import sum_of

    by_role = {each.role: each for each in needs}
    alone = [
        f"{each.role}: {sum_of(each)}, but may use only {each.fraction * size / 1e9:.0f} GB"
        for each in needs
        if each.total > each.fraction * size
    ]
    if alone or gpus is None:
        return alone
    on_gpu: dict[str, Counter[str]] = {}
    for (role, _), dealt in deal(job, [str(index) for index in range(gpus)]).items():
        for gpu in dealt if role in by_role else ():
            on_gpu.setdefault(gpu, Counter())[role] += 1
    found = []
    for gpu, roles in on_gpu.items():
        parts = [f"{count} x {role} {count * by_role[role].total / 1e9:.1f}" for role, count in roles.items()]
        total = sum(count * by_role[role].total for role, count in roles.items())
        if total > size:
            found.append(f"GPU {gpu}: {' + '.join(parts)} = {total / 1e9:.1f} GB")
    return found

"""Commands on job files. Usual jobs need no import of torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from rlhfspec.cli.problems import exit_on_problems, refuse
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job
from rlhfspec.job.file.remarks import remarks
from rlhfspec.job.file.schema import json_schema
from rlhfspec.job.file.template import DEFAULT_DATA, DEFAULT_MODEL, REWARD_MODULE, job_text
from rlhfspec.prepare.checks import check_as_run_does, check_engine, check_made_here, checked_rows

Job = Annotated[Path, typer.Argument(metavar="JOB", help="Job file: YAML or JSON.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field of spec, such as training.steps=3. Repeatable."),
]


def validate(
    job: Job,
    overrides: Set = None,
    prompts: Annotated[bool, typer.Option("--prompts", help="Also tokenize every prompt.")] = False,
) -> None:
    """Check a job and its data, and print a summary of the run."""
    with exit_on_problems():
        checked = read_job(job, overrides or [])
        check_made_here(checked, job)
        check_engine(checked)
        lines, columns = _data_lines(checked, prompts)
        check_as_run_does(checked, job.parent, columns)
        lines = [*_summary(checked), *lines]
    typer.echo(f"{job}: valid")
    for line in lines:
        typer.echo(f"  {line}")
    for remark in remarks(checked):
        typer.echo(f"  remark: {remark}")


def init(
    job: Job,
    model: Annotated[str, typer.Option(help="Folder or hub id of the policy.")] = DEFAULT_MODEL,
    data: Annotated[
        str, typer.Option(help="Dataset: .jsonl, .json, .csv or .parquet file, datasets folder, or hub id.")
    ] = DEFAULT_DATA,
    algorithm: Annotated[str, typer.Option(help=f"Algorithm: {', '.join(ALGORITHMS)}.")] = "grpo",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the job file if there is one.")] = False,
) -> None:
    """Write a commented job to start from, and rewards.py beside it if missing."""
    if algorithm not in ALGORITHMS:
        refuse(f"--algorithm: must be one of {', '.join(ALGORITHMS)} (got {algorithm!r})")
    if job.exists() and not force:
        refuse(f"{job}: already exists; use --force to overwrite it")
    if not job.parent.is_dir():
        refuse(f"{job}: the folder {job.parent} does not exist")
    name = re.sub(r"[^a-z0-9]+", "-", job.stem.lower()).strip("-")[:52].strip("-") or "my-run"
    rewards = job.parent / "rewards.py"
    try:
        job.write_text(job_text(name, model=model, data=data, algorithm=algorithm), encoding="utf-8")
        if not rewards.exists():
            rewards.write_text(REWARD_MODULE, encoding="utf-8")
    except OSError as error:
        refuse(f"{job}: cannot be written: {error.strerror}")
    typer.echo(f"wrote {job}; its reward is in {rewards}")
    typer.echo(f"next: rlhfspec validate {job}")


def schema(
    crd: Annotated[bool, typer.Option("--crd", help="Print the Kubernetes CustomResourceDefinition instead.")] = False,
) -> None:
    """Print the schema of a job: JSON Schema for editors, or the CustomResourceDefinition for `kubectl apply -f -`."""
    typer.echo(json.dumps(custom_resource_definition() if crd else json_schema(), indent=2))


def register(app: typer.Typer) -> None:
    for command in (validate, init, schema):
        app.command()(command)


def _summary(job: RLHFJob) -> list[str]:
    spec = job.spec
    algorithm, training = spec.algorithm, spec.training
    num_samples = training.prompts_per_step * algorithm.samples_per_prompt
    rewards = ", ".join(
        f"{source.weight:g} * {source.function if source.type == 'function' else source.type}"
        for source in spec.rewards.sources
    )
    return [
        f"model       {spec.model.path}" + (f", LoRA of rank {spec.model.lora.rank}" if spec.model.lora else ""),
        f"algorithm   {algorithm.name}, KL {algorithm.kl_coefficient:g} in the {algorithm.kl_placement}",
        f"step        {training.prompts_per_step} prompts x {algorithm.samples_per_prompt} = {num_samples} samples of "
        f"at most {spec.generation.max_tokens} tokens, speculation {spec.generation.speculation.mode}",
        f"training    {training.steps} steps, {training.optimizer.name} at {training.optimizer.learning_rate:g}, "
        f"seed {training.seed}",
        f"rewards     {rewards}",
    ]


def _data_lines(job: RLHFJob, with_tokenizer: bool) -> tuple[list[str], dict[str, str] | None]:
    from rlhfspec.training.data import Order, Prompts, load_tokenizer
    from rlhfspec.training.data.columns import columns_of_rows

    dataset, spec = job.spec.dataset, job.spec
    rows = checked_rows(job)
    if rows is None:
        return [f"data        {dataset.path} (not read: a job fetches or generates it when it starts)"], None
    lines = [f"data        {dataset.path}, {len(rows)} rows"]
    num_prompts, columns = len(rows), columns_of_rows(rows, dataset, range(len(rows)))
    if with_tokenizer:
        prompts = Prompts(rows, load_tokenizer(spec.model), dataset, spec.training.seed, spec.training.prompts_per_step)
        num_prompts, columns = len(prompts), prompts.columns
        lengths = [len(prompts[index].token_ids) for index in range(num_prompts)]
        part = f", {prompts.num_too_long / len(rows):.0%} of all (dataset.maxPromptTokens)"
        share = part if prompts.num_too_long else ""
        lines.append(
            f"prompts     {num_prompts} of {min(lengths)} to {max(lengths)} tokens, "
            f"{prompts.num_too_long} too long{share}"
        )
    order = Order(num_rows=num_prompts, prompts_per_step=spec.training.prompts_per_step, seed=0, epochs=dataset.epochs)
    last = order.last_step
    if last is not None and last < spec.training.steps:
        lines.append(f"remark: the data ends after step {last} of {spec.training.steps} (dataset.epochs)")
    return lines, columns

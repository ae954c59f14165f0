"""`rlhfspec bench`: benchmarks of generation, training steps, moves and serving."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfspec.bench.commands import drain, moving, serve
from rlhfspec.bench.commands.options import Draft, JsonFile, Model, Pair, checked, chosen, models, names, numbers, show
from rlhfspec.cli.progress import StatusLine, wide_console

if TYPE_CHECKING:
    from rlhfspec.bench.generating.results import Results

_MODES_HELP = (
    "Modes: plain,adaptive,static,static:NAME,hf,vllm-plain,vllm-draft,vllm-ngram,engine:vllm.  [default: all but it]"
)
app = typer.Typer(
    help="Benchmarks of generation, training steps, moves and serving.", no_args_is_help=True, add_completion=False
)
app.command()(drain.drain)
app.command()(moving.rebalance)
app.command()(moving.migrate)
app.command()(serve.serve)

# At most three minutes for both pairs: few strategies, three batches and the long tail, one thread count.
QUICK: dict[str, Any] = {
    "modes": ("plain", "adaptive", "static:model-d2", "static:model-d4", "static:model-d8", "static:suffix-d4", "hf",
              "vllm-plain", "vllm-draft", "vllm-ngram"),
    "scenarios": ("batch-1", "batch-8", "batch-32", "long-tail"),
    "threads": (2,),
    "repeats": 5,
    "num_tokens": 64,
    "budget_seconds": 140.0,  # of all pairs together
}  # fmt: skip
# A small step, for a rough comparison.
QUICK_STEP: dict[str, Any] = {"num_tokens": 128, "steps": 2, "repeats": 1}
# Long prompts with short answers, as in summaries or judging: nearly all tokens are of shared prompts.
LONG_PROMPTS: dict[str, Any] = {"num_prompt_tokens": 768, "samples_per_prompt": 16, "num_tokens": 48}


@app.command()
def generate(
    model: Model = None,
    draft: Draft = None,
    pairs: Annotated[
        str,
        typer.Option(help="Models: english, library (real text), smollm2 (a pretrained model, chats), smollm2-sums."),
    ] = "english,library",
    quick: Annotated[bool, typer.Option("--quick", help="Run a smaller grid, in at most three minutes.")] = False,
    threads: Annotated[str | None, typer.Option(help="Thread counts, such as 1,2 (the default).")] = None,
    modes: Annotated[str | None, typer.Option(help=_MODES_HELP)] = None,
    scenarios: Annotated[
        str | None, typer.Option(help="Workloads: batch-1, batch-4, batch-8, batch-16, batch-32, batch-64, long-tail.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of interleaved repetitions.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, max=512, help="Response length in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampling.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device of our engine, such as cuda; the others run on the CPU.")] = "cpu",
    vllm_python: Annotated[
        str | None, typer.Option(help="Python interpreter of an environment with vLLM.", envvar="RLHFSPEC_VLLM_PYTHON")
    ] = None,
    vllm_draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted per step in vllm-draft.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all measurements to this JSON file, by pair of models.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Plot the result to this PNG, one for each pair of models.")
    ] = None,
) -> None:
    """Compare plain, static strategies, adaptive, Hugging Face and vLLM: same model, prompts and seeds, one run."""
    given = chosen(
        QUICK if quick else {},
        threads=numbers("--threads", threads),
        modes=names(modes),
        scenarios=names(scenarios),
        repeats=repeats,
        num_tokens=tokens,
    )
    given |= {"temperature": temperature, "dtype": dtype, "device": device}
    given |= {"vllm_python": vllm_python, "vllm_draft_tokens": vllm_draft_tokens}
    wanted = [_checked_pair(name) for name in pairs.split(",")] if model is None else ["english"]
    if "budget_seconds" in given:
        given["budget_seconds"] /= len(wanted)
    with StatusLine() as status:
        results = {pair: _generated(pair, model, draft, given, status) for pair in wanted}
    _show(results, json_file, plot_file)


def _generated(pair: str, model: str | None, draft: str | None, given: dict[str, Any], status: StatusLine) -> Results:
    from rlhfspec.bench.generating.run import Benchmark, BenchSettings

    target_path, draft_path = models(model, draft, status, pair=pair)
    settings = checked(BenchSettings, target=target_path, draft=draft_path, pair=pair, **given)
    results: Results = checked(Benchmark(settings, report=status).run)
    return results


def _show(results: dict[str, Results], json_file: Path | None, plot_file: Path | None) -> None:
    from rlhfspec.bench.generating.plot import plot
    from rlhfspec.bench.generating.report import show
    from rlhfspec.bench.generating.results import to_json

    for pair, found in results.items():
        show(found, wide_console())
        if plot_file is not None:
            path = plot_file if len(results) == 1 else plot_file.with_stem(f"{plot_file.stem}-{pair}")
            plot(found, path)
            typer.echo(f"plot: {path}")
    if json_file is not None:
        json_file.write_text(to_json(results))


@app.command()
def step(
    model: Model = None,
    draft: Draft = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use a small model and few tokens; done in minutes.")] = False,
    long_prompts: Annotated[
        bool, typer.Option("--long-prompts", help="Generate 16 responses of 48 tokens to each prompt of 768.")
    ] = False,
    algorithm: Annotated[str, typer.Option(help="Algorithm: grpo, or ppo (which TRL 1.16 does not train).")] = "grpo",
    modes: Annotated[str, typer.Option(help="Modes to compare, from trl, plain, adaptive.")] = "trl,plain,adaptive",
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts in a step.")] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Number of samples per prompt.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, max=512, help="Response length in tokens.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of measured steps in a repetition.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of interleaved repetitions of every mode.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for mixed precision on both sides.")] = "float32",
    lora: Annotated[int | None, typer.Option(min=1, help="Rank of the LoRA update; all weights without it.")] = None,
    trl_python: Annotated[
        str | None, typer.Option(help="Python interpreter of an environment with TRL.", envvar="RLHFSPEC_TRL_PYTHON")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare a whole step, plain and adaptive, with TRL's: same model, prompts, lengths and threads, one run."""
    from rlhfspec.bench.stepping.report import render
    from rlhfspec.bench.stepping.results import UnequalWork
    from rlhfspec.bench.stepping.step import StepBenchmark, StepSettings

    given = chosen(
        (QUICK_STEP if quick else {}) | (LONG_PROMPTS if long_prompts else {}),
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        num_tokens=tokens,
        steps=steps,
        repeats=repeats,
    )
    with StatusLine() as status:
        target_path, draft_path = models(model, draft, status, tiny_target="target" if quick else "wide")
        settings = checked(
            StepSettings,
            model=target_path,
            draft=draft_path,
            modes=tuple(modes.split(",")),
            trl_python=trl_python,
            algorithm=algorithm,
            num_threads=threads,
            dtype=dtype,
            lora_rank=lora,
            **given,
        )
        try:
            results = checked(StepBenchmark(settings, report=status).run)
        except UnequalWork as difference:
            typer.echo(str(difference), err=True)
            raise typer.Exit(1) from difference
    show(results, render, json_file)


@app.command()
def explain(
    model: Model = None,
    draft: Draft = None,
    pair: Pair = "english",
    batch: Annotated[int, typer.Option(min=1, max=64, help="Number of sequences generated together.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="Response length in tokens.")] = 64,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
    decisions: Annotated[int, typer.Option(min=1, help="Number of last decisions to show.")] = 12,
) -> None:
    """Show how the strategy was chosen: predicted and real seconds and acceptance of the last steps, and every plan."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from rlhfspec.bench.generating.explain import observe, render
    from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, batch_scenario
    from rlhfspec.engine import Engine

    with StatusLine() as status:
        target_path, draft_path = models(model, draft, status, pair=pair)
        status("measuring the cost tables")
        engine = Engine.from_pretrained(
            target_path, drafter=draft_path, dtype=dtype, num_threads=threads, max_context=MAX_CONTEXT
        )
        status("generating")
        observed = observe(engine, batch_scenario(batch, tokens, pair))
    wide_console().print(render(*observed, num_decisions=decisions))


@app.command()
def trees(
    model: Model = None,
    draft: Draft = None,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Number of sequences generated together.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="Response length in tokens.")] = 256,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Count tokens per verification: chains for each sequence against trees under one budget for the batch."""
    from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, batch_scenario
    from rlhfspec.bench.trees import TREE_SLOTS, render, tree_gains
    from rlhfspec.engine import Engine

    with StatusLine() as status:
        target_path, draft_path = models(model, draft, status, tiny_target="target")
        status("generating")
        engine = Engine.from_pretrained(
            target_path, drafter=draft_path, dtype=dtype, max_context=MAX_CONTEXT, tree_slots=TREE_SLOTS, profile=False
        )
        gains = tree_gains(engine, batch_scenario(batch, tokens))
    wide_console().print(render(gains))


def _checked_pair(name: str) -> str:
    from rlhfspec.bench.generating.scenarios import PAIRS

    if name not in PAIRS:
        raise typer.BadParameter(f"--pairs: must be among {', '.join(PAIRS)} (got {name!r})")
    return name

"""`rlhfspec simulate JOB`: a simulated stage of many generators, under each policy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rlhfspec.bench.commands.simulate_fusion import simulate_fusion
from rlhfspec.bench.commands.simulate_serving import simulate_serving
from rlhfspec.cli.commands.job import Set
from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.job import RLHFJob
    from rlhfspec.simulator.calibrate import Calibration, Ran
    from rlhfspec.simulator.lengths import Workload
    from rlhfspec.simulator.scenario import Kill, Scenario, StageOutcome
    from rlhfspec.simulator.trials import PolicyTrial

Generators = Annotated[
    int | None, typer.Option(min=1, max=100_000, help="Number of generators.  [default: the job's, at least 2]")
]
PerGenerator = Annotated[
    int | None,
    typer.Option(min=1, help="Number of sequences per generator.  [default: the samples of the job's step, divided]"),
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds, from 1 on; each draws other lengths.")]
Lengths = Annotated[
    str, typer.Option(help="How lengths are drawn: independent, groups, skew or adversarial (docs/moving.md).")
]
Median = Annotated[float, typer.Option(min=1, help="Median of the lognormal lengths, in tokens.")]
Sigma = Annotated[float, typer.Option(min=0, help="Standard deviation of the logarithm of the lengths.")]
Curve = Annotated[
    str, typer.Option(help="Step times: plain, adaptive, t0=32c, t0=2.5c, memory-bound, or T0,C in milliseconds.")
]
Prefill = Annotated[float, typer.Option(min=0, help="Prefill time of a prompt token, in milliseconds.")]
Rows = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of sequences that a generator runs at a time.  [default: the job's]"),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Policy: none, threshold, knee, counts, ours or ours-knowing; with pull+ in front, generators pull "
        "prompts instead of getting them dealt. Repeatable.  "
        "[default: all]",
    ),
]
PerHost = Annotated[int, typer.Option(min=1, help="Number of generators that share the memory bandwidth of a host.")]
PauseMs = Annotated[float, typer.Option("--pause", min=0, help="Time that a moved sequence pauses, in milliseconds.")]
Kills = Annotated[
    list[str] | None,
    typer.Option(
        "--kill",
        metavar="GENERATOR@SECONDS[+SECONDS]",
        help="Kill this generator at this time, and restart it so much later.",
    ),
]
Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="GENERATOR:TIMES", help="Make the steps of this generator so many times slower."),
]
Calibrate = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Take step times, prefill and lengths from a run folder with traces.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "--plot", metavar="DIR", help="Also plot to DIR: simulated.png, fused.png or served.png."),
]
MaybeJob = Annotated[
    Path | None,
    typer.Argument(metavar="[JOB]", help="Job file; not needed with --fuse or --serve.", show_default=False),
]
Fuse = Annotated[
    str | None,
    typer.Option(
        metavar="STAGESxMICROBATCHES[xCRITIC]",
        help="Simulate actor and critic trained interleaved on one pipeline; the critic is CRITIC times as large.",
    ),
]
Serve = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN|FILE",
        help="Simulate requests that may move, unlike those of clients, to generators that prefill and decode together "
        "or apart, by the costs and lengths that a run learnt (its costs.json).",
    ),
]
FirstMs = Annotated[
    float, typer.Option("--ttft", min=0, help="With --serve: target of the first token, in milliseconds.")
]
TokenMs = Annotated[float, typer.Option("--tpot", min=0, help="With --serve: target per later token, in milliseconds.")]

app = typer.Typer(add_completion=False)
_ALL = ("none", "threshold", "knee", "counts", "ours", "pull+none", "pull+ours", "ours-knowing")


@app.command()
def simulate(
    job: MaybeJob = None,
    generators: Generators = None,
    per_generator: PerGenerator = None,
    seeds: Seeds = 3,
    lengths: Lengths = "groups",
    median: Median = 128.0,
    sigma: Sigma = 1.0,
    curve: Curve = "adaptive",
    prefill: Prefill = 0.5,
    rows: Rows = None,
    policy: Policies = None,
    per_host: PerHost = 1,
    pause: PauseMs = 5.0,
    kill: Kills = None,
    slow: Slow = None,
    calibrate: Calibrate = None,
    overrides: Set = None,
    as_json: AsJson = False,
    out: Out = None,
    fuse: Fuse = None,
    serve: Serve = None,
    ttft: FirstMs = 500.0,
    tpot: TokenMs = 50.0,
) -> None:
    """Simulate the generation stage of a job: when each policy would finish it, compared with the optimum."""
    with exit_on_problems():
        if fuse is not None:
            simulate_fusion(fuse, as_json=as_json, out=out)
            return
        if serve is not None:
            simulate_serving(serve, (ttft, tpot), generators or 2, rows or 256, seeds, as_json=as_json, out=out)
            return
        if job is None:
            raise InvalidRequest(
                "JOB", None, "must be given: a stage of a job is simulated (or give --fuse or --serve)"
            )
        from rlhfspec.job.file import read_job
        from rlhfspec.simulator.step_curves import curve_named

        read = read_job(job, overrides or [])
        plan = _planned(read, generators, per_generator, seeds, policy or _ALL)
        scenario = _scenario(read, plan.num_generators, curve_named(curve), prefill, rows)
        scenario = replace(
            scenario,
            engines_per_host=per_host,
            pause_seconds=pause / 1e3,
            kills=tuple(_kill(text, plan.num_generators) for text in kill or []),
            slowness=tuple(_slow(text, plan.num_generators) for text in slow or []),
        )
        makes, calibration = _lengths_of(read, plan, lengths, median, sigma), None
        if calibrate is not None:
            samples = _samples(calibrate)
            calibration = _calibration(samples)
            scenario = replace(scenario, curve=calibration.curve, prefill_seconds=calibration.prefill_seconds)
            makes = _lengths_of_run(samples, plan)
        found = _trials(scenario, makes, plan, out)
    _print(scenario, plan, lengths if calibrate is None else str(calibrate), found, calibration, as_json)
    if out is not None and not as_json:
        typer.echo(f"picture: {out / 'simulated.png'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    num_generators: int
    per_generator: int
    seeds: range
    policies: tuple[str, ...]


def _planned(
    job: RLHFJob, generators: int | None, per_generator: int | None, seeds: int, policies: Sequence[str]
) -> _Plan:
    from rlhfspec.simulator.policies import policy_known

    for name in policies:
        policy_known(name.removeprefix("pull+"))
    count = generators or max(job.spec.roles.generator.workers, 2)
    step = job.spec.training.prompts_per_step * job.spec.algorithm.samples_per_prompt
    return _Plan(
        num_generators=count,
        per_generator=per_generator or max(step // count, 1),
        seeds=range(1, seeds + 1),
        policies=tuple(policies),
    )


def _scenario(job: RLHFJob, count: int, curve: Any, prefill_ms: float, rows: int | None) -> Scenario:
    from rlhfspec.simulator.scenario import Scenario

    generator = job.spec.roles.generator.model_copy(update={"workers": count})
    spec = job.spec.model_copy(update={"roles": job.spec.roles.model_copy(update={"generator": generator})})
    return Scenario(
        num_generators=count,
        curve=curve,
        rows=rows or job.spec.generation.max_sequences,
        prefetch=spec.prefetch,
        piece=spec.pulled_at_a_time,
        prefill_seconds=prefill_ms / 1e3,
        plan_seconds=job.spec.rebalance.interval_seconds,
    )


def _lengths_of(job: RLHFJob, plan: _Plan, kind: str, median: float, sigma: float) -> Callable[[int], Workload]:
    from rlhfspec.simulator.lengths import LengthShape, workload

    shape = LengthShape(
        median=median,
        sigma=sigma,
        limit=job.spec.generation.max_tokens,
        samples_per_prompt=job.spec.algorithm.samples_per_prompt,
    )
    return lambda seed: workload(
        kind, num_generators=plan.num_generators, per_generator=plan.per_generator, seed=seed, shape=shape
    )


def _lengths_of_run(samples: list[Ran], plan: _Plan) -> Callable[[int], Workload]:
    from rlhfspec.simulator.calibrate import workload_of

    return lambda seed: workload_of(samples, num_generators=plan.num_generators, seed=seed)


def _calibration(samples: list[Ran]) -> Calibration:
    from rlhfspec.simulator.calibrate import calibrate

    return calibrate(samples)


def _samples(run: Path) -> list[Ran]:
    """Return one entry per sample and generator that generated a part of it.

    Times come from traces. A prompt's words are counted instead of its tokens, which a run's folder does not record;
    a generator that continues a sample has no prompt to prefill.
    """
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.simulator.calibrate import Ran
    from rlhfspec.telemetry.folder import read_spans
    from rlhfspec.telemetry.read import lives

    if not (run / "samples.jsonl").is_file():
        raise InvalidRequest("--calibrate", str(run), "is no run's folder: it has no samples.jsonl")
    words = {row["id"]: len(row["prompt"].split()) for row in RunFolder(run).samples()}
    return [
        Ran(
            sample=life.sample,
            generator=str(span.attributes.get("generator", span.worker)),
            prompt=life.sample.rpartition("/")[0],
            step=span.step,
            began=span.began,
            ended=span.ended,
            num_tokens=int(span.attributes.get("tokens", 0)),
            prompt_tokens=words[life.sample] if span.stay == 1 else 0,
        )
        for life in lives(read_spans(run, containing='"generation"'))
        for span in life.stays
        if life.sample in words and not life.is_in_vain(span)
    ]


def _kill(text: str, count: int) -> Kill:
    """Parse `GENERATOR@SECONDS[+SECONDS]`: when it dies and, optionally, how long it stays dead.

    >>> _kill("3@2.5+10", 8)
    Kill(generator=3, at_seconds=2.5, back_after_seconds=10.0)
    """
    from rlhfspec.simulator.scenario import Kill

    matched = re.fullmatch(r"(\d+)@(\d+\.?\d*)(?:\+(\d+\.?\d*))?", text)
    if matched is None or int(matched[1]) >= count:
        raise InvalidRequest("--kill", text, f"must be GENERATOR@SECONDS[+SECONDS], a generator of 0 to {count - 1}")
    back = float(matched[3]) if matched[3] else None
    return Kill(generator=int(matched[1]), at_seconds=float(matched[2]), back_after_seconds=back)


def _slow(text: str, count: int) -> tuple[int, float]:
    """Parse `GENERATOR:TIMES`, a generator and how many times as long its steps take.

    >>> _slow("0:1.5", 2)
    (0, 1.5)
    """
    matched = re.fullmatch(r"(\d+):(\d+\.?\d*)", text)
    if matched is None or int(matched[1]) >= count or not 0 < float(matched[2]) <= 1000:
        raise InvalidRequest("--slow", text, f"must be GENERATOR:TIMES, of 0 to {count - 1}, up to 1000 times")
    return int(matched[1]), float(matched[2])


def _trials(scenario: Scenario, makes: Callable[[int], Workload], plan: _Plan, out: Path | None) -> list[PolicyTrial]:
    from rlhfspec.simulator.trials import trials

    outcomes: dict[str, StageOutcome] = {}

    def keep(policy: str, seed: int, outcome: StageOutcome, work: Workload) -> None:
        if seed == plan.seeds[0]:
            outcomes[policy] = outcome

    found = trials(
        scenario, makes, policies=plan.policies, seeds=plan.seeds, on_outcome=keep if out is not None else None
    )
    if out is not None:
        from rlhfspec.simulator.simulated_plot import draw

        title = f"simulated: {scenario.num_generators} generators, curve {scenario.curve.name}, seed {plan.seeds[0]}"
        draw(outcomes, makes(plan.seeds[0]), scenario.num_generators, out / "simulated.png", title=title)
    return found


def _print(
    scenario: Scenario,
    plan: _Plan,
    lengths: str,
    found: list[PolicyTrial],
    calibration: Calibration | None,
    as_json: bool,
) -> None:
    fitted = None
    if calibration is not None:
        fitted = {
            "step_seconds": calibration.step_seconds,
            "sequence_seconds": calibration.sequence_seconds,
            "prefill_seconds": calibration.prefill_seconds,
            "median_error": calibration.error,
            "samples": calibration.num_samples,
        }
    if as_json:
        content = {
            "simulated": True,
            "generators": scenario.num_generators,
            "sequences_a_generator": plan.per_generator,
            "curve": scenario.curve.name,
            "lengths": lengths,
            "seeds": list(plan.seeds),
            "calibration": fitted,
            "trials": [trial.content() for trial in found],
        }
        typer.echo(json.dumps(content, indent=2))
        return
    console = wide_console()
    if calibration is not None:
        console.print(
            f"from {calibration.num_samples} samples: a step of B takes {calibration.step_seconds * 1e3:.3g} + "
            f"{calibration.sequence_seconds * 1e3:.3g} B ms, a word {calibration.prefill_seconds * 1e3:.3g} ms "
            f"(off by {calibration.error:.0%}, median)",
            highlight=False,
        )
    console.print(_table(scenario, plan, lengths, found))


def _table(scenario: Scenario, plan: _Plan, lengths: str, found: list[PolicyTrial]) -> Table:
    title = (
        f"simulated: {scenario.num_generators} generators, curve {scenario.curve.name}, lengths {lengths}, "
        f"{len(plan.seeds)} seeds"
    )
    table = Table(title=title)
    table.add_column("policy")
    for name in (
        "seconds",
        "/ clairvoyant",
        "/ ideal sharing",
        "tokens/s",
        "moves a sequence",
        "most of one",
        "swings",
    ):
        table.add_column(name, justify="right")
    for trial in found:
        content = trial.content()
        ratios = (content["of_clairvoyant"], content["of_ideal_sharing"])
        table.add_row(
            trial.policy,
            f"{trial.mean_seconds:.2f}",
            *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
            f"{trial.tokens_per_second:.0f}",
            f"{trial.moves_per_sequence:.3f}",
            str(trial.most_moves),
            str(trial.num_swings),
        )
    return table

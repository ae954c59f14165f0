"""Summary of a run: results, costs, example responses and paths."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any, TypeVar

from rich.console import Console

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records.evaluations import Evaluation, best
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.folder.manifest import RunManifest, RunOutcome
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.learning_signs import warning_of
from rlhfspec.runs.view.plots import STAGE_COLOURS, ends, num_of_ends, overview
from rlhfspec.runs.view.text import duration, estimates, number, signed, visible
from rlhfspec.runs.view.view import print_line

_SAID: dict[RunOutcome, str] = {
    "running": "not finished", "completed": "completed", "stopped": "stopped", "failed": "failed",
}  # fmt: skip
_MAX_SHOWN_CHARACTERS = 4000
_MOST_OF_A_PROMPT = 200  # its end, as prompts often begin alike
Row = tuple[str, str]
_OF_IMPORTANCE = ("importance_weight", "importance_capped_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseText:
    prompt: str
    text: str
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    manifest: RunManifest
    steps: Sequence[StepMetrics]
    places: Sequence[Row]
    evaluations: Sequence[Evaluation] = ()
    texts: Sequence[tuple[str, Sequence[ResponseText]]] = ()  # (title, responses)

    @property
    def title(self) -> str:
        reason = f": {self.manifest.reason}" if self.manifest.reason else ""
        count = f"{self.manifest.num_steps} step{'' if self.manifest.num_steps == 1 else 's'}"
        return f"{self.manifest.job}: {_SAID[self.manifest.outcome]} after {count}{reason}"

    def markdown(self) -> str:
        lines = [f"# {visible(' '.join(self.title.split()))}", ""]
        if self.steps:
            lines += ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in self._facts()), ""]
            lines += ["| stage | seconds | share of wall time |", "|---|---:|---:|"]
            lines += [f"| {name} | {seconds:.1f} | {share:.0%} |" for name, seconds, share in by_stage(self.steps)]
            lines += [""]
        lines += self._responses_in_markdown()
        lines += ["## Where it is", "", *(f"- {label}: `{visible(value)}`" for label, value in self.places)]
        return "\n".join(lines) + "\n"

    def print(self, console: Console) -> None:
        print_line(console, "")
        print_line(console, self.title)
        for label, value in self._facts():
            print_line(console, f"  {label:<20} {value}")
        for name, seconds, share in by_stage(self.steps):
            print_line(console, f"  {name:<12} {duration(seconds):>7} {share:>5.0%}")
        for line in self._responses_in_text():
            print_line(console, line)
        for label, value in self.places:
            print_line(console, f"  {label:<20} {value}")

    def _facts(self) -> list[Row]:
        rows = facts(self.steps, self.evaluations) if self.steps else []
        for resumption in self.manifest.resumed:
            for path, (old, new) in resumption.changed.items():
                rows.append(("changed", f"{path} from {old} to {new} after step {resumption.step}"))
        return [*rows, ("exported policy", self.manifest.exported)] if self.manifest.exported else rows

    def _responses_in_markdown(self) -> Iterator[str]:
        for title, responses in self.texts:
            yield from (f"## {title[0].upper()}{title[1:]}", "")
            for response in responses:
                prompt = _fenced(_end(response.prompt))
                yield f"Reward {number(response.reward)}\n\n{prompt}\n\n{_fenced(response.text)}\n"

    def _responses_in_text(self) -> Iterator[str]:
        for title, responses in self.texts:
            yield f"\n  {title}"
            for response in responses:
                yield f"  reward {number(response.reward)}"
                yield from (f"    | {line}" for line in _short(f"{_end(response.prompt)}{response.text}").splitlines())
        yield ""


def finish_folder(folder: RunFolder, job: RLHFJob, outcome: RunOutcome, reason: str, *, resume_command: str) -> Summary:
    """Write the run's final files (with plots if matplotlib is installed), and return the summary."""
    folder.finish(outcome, reason)
    steps = folder.steps()
    if steps and find_spec("matplotlib") is not None:
        name, evaluations = job.metadata.name, folder.evaluations()
        overview(steps, folder.plots / "training.png", title=name, evaluations=evaluations)
    return summarize(folder, resume_command=resume_command, num_texts=job.spec.observability.sample_texts)


def kept_traceback(folder: RunFolder, error: BaseException) -> str:
    failure = folder.path / "failure.txt"
    try:
        failure.write_text("".join(traceback.format_exception(error)))
    except OSError as full:
        return f"{failure} cannot be written: {full.strerror}"
    return f"the full traceback is in {failure}"


def summarize(folder: RunFolder, *, resume_command: str, num_texts: int = 0) -> Summary:
    """Write and return the run's summary, with `num_texts` responses each from its start and its end."""
    places = [("run folder", str(folder.path))]
    for label, path in (("pictures", folder.plots), ("policy", folder.export), ("checkpoints", folder.checkpoints)):
        if path.is_dir() and any(path.iterdir()):
            places.append((label, str(path)))
    evaluations = folder.evaluations()
    if evaluations and (checkpoint := folder.checkpoint(best(evaluations).step)).is_dir():
        places.append(("best checkpoint", str(checkpoint)))
    manifest = folder.manifest()
    steps_kept = folder.checkpoint_steps()
    if steps_kept:
        size = sum(path.stat().st_size for path in folder.checkpoints.rglob("*") if path.is_file())
        places.append(("checkpoints take", f"{size / 1e6:,.1f} MB, for steps {', '.join(map(str, steps_kept))}"))
    going_on = "train longer" if manifest.outcome == "completed" else "go on"
    places.append((going_on, resume_command))
    steps = folder.steps()
    summary = Summary(
        manifest=manifest,
        steps=steps,
        places=places,
        evaluations=evaluations,
        texts=_texts(folder, steps, evaluations, num_texts) if num_texts else (),
    )
    folder.write_summary(summary.markdown())
    return summary


Texts = list[tuple[str, list[ResponseText]]]


def _texts(folder: RunFolder, steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], count: int) -> Texts:
    """Return `count` responses, under a title, of the first and of the last evaluation, or else step."""
    if evaluations:
        found = [(f"held-out prompts, after step {run.step}", run.step) for run in _ends(evaluations)]
        return [(title, _responses(folder.evaluation_samples(), step, count)) for title, step in found]
    found = [(f"prompts and responses of step {metrics.step}", metrics.step) for metrics in _ends(steps)]
    return [(title, _responses(folder.samples(), step, count)) for title, step in found]


T = TypeVar("T")


def _ends(things: Sequence[T]) -> Sequence[T]:
    return [*things[:1], *things[1:][-1:]]


def _responses(lines: Iterator[dict[str, Any]], step: int, count: int) -> list[ResponseText]:
    wanted = (line for line in lines if line["step"] == step and line["id"].endswith("/0"))
    return [
        ResponseText(prompt=line["prompt"], text=line["text"], reward=line["reward"]) for line in islice(wanted, count)
    ]


def facts(steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation] = ()) -> list[Row]:
    first, last = ends(steps)
    few = num_of_ends(steps)
    ends_of = "step" if few == 1 else f"{few} steps"
    rows = [
        (
            "reward",
            f"{number(first)} -> {number(last)} ({signed(last - first)}), mean of the first and of the last {ends_of}",
        )
    ]
    if evaluations:
        rows.append(("held-out reward", _held_out(evaluations)))
    rows += _by_column(evaluations or steps)
    kls = [metrics.kl for metrics in steps if metrics.kl is not None]
    if kls:
        most = max(kl["k3"] for kl in kls)
        rows.append(("KL to the reference", f"{estimates(kls[-1])} at the end, k3 {number(most)} at most"))
    lengths = [metrics.response_length.mean for metrics in steps]
    tokens = sum(metrics.num_response_tokens for metrics in steps)
    generation = sum(metrics.seconds.generation for metrics in steps)
    rows.append(("response length", f"{number(lengths[0])} -> {number(lengths[-1])} tokens"))
    rows.append(("generated", f"{tokens:,} tokens, {number(tokens / generation if generation else None)} a second"))
    if (accepted := _mean_accepted(steps)) is not None:
        rows.append(("accepted", f"{number(accepted)} drafted tokens per verification"))
    worst = max(metrics.log_prob_difference.max for metrics in steps)
    mean = sum(metrics.log_prob_difference.mean for metrics in steps) / len(steps)
    difference = f"generator/trainer log-prob difference max {number(worst)}, mean {number(mean)}"
    rows.append(("log-probs", f"{difference}{_correction(steps)}"))
    passed = sum(metrics.seconds.step for metrics in steps)
    rows.append(("time", f"{duration(passed)}, {duration(passed / len(steps))} a step"))
    if warning := warning_of(steps, evaluations):
        rows.append(("warning", warning))
    return rows


def _correction(steps: Sequence[StepMetrics]) -> str:
    """Return the mean weight and capped share of importance sampling as text, or "" if it is off."""
    found = [metrics.learning for metrics in steps if "importance_weight" in metrics.learning]
    if not found:
        return ""
    weight, capped = (sum(each[name] for each in found) / len(found) for name in _OF_IMPORTANCE)
    return f"; corrected by importance weights, mean {number(weight)}, {capped:.1%} of them capped"


def _by_column(lines: Sequence[StepMetrics] | Sequence[Evaluation]) -> list[Row]:
    """Return a row with first and last mean reward and number of samples for each column value."""
    rows = []
    for value in sorted({value for line in lines for value in line.reward_by_column}):
        rewards = [line.reward_by_column[value] for line in lines if value in line.reward_by_column]
        num = sum(line.num_by_column.get(value, 0.0) for line in lines)
        said = f"{number(rewards[0])} -> {number(rewards[-1])}, {num:.0f} samples"
        rows.append((f"reward, {' '.join(visible(value).split())[:40]}", said))
    return rows


def _held_out(evaluations: Sequence[Evaluation]) -> str:
    first, last, top = evaluations[0], evaluations[-1], best(evaluations)
    change = f"{number(first.reward.mean)} -> {number(last.reward.mean)}" if len(evaluations) > 1 else ""
    return f"{change}{', ' if change else ''}best {number(top.reward.mean)} after step {top.step}"


def by_stage(steps: Sequence[StepMetrics]) -> list[tuple[str, float, float]]:
    """Return (stage, seconds, share of wall time) of every active stage; stages may overlap."""
    passed = sum(metrics.seconds.step for metrics in steps)
    totals = {name: sum(float(getattr(metrics.seconds, name)) for metrics in steps) for name in STAGE_COLOURS}
    return [(name, total, total / passed if passed else 0.0) for name, total in totals.items() if total]


def _mean_accepted(steps: Sequence[StepMetrics]) -> float | None:
    found = [m.accepted_per_verification for m in steps if m.accepted_per_verification is not None]
    return sum(found) / len(found) if found else None


def _end(prompt: str) -> str:
    return prompt if len(prompt) <= _MOST_OF_A_PROMPT else f"... {prompt[-_MOST_OF_A_PROMPT:]}"


def _short(text: str) -> str:
    safe = visible(text).strip("\n")
    return safe if len(safe) <= _MAX_SHOWN_CHARACTERS else safe[:_MAX_SHOWN_CHARACTERS] + " ..."


def _fenced(text: str) -> str:
    safe = _short(text)
    longest = max(map(len, re.findall("`+", safe)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{safe}\n{fence}"

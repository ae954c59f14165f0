"""The end of a run, for a person: what came out, what it cost, what the policy says now, and where everything is.

Example:
    >>> from rlhfspec.telemetry.metrics import example_step
    >>> steps = [example_step(step=step, reward=step / 4) for step in (1, 2, 3)]
    >>> for row in facts(steps)[:2]:
    ...     print(*row, sep=": ")
    reward: 0.250 -> 0.750 (+0.500), mean of the first and of the last step
    KL to the reference: 0.00300 at the end, 0.00300 at most
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from rlhfspec.telemetry.manifest import Manifest, Outcome
from rlhfspec.telemetry.metrics import StepMetrics
from rlhfspec.telemetry.plots import STAGE_COLOURS, ends, num_of_ends
from rlhfspec.telemetry.run_folder import RunFolder
from rlhfspec.telemetry.text import duration, number, signed, visible
from rlhfspec.telemetry.view import print_line

_SAID: dict[Outcome, str] = {
    "running": "not finished", "completed": "completed", "stopped": "stopped", "failed": "failed",
}  # fmt: skip
_MOST_CHARACTERS = 600
Row = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseText:
    prompt: str
    text: str
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`before` and `after` are responses to the same prompts, in the same order; both may be empty."""

    manifest: Manifest
    steps: Sequence[StepMetrics]
    places: Sequence[Row]
    before: Sequence[ResponseText] = ()
    after: Sequence[ResponseText] = ()

    @property
    def title(self) -> str:
        reason = f": {self.manifest.reason}" if self.manifest.reason else ""
        count = f"{self.manifest.num_steps} step{'' if self.manifest.num_steps == 1 else 's'}"
        return f"{self.manifest.job}: {_SAID[self.manifest.outcome]} after {count}{reason}"

    def markdown(self) -> str:
        lines = [f"# {visible(' '.join(self.title.split()))}", ""]
        if self.steps:
            lines += ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in facts(self.steps)), ""]
            lines += ["| stage | seconds | of what passed |", "|---|---:|---:|"]
            lines += [f"| {name} | {seconds:.1f} | {share:.0%} |" for name, seconds, share in by_stage(self.steps)]
            lines += [""]
        if self.after:
            lines += ["## The same prompts, before and after", "", *self._responses_in_markdown()]
        lines += ["## Where it is", "", *(f"- {label}: `{visible(value)}`" for label, value in self.places)]
        return "\n".join(lines) + "\n"

    def print(self, console: Console) -> None:
        print_line(console, "")
        print_line(console, self.title)
        for label, value in facts(self.steps) if self.steps else []:
            print_line(console, f"  {label:<20} {value}")
        for name, seconds, share in by_stage(self.steps):
            print_line(console, f"  {name:<12} {duration(seconds):>7} {share:>5.0%}")
        for line in self._responses_in_text():
            print_line(console, line)
        for label, value in self.places:
            print_line(console, f"  {label:<20} {value}")

    def _responses_in_markdown(self) -> Iterator[str]:
        for label, response in self._responses():
            if label == "prompt":
                yield f"**Prompt**\n\n{_fenced(response.prompt)}\n"
            else:
                yield f"{label}, reward {number(response.reward)}\n\n{_fenced(response.text)}\n"

    def _responses_in_text(self) -> Iterator[str]:
        for label, response in self._responses():
            text = response.prompt if label == "prompt" else response.text
            reward = "" if label == "prompt" else f" (reward {number(response.reward)})"
            yield f"\n  {label}{reward}" if label == "prompt" else f"  {label}{reward}"
            yield from (f"    | {line}" for line in _short(text).splitlines())
        yield ""

    def _responses(self) -> Iterator[tuple[str, ResponseText]]:
        for place, after in enumerate(self.after):
            yield "prompt", after
            if place < len(self.before):
                yield "before", self.before[place]
            yield "after", after


def summarize(
    folder: RunFolder,
    *,
    resume_command: str,
    before: Sequence[ResponseText] = (),
    after: Sequence[ResponseText] = (),
) -> Summary:
    """Of the run in the folder, after its `finish`; also written there as `summary.md`."""
    places = [("run folder", str(folder.path))]
    for label, path in (("pictures", folder.plots), ("policy", folder.export), ("checkpoints", folder.checkpoints)):
        if path.is_dir() and any(path.iterdir()):
            places.append((label, str(path)))
    manifest = folder.manifest()
    going_on = "train longer" if manifest.outcome == "completed" else "go on"
    places.append((going_on, resume_command))
    summary = Summary(manifest=manifest, steps=folder.steps(), places=places, before=before, after=after)
    folder.write_summary(summary.markdown())
    return summary


def facts(steps: Sequence[StepMetrics]) -> list[Row]:
    first, last = ends(steps)
    few = num_of_ends(steps)
    ends_of = "step" if few == 1 else f"{few} steps"
    rows = [
        (
            "reward",
            f"{number(first)} -> {number(last)} ({signed(last - first)}), mean of the first and of the last {ends_of}",
        )
    ]
    kls = [metrics.kl for metrics in steps if metrics.kl is not None]
    if kls:
        rows.append(("KL to the reference", f"{number(kls[-1])} at the end, {number(max(kls))} at most"))
    lengths = [metrics.response_length.mean for metrics in steps]
    tokens = sum(metrics.num_response_tokens for metrics in steps)
    generation = sum(metrics.seconds.generation for metrics in steps)
    rows.append(("response length", f"{number(lengths[0])} -> {number(lengths[-1])} tokens"))
    rows.append(("generated", f"{tokens:,} tokens, {number(tokens / generation if generation else None)} a second"))
    rows.append(("accepted", f"{number(_mean_accepted(steps))} drafted tokens per verification"))
    worst = max(metrics.log_prob_difference.max for metrics in steps)
    rows.append(("log-probs", f"generator/trainer log-prob difference max {number(worst)}"))
    passed = sum(metrics.seconds.step for metrics in steps)
    rows.append(("time", f"{duration(passed)}, {duration(passed / len(steps))} a step"))
    return rows


def by_stage(steps: Sequence[StepMetrics]) -> list[tuple[str, float, float]]:
    """Seconds of every stage that worked, and their share of what passed; stages overlap, so shares may exceed 1."""
    passed = sum(metrics.seconds.step for metrics in steps)
    totals = {name: sum(float(getattr(metrics.seconds, name)) for metrics in steps) for name in STAGE_COLOURS}
    return [(name, total, total / passed if passed else 0.0) for name, total in totals.items() if total]


def _mean_accepted(steps: Sequence[StepMetrics]) -> float | None:
    found = [m.accepted_per_verification for m in steps if m.accepted_per_verification is not None]
    return sum(found) / len(found) if found else None


def _short(text: str) -> str:
    """Safe to show, and not longer than a person reads."""
    safe = visible(text).strip("\n")
    return safe if len(safe) <= _MOST_CHARACTERS else safe[:_MOST_CHARACTERS] + " ..."


def _fenced(text: str) -> str:
    """In a fence that the text cannot close."""
    safe = _short(text)
    longest = max(map(len, re.findall("`+", safe)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{safe}\n{fence}"

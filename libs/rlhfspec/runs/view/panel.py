"""Live panel of the terminal, for at least 80 columns and 24 lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.console import ConsoleDimensions, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from rlhfspec.messages.records import Load, Sample
from rlhfspec.messages.records.evaluations import Evaluation, best
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.view.learning_signs import warning_of
from rlhfspec.runs.view.progress import RunProgress
from rlhfspec.runs.view.roster import ProcessState
from rlhfspec.runs.view.text import (
    bar,
    duration,
    estimates,
    histogram,
    number,
    one_line,
    shares,
    signed,
    sparkline,
    visible,
)

WIDEST = 110
_LABEL_WIDTH = 10
_BAR_WIDTH = 5
_DULL = ("starting", "working", "waiting", "left")  # rows that may be omitted for lack of room, last first
_MOST_LINES_OF_TEXT = 6
_FEWEST_PROCESSES, _LINES_BELOW = 8, 9  # minimum of process rows, and room kept for the rest
_LINES_AROUND = 6  # around the sample: frame, rule, heading, prompt, and the terminal's last line


def panel(progress: RunProgress, size: ConsoleDimensions, on_interrupt: str) -> RenderableType:
    width = min(size.width, WIDEST)
    inner = width - 4
    rows: list[RenderableType] = [_head(progress, inner), *_metrics(progress, inner)]
    rule = Text("─" * inner, "dim")
    if progress.workers:
        rows += [rule, *_processes(progress, max(_FEWEST_PROCESSES, size.height - len(rows) - _LINES_BELOW))]
    if progress.last_sample is not None:
        num_lines = max(1, min(_MOST_LINES_OF_TEXT, size.height - len(rows) - _LINES_AROUND))
        rows += [rule, *_sample(progress.last_sample, inner, num_lines)]
    title = f"[bold]{progress.job.metadata.name}[/] [dim]{progress.job.spec.algorithm.name}[/]"
    hint = f"[dim]Ctrl-C: {on_interrupt}[/]"
    return Panel(
        Group(*rows), title=title, title_align="left", subtitle=hint, subtitle_align="right", box=ROUNDED, width=width,
        border_style="cyan",
    )  # fmt: skip


def _head(progress: RunProgress, width: int) -> Text:
    eta = progress.eta_seconds
    done, total = progress.num_samples_done, progress.num_samples
    share = (progress.num_steps_done + min(1.0, done / total) * (progress.num_steps_done < progress.num_steps)) / (
        progress.num_steps
    )
    left = f"step {progress.current_step}/{progress.num_steps} "
    right = f" {done}/{total} samples  {duration(progress.elapsed_seconds)}"
    right += f"  ETA {duration(eta)}" if eta is not None else ""
    text = Text(no_wrap=True, overflow="crop")
    text.append(left, "bold")
    text.append(bar(share, max(4, width - len(left) - len(right))), "cyan")
    text.append(right)
    return text


def _metrics(progress: RunProgress, width: int) -> Iterator[Text]:
    if not progress.steps:
        yield _row("reward", Text("after the first step", "dim"))
        yield _row("speed", _speed_of_loads(progress))
        return
    last = progress.steps[-1]
    room = max(8, min(32, width - _LABEL_WIDTH - 34))
    yield _row("reward", _reward(progress, room))
    if progress.evaluations:
        yield _row("held-out", _held_out(progress.evaluations, room))
    if last.kl is not None:
        kls = [metrics.kl_k3 or 0.0 for metrics in progress.steps]
        yield _row("KL", _curve(last.kl["k3"], kls, room, "yellow", f"to the reference ({estimates(last.kl)})"))
    yield _row("length", _lengths(last))
    yield _row("loss", _losses(last))
    yield _row("speed", _speed_of_loads(progress) if progress.loads else _speed_of_step(last))
    if drafting := _drafting(progress):
        yield _row("drafter", drafting)
    if learning := _learning(progress):
        yield _row("learnt", learning)
    yield _row("log-probs", _agreement(last))
    if progress.moves or progress.why_moved:
        yield _row("moves", _moves(progress))
    if warning := warning_of(progress.steps, progress.evaluations):
        yield _row("warning", Text(warning, "bold red"))


def _row(label: str, content: Text) -> Text:
    row = Text(f"{label:<{_LABEL_WIDTH}}", "dim", no_wrap=True, overflow="ellipsis")
    row.append_text(content)
    return row


def _reward(progress: RunProgress, room: int) -> Text:
    rewards = [metrics.reward.mean for metrics in progress.steps]
    first = rewards[0]
    return _curve(
        rewards[-1], rewards, room, "green", f"{signed(rewards[-1] - first)} since step {progress.steps[0].step}"
    )


def _held_out(evaluations: Sequence[Evaluation], room: int) -> Text:
    rewards, top = [evaluation.reward.mean for evaluation in evaluations], best(evaluations)
    remark = f"best {number(top.reward.mean)} after step {top.step}"
    return _curve(rewards[-1], rewards, room, "green", remark)


def _curve(value: float, values: list[float], room: int, colour: str, remark: str) -> Text:
    text = Text()
    text.append(f"{number(value):<9}", f"bold {colour}")
    text.append(sparkline(values, room), colour)
    return text.append(f"  {remark}", "dim")


def _lengths(last: StepMetrics) -> Text:
    lengths = last.response_length
    text = Text(f"{number(lengths.mean):<9}")
    text.append("▕", "dim").append(histogram(lengths.histogram), "magenta").append("▏", "dim")
    text.append(f" to {lengths.edges[-1]}  ", "dim")
    return text.append(f"p95 {lengths.p95}, {last.truncated_fraction:.0%} cut off")


def _losses(last: StepMetrics) -> Text:
    text = Text(f"{number(last.policy_loss):<9}")
    if last.value_loss is not None:
        text.append("value ", "dim").append(f"{number(last.value_loss)}  ")
    text.append("entropy ", "dim").append(f"{number(last.entropy)}  ")
    text.append("clipped ", "dim").append(f"{last.clip_fraction:.1%}  ")
    return text.append("gradient ", "dim").append(number(last.grad_norm))


def _moves(progress: RunProgress) -> Text:
    went = progress.moves["kv"] + progress.moves["tokens"]
    text = Text(f"{went:<9}")
    if stayed := progress.moves["kept"] + progress.moves["lost"]:
        text.append(f"{stayed} not  ", "dim")
    return text.append(one_line(progress.why_moved), "dim")


def _speed_of_loads(progress: RunProgress) -> Text:
    loads = progress.loads
    if not loads:
        return Text("no generator has reported yet", "dim")
    busiest: Load = max(loads, key=lambda load: load.num_running)
    told = [load.accepted_per_verification for load in loads if load.accepted_per_verification is not None]
    accepted = sum(told) / len(told) if told else None
    return _speed(sum(load.tokens_per_second for load in loads), accepted, busiest.strategy)


def _drafting(progress: RunProgress) -> Text | None:
    busiest = max(progress.loads, key=lambda load: load.num_running, default=None)
    if busiest is None or not busiest.drafting:
        return None
    used = max(busiest.drafting, key=lambda drafting: drafting.num_verifications)
    saved = sum(each.saved_seconds for load in progress.loads for each in load.drafting)
    text = Text(f"{saved:<9.1f}").append("s saved  ", "dim").append(f"{used.tokens_per_verification:.2f}", "bold")
    text.append(" a verification  accepted ", "dim").append(shares(used.acceptance))
    if used.level_share is not None:
        text.append("  level ", "dim").append(shares([used.level_share]))
    return text


def _learning(progress: RunProgress) -> Text | None:
    version = max((load.drafter_version for load in progress.loads), default=0)
    if not version:
        return None
    age = f"age {progress.drafter_age}" if progress.drafter_age else f"at {version // 1000}k"
    return Text(f"{sum(load.learning_seconds for load in progress.loads):<9.1f}").append(f"s learning, {age}", "dim")


def _speed_of_step(last: StepMetrics) -> Text:
    strategy = max(last.strategy, key=lambda name: last.strategy[name], default="")
    return _speed(last.tokens_per_second, last.accepted_per_verification, strategy)


def _speed(tokens_per_second: float | None, accepted: float | None, strategy: str) -> Text:
    text = Text()
    if tokens_per_second is not None:
        text.append(f"{number(tokens_per_second):<9}").append("tok/s  ", "dim")
    if accepted is not None:
        text.append(number(accepted), "bold").append(" accepted per verification  ", "dim")
    return text.append(one_line(strategy), "blue")


def _agreement(last: StepMetrics) -> Text:
    text = Text("generator/trainer difference ", "dim")
    text.append("max ", "dim").append(number(last.log_prob_difference.max))
    return text.append(", mean ", "dim").append(number(last.log_prob_difference.mean))


def _processes(progress: RunProgress, most: int) -> Iterator[Text]:
    shown = list(progress.workers)
    if len(shown) > most:
        telling = sorted(shown, key=lambda entry: _DULL.index(entry[0].doing) if entry[0].doing in _DULL else -1)
        shown = [entry for entry in shown if entry in telling[: most - 1]]
    pid_width = 8 if any(state.pid for state, _ in shown) else 0
    for state, utilisation in shown:
        yield _process(state, utilisation, pid_width)
    if more := len(progress.workers) - len(shown):
        yield Text(f"and {more} more that work or wait (see rlhfspec top)", "dim")


def _process(state: ProcessState, utilisation: float, pid_width: int) -> Text:
    working, hand = state.doing == "working", "+" if state.by_hand else ""
    row = Text(no_wrap=True, overflow="ellipsis")
    row.append(f"{state.name + hand:<{_LABEL_WIDTH + 2}}", "bold" if working else "dim")
    row.append(f"{f'{state.pid} ' if state.pid else '':>{pid_width}}", "dim")
    row.append(bar(utilisation, _BAR_WIDTH), "green" if working else "dim")
    row.append(f"{utilisation:>5.0%}{duration(state.since_seconds):>6}  ")
    if state.num_restarts:
        row.append(f"restarted {state.num_restarts}x  ", "yellow")
    if state.doing in ("waiting", "working"):
        if (load := state.load) is not None and working:
            row.append(f"{load.num_running}+{load.num_waiting} at {number(load.tokens_per_second)} tok/s  ", "magenta")
        row.append(
            one_line(state.what if working else f"waits for {_whom(state)}{state.what}"), "" if working else "dim"
        )
    else:
        row.append(f"{state.doing}  ", "bold red" if state.doing not in ("starting", "left") else "bold")
        row.append(one_line(state.what))
    return row


def _whom(state: ProcessState) -> str:
    numbers: dict[str, list[str]] = {}
    for stage, _, worker in (name.partition(" ") for name in state.waits_for):
        numbers.setdefault(stage, []).append(worker)
    names = [" ".join([stage, ", ".join(found)]).strip() for stage, found in numbers.items()]
    return f"{' or '.join(names)}: " if names else ""


def _sample(sample: Sample, width: int, num_lines: int) -> Iterator[Text]:
    heading = Text("last sample  ", "dim", no_wrap=True, overflow="ellipsis")
    yield heading.append(f"{sample.id}, {len(sample.token_ids)} tokens, {sample.finish_reason}", "dim")
    yield Text(_end(one_line(sample.prompt_text), width), "dim", no_wrap=True)
    for line in visible(sample.error or sample.text).splitlines()[:num_lines]:
        yield Text(line, no_wrap=True, overflow="ellipsis")


def _end(text: str, num_cells: int) -> str:
    if cell_len(text) <= num_cells:
        return text
    end = text[1 - num_cells :]
    while cell_len(end) >= num_cells:
        end = end[1:]
    return "…" + end

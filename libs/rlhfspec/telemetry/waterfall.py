"""One sample's life as a picture in text: what was done for it on one axis of time, and what waited for what.

Example:
    >>> print(bar([("·", 0.0, 0.5), ("█", 0.5, 1.0)], began=0.0, ended=2.0, width=8))
    ··██
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlhfspec.telemetry.text import number, one_line
from rlhfspec.tracing.read import Life
from rlhfspec.tracing.spans import Span

Piece = tuple[str, float, float]  # how it is drawn, from when to when
IN_THE_QUEUE, AT_WORK, FOR_OTHERS = "·", "█", "░"
LEGEND = (
    f"{IN_THE_QUEUE} waits to be taken   {AT_WORK} in hand   {FOR_OTHERS} waits for scores and for the rest of its step"
)
WORTH_TELLING = 0.01  # of the whole life: a wait that is shorter is noise


def bar_width(columns: int) -> int:
    """What a terminal has room for beside the other columns."""
    return max(12, min(48, columns - 72))


def waterfall(life: Life, *, width: int = 48) -> Table:
    """A row for each span; the axis goes from when the prompt was published to when the policy was trained."""
    title = f"{life.sample}: {seconds(life.ended - life.began)}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", caption=LEGEND, caption_justify="left")
    table.add_column("")
    table.add_column("by", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column(_axis(life, width), no_wrap=True, min_width=width)
    table.add_column("", overflow="fold")
    for span in life.spans:
        table.add_row(
            span.name,
            f"{span.stage} {span.worker}",
            seconds((span.sent or span.began) - life.began),
            seconds(span.ended - (span.sent or span.began)),
            Text(bar(list(pieces(span)), began=life.began, ended=life.ended, width=width)),
            Text("; ".join(notes(life, span))),
        )
    return table


def slowest_table(lives: Sequence[Life]) -> Table:
    """Where the time of each went."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("sample", no_wrap=True)
    for title in ("until scored", "in queues", "generation", "scores", "tokens"):
        table.add_column(title, justify="right")
    table.add_column("by")
    for life in lives:
        generation = life.span("generation")
        scores = [span for span in life.spans if span.name in ("reward", "reference", "critic")]
        before_training = [span for span in life.spans if span.name not in ("training", "evaluation")]
        table.add_row(
            life.sample,
            seconds(life.seconds_until_scored),
            seconds(sum(span.waited_seconds for span in before_training)),
            seconds(generation.seconds) if generation else "-",
            ", ".join(f"{span.name} {seconds(span.seconds)}" for span in scores) or "-",
            str(generation.attributes.get("tokens", "-")) if generation else "-",
            f"{generation.stage} {generation.worker}" if generation else "-",
        )
    return table


def pieces(span: Span) -> Iterator[Piece]:
    if span.sent is not None:
        yield IN_THE_QUEUE, span.sent, span.began
    work_began = _complete(span)
    if work_began > span.began:
        yield FOR_OTHERS, span.began, work_began
    yield AT_WORK, work_began, span.ended


def bar(parts: Sequence[Piece], *, began: float, ended: float, width: int) -> str:
    """What is drawn later wins; everything that has a length is seen."""
    cells = [" "] * width
    scale = width / max(ended - began, 1e-9)
    for mark, start, end in parts:
        first = min(int((start - began) * scale), width - 1)
        last = max(first + 1, round((end - began) * scale))
        if end > start or mark == AT_WORK:
            cells[max(first, 0) : last] = mark * (min(last, width) - max(first, 0))
    return "".join(cells).rstrip()


def notes(life: Life, span: Span) -> Iterator[str]:
    """What it did, and what it waited for."""
    told = span.attributes
    if span.waited_seconds >= WORTH_TELLING * (life.ended - life.began):
        yield f"{seconds(span.waited_seconds)} until {span.stage} {span.worker} took it"
    if span.name == "generation":
        yield f"{told.get('tokens')} tokens in {told.get('engine_steps')} steps: {told.get('strategies')}"
        if told.get("drafted"):
            yield f"{told.get('accepted')} of {told.get('drafted')} drafted tokens accepted"
        yield f"weights {told.get('weights_versions')}"
    if "reward" in told:
        yield f"reward {number(float(told['reward']))}"
    if span.name in ("training", "evaluation"):
        yield from _waits_at_the_end(life, span)
    if "error" in told:
        yield f"failed: {one_line(str(told['error']))}"
    if span.again:
        yield "done again"


def _waits_at_the_end(life: Life, span: Span) -> Iterator[str]:
    scored, complete = float(span.attributes.get("scored", span.began)), _complete(span)
    scores = [each for each in life.spans if each.name in ("reward", "reference", "critic")]
    worth = WORTH_TELLING * (life.ended - life.began)
    if scored - span.began >= worth and scores:
        last = max(scores, key=lambda each: each.ended)
        yield f"{seconds(scored - span.began)} for its scores, the last from {last.stage} {last.worker}"
    if complete - scored >= worth:
        yield f"{seconds(complete - scored)} for the rest of the {'step' if span.name == 'training' else 'evaluation'}"
    yield f"step {span.step}"
    if dropped := span.attributes.get("dropped"):
        yield f"{dropped} samples of it were left out"


def seconds(value: float) -> str:
    """
    >>> seconds(0.0000042), seconds(0.0123), seconds(1.234), seconds(250.0)
    ('0 ms', '12 ms', '1.23 s', '250 s')
    """
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.00995 or value < 0.00005 else f"{value * 1000:.1f} ms"
    return f"{value:#.3g}".rstrip(".") + " s"


def _complete(span: Span) -> float:
    """When all of its step was there; where a span waits for nobody: its begin."""
    return min(max(float(span.attributes.get("complete", span.began)), span.began), span.ended)


def _axis(life: Life, width: int) -> str:
    end = seconds(life.ended - life.began)
    return "0" + end.rjust(width - 1)

"""Trace of a sample as text: work and waits on one time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlhfspec.runs.view.text import number, one_line, size
from rlhfspec.telemetry.read import Life
from rlhfspec.telemetry.spans import Span

Piece = tuple[str, float, float]  # (mark, begin, end)
IN_THE_QUEUE, AT_WORK, FOR_OTHERS, STANDS_STILL, IN_VAIN = "·", "█", "░", "─", "×"
LEGEND = {
    IN_THE_QUEUE: "waits in a queue",
    AT_WORK: "in progress",
    FOR_OTHERS: "waits for scores and for the rest of its step",
    STANDS_STILL: "paused while it moves",
    IN_VAIN: "in vain: it was generated again",
}
WORTH_TELLING = 0.01  # share of the whole life below which a wait is omitted


def bar_width(columns: int) -> int:
    return max(12, min(48, columns - 72))


def waterfall(life: Life, *, width: int = 48) -> Table:
    title = f"{life.sample}: {seconds(life.ended - life.began)}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", caption=_legend(life), caption_justify="left")
    table.add_column("")
    table.add_column("by", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column(_axis(life, width), no_wrap=True, min_width=width)
    table.add_column("", overflow="fold")
    for span in life.spans:
        table.add_row(
            span.name,
            by_whom(span),
            seconds((span.sent or span.began) - life.began),
            seconds(span.ended - (span.sent or span.began)),
            Text(bar(list(pieces(life, span)), began=life.began, ended=life.ended, width=width)),
            Text("; ".join(notes(life, span))),
        )
    return table


def slowest_table(lives: Sequence[Life]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("sample", no_wrap=True)
    for title in ("until scored", "in queues", "generation", "moves", "scores", "tokens"):
        table.add_column(title, justify="right")
    table.add_column("by")
    for life in lives:
        scores = [span for span in life.spans if span.name in ("reward", "reference", "critic")]
        stays = [span for span in life.stays if not life.is_in_vain(span)]
        in_vain = sum(span.seconds for span in life.stays if life.is_in_vain(span))
        table.add_row(
            life.sample,
            seconds(life.seconds_until_scored),
            seconds(life.queue_seconds),
            _of_stays(sum(span.seconds for span in stays), in_vain) if stays else "-",
            f"{len(life.moves)}, {seconds(sum(span.seconds for span in life.moves))}" if life.moves else "-",
            ", ".join(f"{span.name} {seconds(span.seconds)}" for span in scores) or "-",
            str(_tokens(stays[-1])) if stays else "-",
            f"{stays[0].stage} {', '.join(str(span.worker) for span in stays)}" if stays else "-",
        )
    return table


def _tokens(stay: Span) -> int:
    return int(stay.attributes.get("tokens_before", 0)) + int(stay.attributes.get("tokens", 0))


def _of_stays(value: float, in_vain: float) -> str:
    """Return as text the time of useful stays, and of stays whose result was lost.

    >>> _of_stays(2.5, 0.0), _of_stays(2.5, 11.0)
    ('2.50 s', '2.50 s, and 11.0 s in vain')
    """
    return f"{seconds(value)}, and {seconds(in_vain)} in vain" if in_vain else seconds(value)


def by_whom(span: Span) -> str:
    where = f"{span.stage} {span.worker}"
    return f"{where} -> {span.attributes.get('destination')}" if span.name == "move" else where


def pieces(life: Life, span: Span) -> Iterator[Piece]:
    if span.sent is not None:
        yield IN_THE_QUEUE, span.sent, span.began
    if span.name == "move" or life.is_in_vain(span):
        yield (STANDS_STILL if span.name == "move" else IN_VAIN), span.began, span.ended
        return
    work_began = _complete(span)
    if work_began > span.began:
        yield FOR_OTHERS, span.began, work_began
    yield AT_WORK, work_began, span.ended


def bar(parts: Sequence[Piece], *, began: float, ended: float, width: int) -> str:
    """Draw pieces (mark, start, end) in `width` characters, at least one each; later ones overwrite earlier ones."""
    cells = [" "] * width
    scale = width / max(ended - began, 1e-9)
    for mark, start, end in parts:
        first = min(int((start - began) * scale), width - 1)
        last = max(first + 1, round((end - began) * scale))
        if end > start or mark != IN_THE_QUEUE:
            cells[max(first, 0) : last] = mark * (min(last, width) - max(first, 0))
    return "".join(cells).rstrip()


def notes(life: Life, span: Span) -> Iterator[str]:
    told = span.attributes
    if span.waited_seconds >= WORTH_TELLING * (life.ended - life.began):
        yield f"{seconds(span.waited_seconds)} until {span.stage} {span.worker} took it"
    if span.name == "generation":
        yield from _of_a_stay(life, span)
    if span.name == "move":
        yield from _of_a_move(span)
    if "reward" in told:
        yield f"reward {number(float(told['reward']))}"
    if span.name in ("training", "evaluation"):
        yield from _waits_at_the_end(life, span)
    if "error" in told:
        yield f"failed: {one_line(str(told['error']))}"
    if span.again:
        yield "done again"


def _of_a_stay(life: Life, span: Span) -> Iterator[str]:
    told = span.attributes
    if "tokens" in told:
        more = "more " if told.get("tokens_before") else ""
        how = f" in {told.get('engine_steps')} steps: {told.get('strategies')}" if told.get("engine_steps") else ""
        yield f"{told['tokens']} {more}tokens{how}"
    if told.get("drafted"):
        yield f"{told.get('accepted')} of {told.get('drafted')} drafted tokens accepted"
    if told.get("weights_versions"):
        yield f"weights {told['weights_versions']}"
    if told.get("left") == "handed back":
        yield "handed back"
    if span.is_open:
        goes_on = span is life.stays[-1] and not life.is_generated
        yield "it is still there, or its generator is gone" if goes_on else "its generator ended without reporting it"


def _of_a_move(span: Span) -> Iterator[str]:
    told = span.attributes
    reason, rounds = one_line(str(told.get("reason", ""))), told.get("rounds")
    match told.get("how"):
        case "kv":
            yield "with its KV"
        case "tokens":
            yield "its tokens alone"
        case "kept":
            yield f"came to nothing: {reason}"
        case _:
            yield reason
    yield f"{size(float(told.get('bytes', 0)))} in {rounds} round{'' if rounds == 1 else 's'}"
    if told.get("recomputed"):
        yield f"{told['recomputed']} tokens computed again"


def _legend(life: Life) -> str:
    seen = {mark for span in life.spans for mark, _, _ in pieces(life, span)}
    always = (IN_THE_QUEUE, AT_WORK, FOR_OTHERS)
    return "   ".join(f"{mark} {what}" for mark, what in LEGEND.items() if mark in always or mark in seen)


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
    """Return a duration with its unit.

    >>> seconds(0.0000042), seconds(0.0123), seconds(1.234), seconds(250.0)
    ('0 ms', '12 ms', '1.23 s', '250 s')
    """
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.00995 or value < 0.00005 else f"{value * 1000:.1f} ms"
    return f"{value:#.3g}".rstrip(".") + " s"


def _complete(span: Span) -> float:
    """Return the time when all records of the span's step had arrived, or the span's begin if unknown."""
    return min(max(float(span.attributes.get("complete", span.began)), span.began), span.ended)


def _axis(life: Life, width: int) -> str:
    end = seconds(life.ended - life.began)
    return "0" + end.rjust(width - 1)

"""`rlhfspec bench drain`: plain and adaptive decoding of a draining batch, live and plotted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.commands.options import Model, models
from rlhfspec.cli.progress import StatusLine, wide_console

if TYPE_CHECKING:
    from rlhfspec.bench.draining.batch import Trace
    from rlhfspec.bench.generating.scenarios import BenchScenario

_REFRESH_SECONDS = 0.1
_LINE_SECONDS = 2.0  # between two lines where there is no terminal


def drain(
    model: Model = None,
    output: Annotated[Path, typer.Option(help="Path of the PNG to write.")] = Path("out/drain.png"),
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = 2,
    tokens: Annotated[
        int, typer.Option(min=8, max=512, help="Longest response in tokens; lengths are lognormal around 3/4 of it.")
    ] = 128,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Compare plain and adaptive decoding on a draining batch. The first call makes the tiny models."""
    console = wide_console()
    try:
        _drain(console, model, output, threads, tokens, dtype)
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None


def _drain(console: Console, model: str | None, output: Path, threads: int, tokens: int, dtype: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from rlhfspec.bench.draining.batch import Trace
    from rlhfspec.bench.draining.plot import draw
    from rlhfspec.bench.generating.scenarios import scenarios

    with StatusLine() as status:
        target, draft = models(model, None, status)
    [scenario] = scenarios(["long-tail"], num_tokens=tokens, pair="smollm2" if model == "smollm2" else "english")
    engine = _warm_engine(target, draft, scenario, threads, dtype)
    traces = {mode: Trace(mode=mode) for mode in ("plain", "adaptive")}
    view = _View(console, traces, scenario.num_tokens)
    with view:
        for mode in traces:
            traces[mode] = _run(engine, scenario, mode, view)
    _summary(console, traces["plain"], traces["adaptive"])
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(traces["plain"], traces["adaptive"], output)
    console.print(f"picture: {output.absolute()}", soft_wrap=True, highlight=False)
    if traces["plain"].digest != traces["adaptive"].digest:
        raise typer.Exit(1)


def _warm_engine(target: str, draft: str | None, scenario: BenchScenario, threads: int, dtype: str) -> Any:
    """Return an engine with measured cost tables, warmed up in both modes."""
    with StatusLine() as status:
        status("importing torch")
        from rlhfspec.bench.generating.ours import drain, requests_of
        from rlhfspec.bench.generating.scenarios import MAX_CONTEXT
        from rlhfspec.engine import Engine

        status("loading the model and measuring what a step costs")
        engine = Engine.from_pretrained(
            target, drafter=draft, dtype=dtype, num_threads=threads, max_context=MAX_CONTEXT
        )
        status("warming up")
        for mode, speculation in (("plain", "off"), ("adaptive", "adaptive")):
            engine.set_speculation(speculation)
            arguments = {
                "prompts": scenario.prompts,
                "max_tokens": [24] * scenario.num_sequences,
                "seeds": scenario.seeds(7),
            }
            drain(engine, requests_of(arguments, f"warm-up-{mode}"))
    return engine


def _run(engine: Any, scenario: BenchScenario, mode: str, view: _View) -> Trace:
    from rlhfspec.bench.draining.batch import drain_and_watch
    from rlhfspec.bench.generating.ours import requests_of

    engine.set_speculation("off" if mode == "plain" else mode)
    arguments = {"prompts": scenario.prompts, "max_tokens": scenario.max_tokens, "seeds": scenario.seeds(0)}
    return drain_and_watch(engine, requests_of(arguments, mode), mode, view.update)


class _View:
    """Display of the runs' traces: a live table in a terminal, occasional lines elsewhere."""

    def __init__(self, console: Console, traces: dict[str, Trace], num_tokens: int) -> None:
        self._console = console
        self._traces = dict(traces)
        self._num_tokens = num_tokens
        self._live = Live(self._render(), console=console, auto_refresh=False) if console.is_terminal else None
        self._shown_at = 0.0

    def update(self, trace: Trace) -> None:
        """Draw the trace, at most once per refresh interval so that drawing costs little."""
        self._traces[trace.mode] = trace
        now = time.monotonic()
        if now - self._shown_at < (_LINE_SECONDS if self._live is None else _REFRESH_SECONDS):
            return
        self._shown_at = now
        if self._live is None:
            self._console.print(_line(trace), highlight=False)
        else:
            self._live.update(self._render(), refresh=True)

    def __enter__(self) -> _View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _render(self) -> Group:
        table = Table(expand=True)
        for name in ("mode", "done", "active", "tokens/s now", "tokens/s", "nodes a sequence", "strategy"):
            table.add_column(name, justify="left" if name in ("mode", "done", "strategy") else "right")
        for trace in self._traces.values():
            bar = ProgressBar(total=self._num_tokens, completed=trace.num_tokens, width=24)
            last = trace.steps[-1] if trace.steps else None
            nodes = last.num_verified_nodes / max(last.num_active, 1) if last else 0.0
            table.add_row(
                trace.mode,
                bar,
                str(last.num_active if last else 0),
                f"{trace.recent_tokens_per_second:.0f}",
                f"{trace.tokens_per_second:.0f}",
                f"{nodes:.1f}",
                last.strategy if last else "",
            )
        return Group(Text("the same prompts and seeds, one after the other on one engine", style="dim"), table)


def _line(trace: Trace) -> str:
    last = trace.steps[-1]
    return (
        f"{trace.mode}: {trace.seconds:.1f} s, {last.num_active} active, {trace.num_tokens} tokens, "
        f"{trace.recent_tokens_per_second:.0f} tokens/s, strategy {last.strategy}"
    )


def _summary(console: Console, plain: Trace, adaptive: Trace) -> None:
    console.print("\nthe strategy as the batch drained", style="bold")
    for most, fewest, strategy in adaptive.strategies_by_activity():
        span = f"{most}" if most == fewest else f"{most}-{fewest}"
        console.print(f"  {span:>6} active: {strategy}", highlight=False)
    for trace in (plain, adaptive):
        console.print(
            f"{trace.mode:9} {trace.tokens_per_second:6.0f} tokens/s, {trace.seconds:5.1f} s, "
            f"{trace.accepted_per_verification:.2f} drafted tokens accepted per verification",
            highlight=False,
        )
    if plain.digest == adaptive.digest:
        console.print(
            f"same tokens and log-probs, bit for bit: {len(plain.completions)} of {len(plain.completions)} sequences; "
            f"adaptive is ×{plain.seconds / adaptive.seconds:.2f} as fast",
            style="green",
            highlight=False,
        )
    else:
        pairs = zip(plain.completions, adaptive.completions, strict=True)
        different = sum(one.token_ids != other.token_ids for one, other in pairs)
        console.print(f"NOT the same: {different} sequences have other tokens", style="red")

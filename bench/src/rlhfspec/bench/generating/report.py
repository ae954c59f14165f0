"""Tables of tokens/s by mode and scenario, and of bars."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.generating.results import ResultRow, Results
from rlhfspec.bench.tables import ending, table_of


def show(results: Results, console: Console) -> None:
    console.print(render(results))


def render(results: Results) -> Group:
    parts: list[RenderableType] = [_heading(results)]
    for num_threads in dict.fromkeys(row.num_threads for row in results.rows):
        parts.append(_speeds(results, num_threads))
        parts.append(_selector(results, num_threads))
    return Group(*parts, _costs(results), *ending(results))


def _heading(results: Results) -> Text:
    machine = results.machine
    if machine is None:
        return Text("")
    return Text(
        f"{machine.cpu}, {machine.num_cores} cores, {' '.join(machine.features)}; "
        f"arithmetic {machine.arithmetic} ({'fast' if machine.has_fast_bfloat16 else 'no fast'} bfloat16)\n"
        f"models: {results.settings.get('target')}, draft {results.settings.get('draft')}\n"
        "tokens/s: medians of interleaved repetitions; prefill included, start-up and warm-up not\n"
        "bars: ratios paired within a repetition, with their 95 % interval; the best static strategy "
        "is chosen on the other repetitions"
    )


def _speeds(results: Results, num_threads: int) -> Table:
    rows = [row for row in results.rows if row.num_threads == num_threads]
    names = list(dict.fromkeys(row.scenario for row in rows))
    title = f"tokens/s with {num_threads} thread(s), in brackets accepted per verification"
    table = table_of(title, ("mode", *names), left=("mode",))
    for mode in dict.fromkeys(row.mode for row in rows):
        cells = [_speed(results, results.row(num_threads, name, mode)) for name in names]
        table.add_row(mode, *cells, style="bold" if mode == "adaptive" else "")
    return table


def _speed(results: Results, row: ResultRow | None) -> Text:
    if row is None:
        return Text("-")
    accepted = f" ({row.accepted_per_verification:.2f})" if row.accepted_per_verification else ""
    statics = results.statics(row.num_threads, row.scenario)
    best = max(statics, key=lambda other: other.tokens_per_second, default=None)
    return Text(f"{row.tokens_per_second:.0f}{accepted}", style="underline" if row is best else "")


def _selector(results: Results, num_threads: int) -> Table:
    columns = ("scenario", "of step time", "step cost error", "acceptance error", "plans of the last steps")
    table = table_of(f"the selector, {num_threads} thread(s)", columns, left=(columns[0], columns[-1]))
    for row in results.rows:
        said = row.selector
        if row.num_threads != num_threads or row.mode != "adaptive" or not said:
            continue
        plans = sorted(said["plans"].items(), key=lambda item: -item[1])[:3]
        table.add_row(
            row.scenario,
            _percent(said["share_of_step"], 2),
            _percent(said["cost_errors"].get("step")),
            _percent(said["calibration_error"], 1),
            ", ".join(f"{name} {count}" for name, count in plans),
        )
    return table


def _costs(results: Results) -> Table:
    shown = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    columns = ("threads, kind", *map(str, shown))
    table = table_of("cost tables at start-up, ms", columns, left=columns[:1])
    for num_threads, kinds in results.costs.items():
        for kind, costs in kinds.items():
            by_rows = dict(zip(costs["rows"], costs["seconds"], strict=True))
            cells = [f"{1000 * by_rows[rows]:.2f}" if rows in by_rows else "-" for rows in shown]
            table.add_row(f"{num_threads}, {kind}", *cells)
    return table


def _percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"

"""Plot of tokens/s by batch for every mode, one panel per thread count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhfspec.bench.generating.results import ResultRow, Results
from rlhfspec.simulator.picture import drawn

STYLES: dict[str, dict[str, Any]] = {
    "adaptive": {"color": "#d1495b", "linewidth": 2.6, "zorder": 5},
    "plain": {"color": "#30638e", "linewidth": 2.0},
    "hf": {"color": "#8d99ae", "linestyle": ":"},
    "vllm-plain": {"color": "#edae49"},
    "vllm-draft": {"color": "#edae49", "linestyle": "--"},
    "vllm-ngram": {"color": "#edae49", "linestyle": ":"},
}


def plot(results: Results, path: Path) -> None:
    threads = list(dict.fromkeys(row.num_threads for row in results.rows))
    with drawn(path, figsize=(6.5 * len(threads), 4.6)) as figure:
        axes = figure.subplots(1, len(threads), squeeze=False)
        for axis, num_threads in zip(axes[0], threads, strict=True):
            rows = [row for row in results.rows if row.num_threads == num_threads and row.scenario.startswith("batch-")]
            statics = [name for name in dict.fromkeys(row.mode for row in rows) if name.startswith("static:")]
            for mode in statics:
                axis.plot(
                    *_curve(rows, mode), color="#b9c7b0", linewidth=0.9, label="static" if mode == statics[0] else None
                )
            for mode, style in STYLES.items():
                if any(row.mode == mode for row in rows):
                    axis.plot(*_curve(rows, mode), marker="o", markersize=4, label=mode, **style)
            sizes = sorted({_size(row) for row in rows})
            axis.set(
                title=f"{num_threads} thread(s)", xlabel="sequences", ylabel="tokens/s", xscale="log", yscale="log"
            )
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend()
        if results.machine:
            figure.suptitle(f"{results.machine.cpu}, arithmetic {results.machine.arithmetic}", fontsize=10)


def _curve(rows: list[ResultRow], mode: str) -> tuple[list[int], list[float]]:
    points = sorted((_size(row), row.tokens_per_second) for row in rows if row.mode == mode)
    return [size for size, _ in points], [speed for _, speed in points]


def _size(row: ResultRow) -> int:
    return int(row.scenario.removeprefix("batch-"))

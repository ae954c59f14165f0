"""The promises the benchmark holds itself to. Pure: results in, bars out; a bar whose modes did not run is left out.

Example:
    >>> from rlhfspec.bench.results import Results, ResultRow
    >>> rows = [
    ...     ResultRow(scenario="batch-1", mode=mode, num_threads=1, tokens_per_second=speed, repeats=(speed,),
    ...         accepted_per_verification=0.0)
    ...     for mode, speed in (("plain", 100.0), ("adaptive", 97.0))
    ... ]
    >>> [bar.holds for bar in bars(Results(machine=None, rows=tuple(rows))) if bar.name == "adaptive / plain"]
    [False]
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfspec.bench.ratios import Ratio, against_best, paired
from rlhfspec.bench.results import Bar, ResultRow, Results

ADAPTIVE_OVER_STATIC = 0.97
ADAPTIVE_OVER_PLAIN = 1.0  # at every batch, whatever the CPU and the models
SELECTOR_SHARE = 0.01  # of step time, at batch 64

# adaptive / plain on templated English, by scenario
ON_FAST_BFLOAT16 = {
    "batch-1": 3.3,
    "batch-4": 2.4,
    "batch-16": 1.4,
    "batch-32": 1.25,
    "batch-64": 1.05,
    "long-tail": 1.45,
}
ON_SLOW_BFLOAT16 = {"batch-1": 2.5, "batch-4": 1.25, "batch-16": 1.0, "long-tail": 1.3}

PLAIN_OVER_VLLM_PLAIN = {"batch-1", "batch-8", "batch-32"}
ADAPTIVE_OVER_VLLM_BEST = {"batch-1": 1.5, "batch-8": 1.3, "batch-32": 1.1}


def bars(results: Results) -> tuple[Bar, ...]:
    found: list[Bar] = []
    for num_threads, scenario in results.scenes():
        for check in (_against_static, _against_plain, _against_vllm, _selector_share, _equality):
            found += check(results, num_threads, scenario)
    found += _equality_across_threads(results)
    return tuple(found)


def _against_static(results: Results, num_threads: int, scenario: str) -> Iterator[Bar]:
    adaptive, statics = results.row(num_threads, scenario, "adaptive"), results.statics(num_threads, scenario)
    if adaptive and statics and scenario != "long-tail":
        found = against_best(adaptive.repeats, {row.mode.removeprefix("static:"): row.repeats for row in statics})
        yield _at_least(num_threads, scenario, f"adaptive / best static ({found.against})", found, ADAPTIVE_OVER_STATIC)


def _against_plain(results: Results, num_threads: int, scenario: str) -> Iterator[Bar]:
    adaptive, plain = results.row(num_threads, scenario, "adaptive"), results.row(num_threads, scenario, "plain")
    if adaptive and plain:
        is_fast = results.machine is not None and results.machine.has_fast_bfloat16
        by_scenario = ON_FAST_BFLOAT16 if is_fast else ON_SLOW_BFLOAT16
        is_english = results.settings.get("pair", "english") == "english"
        wanted = by_scenario.get(scenario, ADAPTIVE_OVER_PLAIN) if is_english else ADAPTIVE_OVER_PLAIN
        yield _ratio(adaptive, plain, "adaptive / plain", wanted)


def _against_vllm(results: Results, num_threads: int, scenario: str) -> Iterator[Bar]:
    plain, theirs = (results.row(num_threads, scenario, mode) for mode in ("plain", "vllm-plain"))
    if plain and theirs and scenario in PLAIN_OVER_VLLM_PLAIN:
        is_fast = results.machine is not None and results.machine.has_fast_bfloat16
        yield _ratio(plain, theirs, "plain / vllm-plain", 1.0 if is_fast else 1.2)
    adaptive, best = results.row(num_threads, scenario, "adaptive"), results.best_vllm(num_threads, scenario)
    if adaptive and best and scenario in ADAPTIVE_OVER_VLLM_BEST:
        yield _ratio(adaptive, best, f"adaptive / best vLLM ({best.mode})", ADAPTIVE_OVER_VLLM_BEST[scenario])


def _selector_share(results: Results, num_threads: int, scenario: str) -> Iterator[Bar]:
    adaptive = results.row(num_threads, scenario, "adaptive")
    share = adaptive.selector.get("share_of_step") if adaptive else None
    if share is not None and scenario == "batch-64":
        yield Bar(
            num_threads=num_threads,
            scenario=scenario,
            name="selector's share of step time",
            wanted=f"< {SELECTOR_SHARE:.0%}",
            found=f"{share:.2%}",
            holds=share < SELECTOR_SHARE,
        )


def _equality(results: Results, num_threads: int, scenario: str) -> Iterator[Bar]:
    """Every mode of ours gave the same tokens and the same bits of log-probs, repetition by repetition."""
    rows = [row for row in results.rows if (row.num_threads, row.scenario) == (num_threads, scenario) and row.digests]
    if len(rows) > 1:
        yield _same(num_threads, scenario, "same tokens and log-probs in every mode", rows)


def _equality_across_threads(results: Results) -> Iterator[Bar]:
    for scenario in dict.fromkeys(scenario for _, scenario in results.scenes()):
        rows = [row for row in results.rows if row.scenario == scenario and row.digests]
        counts = {row.num_threads for row in rows}
        if len(counts) > 1:
            yield _same(max(counts), scenario, f"same with {' and '.join(map(str, sorted(counts)))} threads", rows)


def _same(num_threads: int, scenario: str, name: str, rows: list[ResultRow]) -> Bar:
    common = min(len(row.digests) for row in rows)  # a mode may lack the last repetition when time ran out
    different = [row.mode for row in rows if row.digests[:common] != rows[0].digests[:common]]
    found = f"{len(rows)} rows equal" if not different else f"{', '.join(different)} differ from {rows[0].mode}"
    return Bar(num_threads=num_threads, scenario=scenario, name=name, wanted="equal", found=found, holds=not different)


def _ratio(ours: ResultRow, other: ResultRow, name: str, wanted: float) -> Bar:
    return _at_least(ours.num_threads, ours.scenario, name, paired(ours.repeats, other.repeats), wanted)


def _at_least(num_threads: int, scenario: str, name: str, found: Ratio, wanted: float) -> Bar:
    return Bar(
        num_threads=num_threads,
        scenario=scenario,
        name=name,
        wanted=f">= {wanted:.2f}",
        found=str(found),
        holds=found.value >= wanted,
    )

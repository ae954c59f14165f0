"""Bars of the benchmarks (thresholds that results must meet). Modes that did not run have none.

Example:
    >>> from rlhfspec.bench.generating.results import Results, ResultRow
    >>> rows = [
    ...     ResultRow(scenario="batch-1", mode=mode, num_threads=1, tokens_per_second=speed, repeats=(speed,),
    ...         accepted_per_verification=0.0)
    ...     for mode, speed in (("plain", 100.0), ("adaptive", 97.0))
    ... ]
    >>> found = bars_of_generation(Results(machine=None, rows=tuple(rows)))
    >>> [bar.holds for bar in found if bar.name == "adaptive / plain"]
    [False]

Example: moves cut a stage from 6 s to 4.5 s; with all lengths known it takes 4 s.
    >>> from rlhfspec.bench.moving.rebalancing.results import StageResult, StageRun
    >>> run = lambda arm, seconds: StageRun(arm=arm, seconds=seconds, ends=(seconds, 1.0))
    >>> runs = {"dealt": (run("dealt", 6.0),), "ours": (run("ours", 4.5),), "clairvoyant": (run("clairvoyant", 4.0),)}
    >>> stage = StageResult(workload="skew", decoding="adaptive", seed=1, num_tokens=9, imbalance=4.0,
    ...                     predicted={}, runs=runs, digest="")
    >>> row = Row.of([stage])
    >>> str(row.dealt_to_ours), str(row.closed)
    ('1.33 (1.33-1.33)', '0.75 (0.75-0.75)')
    >>> [(bar.name, bar.holds) for bar in bars_of_rebalance([row])]
    [('dealt / ours', True), ('share of dealt - clairvoyant closed', True)]

Example: over shared memory, a pause 3 ms longer than the destination's 10 ms step meets its bar.
    >>> from rlhfspec.bench.moving.migrating.results import Moment
    >>> move = Moment(pause=0.013, gap=0.02, seconds=0.02, num_bytes=4_700_000, cpu=0.0015,
    ...               engine_cpu=0.001, held=0.001, step=0.01)
    >>> cell = Cell(model="wide", decoding="plain", link="shm", num_tokens=1024, moves=(move,), prefill_gaps=(0.5,))
    >>> [(bar.name, bar.found, bar.holds) for bar in bars_of_migrate([cell])][0]
    ('pause', '13.0 ms', True)
    >>> [bar.found for bar in bars_of_migrate([cell]) if "re-prefill" in bar.name]
    ['25.0x']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlhfspec.bench.generating.results import Bar, ResultRow, Results
from rlhfspec.bench.moving.migrating.results import Cell
from rlhfspec.bench.moving.rebalancing.results import Row
from rlhfspec.bench.ratios import Ratio, against_best, paired
from rlhfspec.bench.stepping.results import ADAPTIVE, PLAIN_STEP, TRL, StepRow

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

PRETRAINED_OVER_VLLM_BEST = 2.0  # plain decoding of smollm2 at 1, 8 and 32 sequences
# adaptive / plain of smollm2, which drafts for itself
ON_PRETRAINED = {
    "float32": {"batch-1": 1.8, "batch-4": 1.3, "long-tail": 1.25},
    "bfloat16": {"batch-1": 1.2, "batch-4": 1.05, "long-tail": 1.25},
}
ELSEWHERE_ON_PRETRAINED = 0.98

TIMES_TRL = 2.0  # a whole step's speed over TRL's
LEAST_GAIN, LEAST_CLOSED, MOST_HARM = 1.25, 0.65, 1.03  # of moves: the first two where they must pay
MORE_THAN_A_STEP = {"shm": 0.005, "tcp": 0.008}  # seconds that a pause may take beyond one step of the destination
MOST_CPU = {"shm": 0.002, "tcp": 0.004}  # seconds of both ends for a move of 4.7 MB
CPU_TOKENS = 1024  # where the 77M model has 4.7 MB
TIMES_SHORTER = {512: 10.0, 1024: 20.0}  # a move's gap than that of computing the KV again


# -- generate: modes of decoding -------------------------------------------------------------------------------------


def bars_of_generation(results: Results) -> tuple[Bar, ...]:
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
        pair = results.settings.get("pair", "english")
        if _is_pretrained(results):
            wanted = ON_PRETRAINED.get(str(results.settings.get("dtype")), {}).get(scenario, ELSEWHERE_ON_PRETRAINED)
        else:
            wanted = by_scenario.get(scenario, ADAPTIVE_OVER_PLAIN) if pair == "english" else ADAPTIVE_OVER_PLAIN
        yield _ratio(adaptive, plain, "adaptive / plain", wanted)


def _against_vllm(results: Results, num_threads: int, scenario: str) -> Iterator[Bar]:
    plain, theirs = (results.row(num_threads, scenario, mode) for mode in ("plain", "vllm-plain"))
    if plain and theirs and scenario in PLAIN_OVER_VLLM_PLAIN:
        is_fast = results.machine is not None and results.machine.has_fast_bfloat16
        yield _ratio(plain, theirs, "plain / vllm-plain", 1.0 if is_fast else 1.2)
    adaptive, best = results.row(num_threads, scenario, "adaptive"), results.best_vllm(num_threads, scenario)
    if _is_pretrained(results):
        if plain and best and scenario in PLAIN_OVER_VLLM_PLAIN:
            yield _ratio(plain, best, f"plain / best vLLM ({best.mode})", PRETRAINED_OVER_VLLM_BEST)
        return
    if adaptive and best and scenario in ADAPTIVE_OVER_VLLM_BEST:
        yield _ratio(adaptive, best, f"adaptive / best vLLM ({best.mode})", ADAPTIVE_OVER_VLLM_BEST[scenario])


def _is_pretrained(results: Results) -> bool:
    return str(results.settings.get("pair")).startswith("smollm2")


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
    """Yield a bar that requires the same tokens and log-prob bits from all modes in each repetition."""
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


# -- step: a whole one, against TRL's --------------------------------------------------------------------------------


def bars_of_step(rows: Iterable[StepRow], num_threads: int) -> tuple[Bar, ...]:
    """Return the bars on the speed of a training step relative to TRL's.

    >>> from rlhfspec.bench.stepping.results import Step
    >>> row = lambda mode, seconds: StepRow.of(mode, [Step(seconds=seconds, by_stage={}, num_tokens=1)])
    >>> [(bar.name, bar.found, bar.holds) for bar in bars_of_step([row("trl", 4.0), row("plain", 1.6)], 2)]
    [('plain / TRL', '2.50', True)]
    """
    seconds = {row.mode: row.seconds_per_step for row in rows}
    found = {mode: seconds[TRL] / seconds[mode] for mode in (PLAIN_STEP, ADAPTIVE) if {TRL, mode} <= seconds.keys()}
    return tuple(
        Bar(num_threads=num_threads, scenario="step", name=f"{mode} / TRL", wanted=f">= {TIMES_TRL:.2f}",
            found=f"{ratio:.2f}", holds=ratio >= TIMES_TRL)
        for mode, ratio in found.items()
    )  # fmt: skip


# -- rebalance and migrate -------------------------------------------------------------------------------------------


def bars_of_rebalance(rows: Iterable[Row]) -> tuple[Bar, ...]:
    found: list[Bar] = []
    for row in rows:
        at_least = {"dealt / ours": (row.dealt_to_ours, LEAST_GAIN),
                    "share of dealt - clairvoyant closed": (row.closed, LEAST_CLOSED)}  # fmt: skip
        if row.should_gain:
            found += [_rebalance_bar(row, name, ratio, f">= {wanted:g}", ratio.value >= wanted)
                      for name, (ratio, wanted) in at_least.items() if ratio]  # fmt: skip
        elif row.harm:
            name = "ours / the better of dealt and pulled"
            found.append(_rebalance_bar(row, name, row.harm, f"<= {MOST_HARM:g}", row.harm.value <= MOST_HARM))
    return tuple(found)


def _rebalance_bar(row: Row, name: str, ratio: Ratio, wanted: str, holds: bool) -> Bar:
    scenario = f"{row.decoding}, {row.workload}"
    return Bar(num_threads=1, scenario=scenario, name=name, wanted=wanted, found=str(ratio), holds=holds)


def bars_of_migrate(cells: Iterable[Cell]) -> tuple[Bar, ...]:
    return tuple(bar for cell in cells for bar in _bars_of(cell))


def _bars_of(cell: Cell) -> list[Bar]:
    found = []
    pause, step = cell.median("pause"), cell.median("step")
    if cell.link in MORE_THAN_A_STEP:
        most = step + MORE_THAN_A_STEP[cell.link]
        found.append(_migrate_bar(cell, "pause", f"<= {_ms(most)}", _ms(pause), pause <= most))
    if cell.num_tokens in TIMES_SHORTER:
        least, times = TIMES_SHORTER[cell.num_tokens], cell.times_shorter
        found.append(
            _migrate_bar(cell, "gap of re-prefill / of the move", f">= {least:g}x", f"{times:.1f}x", times >= least)
        )
    if cell.link in MOST_CPU and cell.num_tokens == CPU_TOKENS and cell.model == "wide":
        cpu, limit = cell.median("cpu"), MOST_CPU[cell.link]
        found.append(_migrate_bar(cell, "CPU of both ends", f"<= {_ms(limit)}", _ms(cpu), cpu <= limit))
    held = cell.median("held")
    found.append(_migrate_bar(cell, "an engine held", f"<= a step ({_ms(step)})", _ms(held), held <= step))
    return found


def _migrate_bar(cell: Cell, name: str, wanted: str, found: str, holds: bool) -> Bar:
    scenario = f"{cell.model}, {cell.decoding}, {cell.num_tokens} tokens, {cell.link}"
    return Bar(num_threads=1, scenario=scenario, name=name, wanted=wanted, found=found, holds=holds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"

"""`rlhfspec simulate --fuse`: actor and critic on the same pipeline, serial and interleaved."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.simulator.pipelines.schedule import PipelineCase, PipelineSchedule

_CASE = re.compile(r"(\d{1,3})x(\d{1,3})(?:x(\d+\.?\d*))?")


def simulate_fusion(text: str, *, as_json: bool, out: Path | None) -> None:
    from rlhfspec.simulator.pipelines.schedule import search, serial

    case = case_of(text)
    began = time.process_time()
    schedules = {"serial": serial(case), "interleaved": search(case)}
    seconds = time.process_time() - began
    if out is not None:
        from rlhfspec.simulator.pipelines.plot import draw

        draw(schedules, out / "fused.png", title=f"simulated: {_named(case)}")
    _print(case, schedules, seconds, as_json)
    if out is not None and not as_json:
        typer.echo(f"picture: {out / 'fused.png'}")


def case_of(text: str) -> PipelineCase:
    """Parse `STAGESxMICROBATCHES[xCRITIC]`, where CRITIC is the critic's forward time in units of the actor's.

    >>> case_of("4x8x0.5")
    PipelineCase(num_stages=4, num_micro_batches=8, forward_seconds=(1.0, 0.5))
    """
    from rlhfspec.simulator.pipelines.schedule import PipelineCase

    matched = _CASE.fullmatch(text)
    if matched is None:
        raise InvalidRequest("--fuse", text, "must be STAGESxMICROBATCHES or STAGESxMICROBATCHESxCRITIC, as in 4x8x0.5")
    stages, micro_batches, critic = int(matched[1]), int(matched[2]), float(matched[3] or 1)
    if not (1 <= stages <= 64 and 1 <= micro_batches <= 256 and 0.01 <= critic <= 100):
        raise InvalidRequest("--fuse", text, "must be 1 to 64 stages, 1 to 256 micro-batches, a critic of .01 to 100")
    return PipelineCase(num_stages=stages, num_micro_batches=micro_batches, forward_seconds=(1.0, critic))


def _named(case: PipelineCase) -> str:
    stages, micro_batches, critic = case.num_stages, case.num_micro_batches, case.forward_seconds[1]
    return f"{stages} stages x {micro_batches} micro-batches, critic {critic:g} of actor"


def _print(case: PipelineCase, schedules: dict[str, PipelineSchedule], seconds: float, as_json: bool) -> None:
    rows = {
        name: {
            "time": schedule.seconds,
            "of_serial": schedules["serial"].seconds / schedule.seconds,
            "idle": schedule.bubbles,
            "peak_activations": schedule.peak_activations,
        }
        for name, schedule in schedules.items()
    }
    if as_json:
        content = {"simulated": True, "case": _named(case), "least": case.least_seconds, "search_seconds": seconds}
        typer.echo(json.dumps(content | {"schedules": rows}, indent=2))
        return
    table = Table(title=f"simulated: {_named(case)}")
    table.add_column("schedule")
    for name in ("time", "times as fast", "idle", "activations kept"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(
            name, f"{row['time']:g}", f"{row['of_serial']:.2f}", f"{row['idle']:.0%}", f"{row['peak_activations']:g}"
        )
    console = wide_console()
    console.print(table)
    console.print(
        f"No schedule takes less than {case.least_seconds:g}. Searched for {seconds:.1f} s of processor time.",
        highlight=False,
    )

"""`rlhfspec simulate --serve`: prefill and decoding together or apart, by goodput under targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest
from rlhfspec.runs.folder.moves import COSTS_FILE

if TYPE_CHECKING:
    from rlhfspec.simulator.serving import PlacementFound, ServingCosts, ServingTargets


def simulate_serving(
    path: Path,
    targets_ms: tuple[float, float],
    generators: int,
    rows: int,
    seeds: int,
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    from rlhfspec.simulator.serving import ServingTargets, search

    costs = _costs(path)
    targets = ServingTargets(first_seconds=targets_ms[0] / 1e3, token_seconds=targets_ms[1] / 1e3)
    found = search(costs, targets, num_generators=generators, rows=rows, seeds=range(1, seeds + 1))
    if out is not None:
        from rlhfspec.simulator.simulated_plot import draw_serving

        draw_serving(found, out / "served.png", title=_title(generators, targets))
    if as_json:
        typer.echo(json.dumps({"simulated": True, "generators": generators, "placements": _rows(found)}, indent=2))
        return
    wide_console().print(_table(found, _title(generators, targets)))
    if out is not None:
        typer.echo(f"picture: {out / 'served.png'}")


def _costs(path: Path) -> ServingCosts:
    from rlhfspec.simulator.serving import ServingCosts

    file = path / COSTS_FILE if path.is_dir() else path
    try:
        return ServingCosts.model_validate_json(file.read_bytes())
    except OSError as error:
        reason = (
            f"{error.strerror}: must be the folder of a run with several generators, or a file like its {COSTS_FILE}, "
            "which its rebalancer writes when it ends in order"
        )
        raise InvalidRequest("--serve", str(file), reason) from None
    except ValidationError as error:
        [first, *_] = error.errors()
        place = ".".join(map(str, first["loc"]))
        raise InvalidRequest("--serve", str(file), f"{place}: {first['msg']}") from None


def _title(generators: int, targets: ServingTargets) -> str:
    first, token = targets.first_seconds * 1e3, targets.token_seconds * 1e3
    return f"simulated: {generators} generators, first token within {first:g} ms, then {token:g} ms a token"


def _rows(found: list[PlacementFound]) -> list[dict[str, Any]]:
    return [
        {
            "placement": str(each.placement),
            "prefill_workers": each.placement.num_prefilling,
            "chunk": each.placement.chunk,
            "goodput": each.goodput,
            "of_best": each.goodput / found[0].goodput if found[0].goodput else None,
            "stage_seconds": each.stage_seconds,
        }
        for each in found
    ]


def _table(found: list[PlacementFound], title: str) -> Table:
    table = Table(title=title)
    table.add_column("placement")
    for name in ("chunk", "requests/s", "/ best", "stage, seconds"):
        table.add_column(name, justify="right")
    for each, row in zip(found, _rows(found), strict=True):
        share = f"{row['of_best']:.2f}" if row["of_best"] is not None else "-"
        table.add_row(
            str(each.placement), str(each.placement.chunk), f"{each.goodput:.3g}", share, f"{each.stage_seconds:.3g}"
        )
    return table

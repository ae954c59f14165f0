"""`rlhfspec models`: check whether models are bit-exact or refused."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine
from rlhfspec.cli.signals import FAILED
from rlhfspec.errors import InvalidRequest, nearest

if TYPE_CHECKING:
    from rlhfspec.sweep.run import Judged
    from rlhfspec.sweep.verdict import Verdict

app = typer.Typer(
    help="Check which models run bit-exactly, and why others are refused.", no_args_is_help=True, add_completion=False
)
_CODES = {"right": 0, "wrong": FAILED, "refused": 2, "not made": 2}
_FLIPS_CONTEXT = 1024
_LARGE = 200_000_000  # parameters; from there on a model is judged in fewer ways

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH|TYPE|all...",
        help="Folder or hub id of a model, model types of transformers such as mixtral, or all.",
        show_default=False,
    ),
]


@app.callback()
def group() -> None:
    """Check which models run bit-exactly, and why others are refused."""


@app.command()
def check(
    targets: Targets,
    max_context: Annotated[
        int, typer.Option(min=128, help="Largest position to check in a model given by folder or hub id.")
    ] = 8192,
    variants: Annotated[
        bool, typer.Option(help="For model types: also check variants with windows, kinds of RoPE, biases, ...")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="For model types: number of processes.  [default: number of cores]")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="For a model given by folder or hub id: also count its flipped tokens there, as cuda.",
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="For model types: write the table to this file.")
    ] = None,
) -> None:
    """Judge models against plain Hugging Face: right in every bit (exit code 0), wrong (1), or refused (2).

    A type is judged by tiny random models of its class; with refused ones among them the exit code is still 0. All
    types take about 95 minutes on 2 cores.
    """
    from rlhfspec.sweep.classes import model_types

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    known = model_types()
    types = known if "all" in targets else [name for name in targets if name in known and not Path(name).exists()]
    own = [name for name in targets if name not in (*types, "all")]
    with exit_on_problems():
        for name in own:
            _refuse_misspelt(name, known)
        if device is not None:
            from rlhfspec.sweep.flips import check_device

            if not own:
                raise InvalidRequest("--device", device, "is for a model given by folder or hub id")
            check_device(device)
    codes = [_check_own(name, max_context, device) for name in own]
    if types:
        codes.append(_check_types(types, with_variants=variants, workers=workers, table=table))
    raise typer.Exit(FAILED if FAILED in codes else max(codes))


# ---- a model of the user's ------------------------------------------------------------------------------------------


def _refuse_misspelt(name: str, types: list[str]) -> None:
    """Refuse a misspelt type before it is looked up as a model on the hub."""
    near = None if Path(name).exists() else nearest(name, types, cutoff=0.8)
    if near:
        raise InvalidRequest("models", name, f"no such folder or type; did you mean {near}?")


def _check_own(path: str, max_context: int, device: str | None) -> int:
    """Judge a model, print the findings, and return the exit code."""
    from rlhfspec.huggingface.loading import load_model
    from rlhfspec.huggingface.structure.causal_lm import within_positions
    from rlhfspec.sweep.verdict import judge
    from rlhfspec.tiny.paths import TINY_PREFIX, resolve

    with StatusLine() as status, exit_on_problems():
        folder = resolve(path, status) if path.startswith(TINY_PREFIX) else path
        status(f"{path}: loading")
        model = load_model(folder)
        size = model.num_parameters()
        positions = within_positions(model, max_context)
        status(f"{path}: {type(model).__name__} of {size / 1e6:.1f}M parameters is being compared with Hugging Face")
        del model
        verdict = judge(partial(load_model, folder), thorough=size < _LARGE, max_context=positions)
    typer.echo(f"{path}: {_headline(verdict)}")
    for name, text in _findings(verdict, positions, thorough=size < _LARGE):
        typer.echo(f"  {name:15}{text}")
    if device is None or verdict.kind != "right":
        return _CODES[verdict.kind]
    return _check_on(device, partial(load_model, folder), positions)


def _check_on(device: str, make: Callable[[], Any], max_context: int) -> int:
    """Print flipped tokens in fast and exact mode and return the exit code; batching must not change exact samples."""
    from rlhfspec.errors import UnsupportedModel
    from rlhfspec.sweep.flips import count_flips

    code = 0
    for name, dtype, exact in (("fast", "bfloat16", "off"), ("exact", "bfloat16", "on"), ("exact", "float32", "on")):
        try:
            found = count_flips(make, device, dtype=dtype, exact=exact, max_context=min(max_context, _FLIPS_CONTEXT))
        except UnsupportedModel as error:
            text, code = f"no: {error.value}: {error.problem}", max(code, _CODES["refused"])
        else:
            text, wrong = str(found), exact == "on" and found.num_parted
            code = FAILED if wrong else code
        typer.echo(f"  {f'{name} on {device}':15}{dtype}: {text}")
    return code


def _headline(verdict: Verdict) -> str:
    return "right in every bit" if verdict.kind == "right" else f"{verdict.kind}: {verdict.detail}"


def _findings(verdict: Verdict, positions: int, *, thorough: bool) -> list[tuple[str, str]]:
    report = verdict.report
    if report is None:
        return []
    one_call = "all layers in one call of our kernels"
    return [
        ("class", report.model),
        ("runs as", one_call if report.path == "native" else "Hugging Face's own layers over our kernels"),
        *(("attention", each) for each in report.attentions),
        ("log-probs", f"at most {verdict.difference:.1e} from Hugging Face's in float32"),
        ("bfloat16", _in_bfloat16(verdict)),
        ("exactOnPolicy", f"no: {verdict.not_exact}" if verdict.not_exact else "yes, in float32 and bfloat16"),
        ("at load", f"{len(report.probes)} probes up to position {positions}, {report.seconds:.2f} s"),
        ("judged", "in every way" if thorough else "without gradients, low-rank update, trees and moves: it is large"),
    ]


def _in_bfloat16(verdict: Verdict) -> str:
    band = verdict.in_bfloat16
    return f"no: {verdict.not_in_bfloat16}" if band is None else f"log-probs at most {band}"


# ---- types of transformers ------------------------------------------------------------------------------------------


def _check_types(types: list[str], *, with_variants: bool, workers: int | None, table: Path | None) -> int:
    from rlhfspec.sweep.run import cases, sweep
    from rlhfspec.sweep.table import write_into

    judged: list[Judged] = []
    kinds = Counter[str]()
    for each in sweep(cases(types, with_variants=with_variants), num_workers=workers or len(os.sched_getaffinity(0))):
        judged.append(each)
        kinds[each.verdict.kind] += 1
        typer.echo(_line(each))
    typer.echo(", ".join(f"{kinds[kind]} {kind}" for kind in _CODES))
    if table is not None:
        table.write_text(write_into(table.read_text() if table.exists() else "", judged))
        typer.echo(f"table: {table}")
    return FAILED if kinds["wrong"] else 0


def _line(judged: Judged) -> str:
    verdict, name = judged.verdict, " ".join(filter(None, (judged.case.model_type, judged.case.variant)))
    text = verdict.detail
    if verdict.report is not None:
        text = f"{verdict.report.path:7} {verdict.difference:.0e} {'; '.join(verdict.limits)}"
    return f"{verdict.kind:9} {name:50} {text}".rstrip()

"""Comparison of the traces of moved samples with what the run wrote."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.runs.folder.moves import read_moves
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.telemetry.folder import read_spans
from rlhfspec.telemetry.read import Life, lives
from rlhfspec.telemetry.spans import Span

ROUNDED = 2e-6  # seconds: a span's times are written with six digits
WENT_ON = ("kv", "tokens")


def check_traces(run: Path) -> tuple[int, int]:
    samples = {sample["id"]: sample for sample in RunFolder(run).samples()}
    found = {life.sample: life for life in lives(read_spans(run)) if life.sample in samples}
    assert found.keys() == samples.keys()
    told: dict[str, list[dict[str, Any]]] = {sample: [] for sample in samples}
    for line in _moved(run):
        if line["sample_id"] in told:
            told[line["sample_id"]].append(line)
    prompt_tokens: dict[str, set[int]] = {}  # what of a sample is not its response
    for sample, life in found.items():
        lengths = check_a_life(life, told[sample], num_tokens=len(samples[sample]["tokens"]))
        prompt_tokens.setdefault(samples[sample]["prompt"], set()).update(lengths)
    assert all(len(lengths) <= 1 for lengths in prompt_tokens.values()), prompt_tokens
    return sum(map(len, told.values())), max(map(len, told.values()))


def _moved(run: Path) -> Iterator[dict[str, Any]]:
    return (line for line, _ in read_moves(run) if line["kind"] == "moved" and line["how"] in WENT_ON)


def check_a_life(life: Life, told: list[dict[str, Any]], *, num_tokens: int) -> set[int]:
    """Check a sample's trace against its lines of moves.jsonl (`told`), and return the token counts at its moves."""
    stays = [span for span in life.spans if span.name == "generation"]
    moves = [span for span in life.spans if span.name == "move" and span.attributes["how"] in WENT_ON]
    by_id = {span.attributes["move"]: span for span in moves}
    for line in told:
        check_a_move(by_id[line["id"]], line)
    assert len(by_id) == len(moves) == len(told), f"{life.sample}: {moves}, {told}"
    ends = [(move.attributes["source"], move.attributes["destination"]) for move in moves]
    assert ends == list(pairwise(stay.worker for stay in stays)), f"{life.sample} went {ends}"
    assert sum(int(stay.attributes["tokens"]) for stay in stays) == num_tokens
    assert [stay.attributes.get("tokens_before", 0) for stay in stays] == _sums(stays, "tokens")
    for stay, how in zip(stays, ("", *(move.attributes["how"] for move in moves)), strict=True):
        check_steps(stay, has_kv=how == "kv" and "tokens_before" in stay.attributes)
    check_times(life, stays, moves)
    had = {line["id"]: line["num_tokens"] for line in told}
    pairs = zip(moves, stays[1:], strict=True)
    return {had[move.attributes["move"]] - after.attributes["tokens_before"] for move, after in pairs}


def check_steps(stay: Span, *, has_kv: bool) -> None:
    """Check that each step of this stay adds a token and accepted drafts, after a prefill if no KV came."""
    made = {name: stay.attributes[name] for name in ("tokens", "engine_steps", "accepted", "verifications")}
    parts = [part.rpartition(" x ") for part in str(stay.attributes["strategies"]).split(", ") if part]
    may_be_read = made["tokens"] > 0 and not has_kv
    assert sum(int(steps) for _, _, steps in parts) == made["engine_steps"], made
    assert made["verifications"] - made["engine_steps"] in {0, may_be_read}, made
    assert made["verifications"] + made["accepted"] == made["tokens"], made


def check_a_move(span: Span, line: dict[str, Any]) -> None:
    said = {name: span.attributes[name] for name in ("source", "destination", "how", "bytes", "rounds")}
    names = {"bytes": "num_bytes", "rounds": "num_rounds"}
    assert said == {name: line[names.get(name, name)] for name in said}
    assert span.attributes["pause_seconds"] == pytest.approx(line["pause_seconds"], abs=ROUNDED)


def check_times(life: Life, stays: list[Span], moves: list[Span]) -> None:
    """Check that a life's times neither overlap nor leave gaps until it was published."""
    [prompt] = [span for span in life.spans if span.name == "prompt"]
    assert all(stay.sent is None for stay in stays[1:]), "only the first was in a queue"
    parts = sorted([*stays, *moves], key=lambda span: (span.began, span.ended))
    for before, after in pairwise(parts):
        assert after.began == pytest.approx(before.ended, abs=ROUNDED), f"{life.sample}: {before} {after}"
    began = stays[0].sent or prompt.began
    accounted = stays[0].waited_seconds + sum(part.seconds for part in parts)
    assert accounted == pytest.approx(stays[-1].ended - began, abs=ROUNDED * (len(parts) + 1))


def _sums(stays: list[Span], name: str) -> list[int]:
    made = [int(stay.attributes[name]) for stay in stays]
    return [sum(made[:place]) for place in range(len(made))]


def told_by_trace(output: str) -> list[dict[str, Any]]:
    [life] = json.loads(output)
    return life["spans"]

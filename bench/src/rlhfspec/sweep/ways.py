"""Ways to run the same requests on an engine, all with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhfspec.engine.base import Completion, Request
from rlhfspec.engine.core import Engine

Samples = dict[str, Completion]


class Wrong(Exception):
    """Raised when a model gives wrong results."""


def one_by_one(engine: Engine, requests: Sequence[Request]) -> Samples:
    return {request.id: together(engine, [request])[request.id] for request in requests}


def together(
    engine: Engine, requests: Sequence[Request], every_step: Callable[[Engine, int], None] = lambda engine, step: None
) -> Samples:
    engine.forget_kept()  # each way prefills its own prompts
    for request in requests:
        engine.submit(request)
    done: Samples = {}
    step = 0
    while engine.has_work:
        done |= {each.id: each for each in engine.step().finished}
        every_step(engine, step := step + 1)
    engine.check_integrity()
    return done


def preempt(engine: Engine, step: int) -> None:
    """Preempt one running sequence at every third step; passed to `together` as `every_step`."""
    if step % 3 == 0 and engine.scheduler.running:
        engine.preempt(engine.scheduler.running[step % len(engine.scheduler.running)].request.id)


def moving(one: Engine, other: Engine, requests: Sequence[Request]) -> Samples:
    """Run the requests, moving each sequence to the other engine at every fourth step."""
    engines, done, step = (one, other), Samples(), 0
    for engine in engines:
        engine.forget_kept()
    for request in requests:
        one.submit(request)
    while one.has_work or other.has_work:
        for engine in engines:
            done |= {each.id: each for each in engine.step().finished} if engine.has_work else {}
        if (step := step + 1) % 4 == 0:
            places = [(sequence, engine) for engine in engines for sequence in list(engine.state.sequences)]
            for sequence, engine in places:
                engines[engine is one].import_sequence(engine.export_sequence(sequence))
                engine.cancel(sequence)
    one.check_integrity()
    other.check_integrity()
    return done


def check_same(how: str, wanted: Samples, found: Samples) -> None:
    """Raise Wrong, naming the way `how`, if a token or a bit of a log-prob differs."""
    for name, sample in wanted.items():
        other = found[name]
        if sample.error or other.error:
            raise Wrong(f"{how}: {sample.error or other.error}")
        if sample.token_ids != other.token_ids:
            raise Wrong(f"{how}: other tokens than alone")
        if (sample.log_probs, sample.tempered_log_probs) != (other.log_probs, other.tempered_log_probs):
            raise Wrong(f"{how}: other bits than alone")

"""Hostile sequence states, and the engine that receives them."""

import functools

from moving import make, request

from rlhfspec.engine import Engine
from rlhfspec.engine.base import SequenceState


@functools.cache
def exported(num_tokens: int = 48) -> SequenceState:
    here = make()
    here.submit(request("x"))
    while here.state.rows.lengths.max() < num_tokens:
        here.step()
    return here.export_sequence("x")


@functools.cache
def target_of_fuzzing() -> Engine:
    return make()

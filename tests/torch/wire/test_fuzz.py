"""Decoders of damaged bytes return a record or raise their own error. FUZZ_SEED repeats a failure. For a night:
FUZZ_CASES=1000000 FUZZ_SEED=7 python -m pytest --timeout 0 tests/torch/wire/test_fuzz.py
"""

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hostile_states import exported, target_of_fuzzing
from hypothesis import HealthCheck, given, settings
from wire_records import bits, records

from rlhfspec.engine.base import KVRange, Manifest, SequenceState
from rlhfspec.engine.kv.state_bytes import checksum_of, from_bytes, to_bytes
from rlhfspec.errors import InvalidRequest, MalformedRecord, SequenceStateError, WeightsVersionError
from rlhfspec.generator.moving import MovedPrompt
from rlhfspec.messages.records import Record
from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.wire.codec import decode, encode

CASES = int(os.environ.get("FUZZ_CASES", "12000"))
SEED = int(os.environ.get("FUZZ_SEED", os.environ["SWEEP"]))  # that of the commit
MOVED_PROMPT = MovedPrompt(b"record", {"traceparent": "00-ab-cd-01", "": "\N{PILE OF POO}"}, 1.5)


def letter() -> dead_letters.DeadLetter:
    return dead_letters.DeadLetter(
        subject="rlhf.sums.1.sample", id="1/sums/3/7/1", consumer="reward", num_deliveries=5, reason="no ack", data=b"!"
    )


def some_records() -> list[bytes]:
    found: list[bytes] = []

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(records)
    def collect(record: Record) -> None:
        found.append(encode(record))

    collect()
    return found


def damaged(draw: random.Random, valid: list[bytes]) -> bytes:
    data = bytearray(draw.choice(valid))
    for _ in range(draw.randint(1, 6)):
        at = draw.randint(0, len(data))
        match draw.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
            case 3:
                data[at:at] = data[draw.randint(0, len(data)) :]
            case 4:
                data[at:] = draw.choice(valid)[at:]
            case 5 if draw.random() < 0.05:
                data[:] = draw.randbytes(draw.randint(0, 200))
            case _:
                data[at:at] = draw.choice((b"\xff\xff\xff\xff\x0f", b"\x00", b"NaN", b"[" * 2000, b"\xed\xa0\x80"))
        del data[1 << 20 :]
    return bytes(data)


def moving() -> list[bytes]:
    state = exported()
    kv = tuple(part[:1] for part in state.rest.kv)
    small = replace(state.rest, kv=kv, checksum=checksum_of(kv))
    parts = (state.manifest, small, state.rest, state, replace(state, rest=small), replace(state, rest=None), small.end)
    return [to_bytes(each) for each in parts]


def read_and_import(data: bytes) -> None:
    """Import a decoded record into an engine, which takes or refuses it and stays whole."""
    engine = target_of_fuzzing()
    take = {Manifest: engine.reserve, KVRange: engine.import_range, SequenceState: engine.import_sequence}
    try:
        record = from_bytes(data)
        if isinstance(record, KVRange):
            engine.reserve(exported().manifest)
        if type(record) in take:
            take[type(record)](record)  # type: ignore[operator]
    except (SequenceStateError, InvalidRequest, WeightsVersionError) as refusal:
        raise MalformedRecord(str(refusal)) from refusal
    finally:
        engine.check_integrity()
        for name in [*engine.scheduler.arriving, *engine.state.sequences]:
            engine.cancel(name)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


def decode_as_it_encodes(data: bytes) -> None:
    record = decode(data)
    assert bits(decode(encode(record))) == bits(record)


def resealed(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Correct the checksum, which otherwise stops all damage."""
    return lambda data: decode(data[:-8] + checksum_of([data[:-8]]).to_bytes(8, "little"))


DECODERS: dict[str, tuple[Callable[[bytes], object], Callable[[], list[bytes]], type[Exception]]] = {
    "records": (decode_as_it_encodes, some_records, MalformedRecord),
    "moving sequences": (read_and_import, moving, MalformedRecord),
    "moving sequences, sealed": (resealed(read_and_import), moving, MalformedRecord),
    "moved-prompt": (lambda raw: MovedPrompt.read(raw).to_bytes(), lambda: [MOVED_PROMPT.to_bytes()], MalformedRecord),
    "dead letters": (dead_letters.decode, lambda: [dead_letters.encode(letter())], MalformedRecord),
}


@pytest.mark.parametrize("name", DECODERS)
def test_damaged_bytes_are_a_record_or_refused(name: str) -> None:
    decoder, corpus, refusal = DECODERS[name]
    draw, valid = random.Random(SEED), corpus()
    num_refused = 0
    for _ in range(CASES):
        data = damaged(draw, valid)
        try:
            decoder(data)
        except refusal:
            num_refused += 1
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={SEED}: {data!r} made {error!r}") from error
    assert num_refused > 100


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"1", b"x", b'{"subject": "s"}'),
        *(dead_letters.encode(replace(letter(), **{name: ""})) for name in ("subject", "consumer")),
    ],
)
def test_bytes_that_are_no_dead_letter_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedRecord, match="not a dead letter"):
        dead_letters.decode(data)


def test_a_dead_letter_with_a_lone_surrogate_is_written() -> None:
    told = dead_letters.decode(dead_letters.encode(replace(letter(), reason="half of \ud83d", data=b"\xff\x00")))
    assert (told.reason, told.data) == ("half of ?", b"\xff\x00")


def test_valid_letters_and_moved_prompts_round_trip() -> None:
    assert dead_letters.decode(dead_letters.encode(letter())) == letter()
    assert MovedPrompt.read(MOVED_PROMPT.to_bytes()) == MOVED_PROMPT


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_moved_prompt_without_a_finite_time_is_refused(seconds: float) -> None:
    with pytest.raises(MalformedRecord, match="not a moved prompt"):
        MovedPrompt.read(replace(MOVED_PROMPT, seconds=seconds).to_bytes())

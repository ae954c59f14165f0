"""Contract of engines whose sequences move: the bits are the same wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlhfspec.engine.base import Completion, MovableByTokens, MovableWithKV, Watermark
from rlhfspec.errors import InvalidRequest, SequenceStateError
from rlhfspec.testing.engine import EngineMaker, GainStreams, bits, drain, reference, request, run
from rlhfspec.tiny import perturbed

_MOVED_PROMPT = tuple(range(40))
SHORT = 5  # tokens of a response that ends soon
Way = Callable[[Any, Any, str, np.random.Generator, GainStreams], list[Completion]]


def is_here(engine: MovableByTokens, name: str) -> bool:
    return any(view.id == name for view in engine.sequences())


def stepped(engine: MovableByTokens, streams: GainStreams) -> list[Completion]:
    return [*streams.take(engine.step()).finished] if engine.has_work else []


def by_tokens(
    here: MovableByTokens, there: MovableByTokens, name: str, rng: np.random.Generator, streams: GainStreams
) -> list[Completion]:
    there.import_sequence(replace(here.export_sequence(name), rest=None))
    assert here.cancel(name)
    return []


def taken_back(
    here: MovableByTokens, there: MovableByTokens, name: str, rng: np.random.Generator, streams: GainStreams
) -> list[Completion]:
    here.export_sequence(name)
    here.reattach(name)
    return []


def at_once(
    here: MovableWithKV, there: MovableWithKV, name: str, rng: np.random.Generator, streams: GainStreams
) -> list[Completion]:
    there.import_sequence(here.export_sequence(name))
    assert here.cancel(name)
    return []


def reserved(
    here: MovableWithKV, there: MovableWithKV, name: str, rng: np.random.Generator, streams: GainStreams
) -> list[Completion]:
    mark = there.reserve(here.manifest(name))
    there.import_sequence(here.export_sequence(name, mark))
    assert here.cancel(name)
    return []


def in_rounds(
    here: MovableWithKV, there: MovableWithKV, name: str, rng: np.random.Generator, streams: GainStreams
) -> list[Completion]:
    """Move a sequence, its KV in ranges while both engines decode; return the sequences finished meanwhile."""
    mark, done = there.reserve(here.manifest(name)), list[Completion]()
    for _ in range(int(rng.integers(1, 4))):
        for _ in range(int(rng.integers(1, 5))):
            kv = here.export_range(name, mark, max_bytes=int(rng.choice([1, 3000, 40_000])))
            there.import_range(kv)
            mark = kv.end
        for engine in (here, there):
            done += stepped(engine, streams)
            engine.check_integrity()
        if not is_here(here, name):  # finished meanwhile
            there.cancel(name)
            return done
    there.import_sequence(here.export_sequence(name, mark))
    assert here.cancel(name)
    return done


class MovableByTokensContract(EngineMaker):
    ways: ClassVar[tuple[Way, ...]] = (by_tokens, taken_back)

    def pair(self, mode: Any) -> tuple[Any, Any]:
        here, there = (self.engine(mode).abilities.moves_tokens for _ in range(2))
        assert here is not None
        assert there is not None
        return here, there

    def alone(self, *seeds: int, max_tokens: int = 30) -> dict[str, tuple[object, ...]]:
        engine = self.engine(self.modes[0])
        done = run(engine, *(request(str(seed), _MOVED_PROMPT, seed=seed, max_tokens=max_tokens) for seed in seeds))
        return {name: self.wanted(each) for name, each in done.items()}

    def begun(self, mode: Any, *, num_steps: int = 4, max_tokens: int = 30) -> tuple[Any, Any]:
        """Return two engines, the first with sequence 7 after `num_steps` steps."""
        here, there = self.pair(mode)
        here.submit(request("7", _MOVED_PROMPT, max_tokens=max_tokens))
        for _ in range(num_steps):
            here.step()
        return here, there

    def test_moved_at_any_time_the_bits_are_those_of_the_unmoved(self) -> None:
        wanted = self.alone(0, 1, 2)
        for mode in self.modes:
            for way in self.ways:
                rng, streams = np.random.default_rng(3), GainStreams()
                engines, done, moves = self.pair(mode), dict[str, Completion](), 0
                for seed in range(3):
                    engines[seed % 2].submit(request(str(seed), _MOVED_PROMPT, seed=seed, max_tokens=30))
                while any(engine.has_work for engine in engines):
                    for engine in engines:
                        done.update({each.id: each for each in stepped(engine, streams)})
                    places = [(view.id, index) for index in (0, 1) for view in engines[index].sequences()]
                    if places:
                        name, index = places[int(rng.integers(len(places)))]
                        ended = way(engines[index], engines[1 - index], name, rng, streams)
                        done.update({each.id: each for each in ended})
                        moves += 1
                    for engine in engines:
                        engine.check_integrity()
                assert {name: bits(each) for name, each in done.items()} == wanted, (mode, way)
                for each in done.values():
                    streams.check(each)
                assert (sum(each.stats.num_moves for each in done.values()) > 0) == (way is not taken_back)
                assert moves > 4
                if way not in MovableByTokensContract.ways:
                    assert all(engine.stats().num_recomputed_tokens == 0 for engine in engines), "the KV was moved too"
                    assert sum(each.stats.num_preemptions for each in done.values()) == 0
                assert all(engine.stats().num_free_blocks == engine.stats().num_blocks for engine in engines)

    def test_tokens_alone_are_enough(self) -> None:
        wanted = self.alone(7)["7"]
        for mode in self.modes:
            here, there = self.begun(mode)
            there.import_sequence(replace(here.export_sequence("7"), rest=None))
            assert here.cancel("7")
            done = drain(there)["7"]
            assert bits(done) == wanted
            assert (done.stats.num_moves, there.stats().num_moves) == (1, 1)

    @pytest.mark.parametrize("num_steps", [0, 1, 5])
    def test_an_exported_sequence_is_ours_until_it_is_cancelled(self, num_steps: int) -> None:
        wanted = self.alone(7)["7"]
        for mode in self.modes:
            here, _ = self.begun(mode, num_steps=num_steps)
            here.export_sequence("7")
            assert not here.has_work
            assert not is_here(here, "7")
            with pytest.raises(InvalidRequest, match="already in the engine"):
                here.submit(request("7"))
            here.reattach("7")
            assert bits(drain(here)["7"]) == wanted
            for call in (here.reattach, here.export_sequence, here.manifest):
                with pytest.raises(InvalidRequest, match="request_id"):
                    call("7")

    def test_views_tell_what_waits_and_what_was_generated(self) -> None:
        for mode in self.modes:
            here, _ = self.pair(mode)
            here.submit(request("7", _MOVED_PROMPT, max_tokens=30))
            [view] = here.sequences()
            expected = ("7", True, 0, len(_MOVED_PROMPT), len(_MOVED_PROMPT))
            assert (view.id, view.is_waiting, view.num_generated, view.num_held, view.num_prefill) == expected
            for _ in range(4):
                here.step()
            [view] = here.sequences()
            assert not view.is_waiting
            assert view.num_generated > 0
            assert (view.num_held, view.num_prefill) == (len(_MOVED_PROMPT) + view.num_generated, 0)


class MovableWithKVContract(MovableByTokensContract):
    ways = (*MovableByTokensContract.ways, at_once, reserved, in_rounds)

    def pair(self, mode: Any) -> tuple[Any, Any]:
        here, there = super().pair(mode)
        assert here.abilities.moves_kv is here
        return here, there

    def test_the_kv_comes_along_and_nothing_is_computed_again(self) -> None:
        wanted = self.alone(7)["7"]
        for mode in self.modes:
            here, there = self.begun(mode)
            at_once(here, there, "7", np.random.default_rng(0), GainStreams())
            report = there.step()
            assert (report.num_prefill_tokens, report.num_decoding) == (0, 1)
            assert there.stats().num_recomputed_tokens == 0
            assert bits(([*report.finished] or [drain(there)["7"]])[0]) == wanted

    def test_a_reservation_is_given_up_by_cancelling_it(self) -> None:
        for mode in self.modes:
            here, there = self.begun(mode, num_steps=1)
            there.import_range(here.export_range("7", there.reserve(here.manifest("7"))))
            assert there.stats().num_free_blocks < there.stats().num_blocks
            assert not there.has_work
            assert there.cancel("7")
            there.check_integrity()
            assert there.stats().num_free_blocks == there.stats().num_blocks

    def test_a_sequence_that_finished_in_mid_copy_is_refused_by_name(self) -> None:
        for mode in self.modes:
            here, there = self.begun(mode, num_steps=1, max_tokens=SHORT)
            kv = here.export_range("7", there.reserve(here.manifest("7")))
            there.import_range(kv)
            assert set(drain(here)) == {"7"}
            for call in (here.export_range, here.export_sequence):
                with pytest.raises(InvalidRequest, match="request_id"):
                    call("7", kv.end)
            assert there.cancel("7")
            with pytest.raises(SequenceStateError, match="reservation"):
                there.import_range(kv)

    def test_a_changed_byte_is_refused_and_changes_nothing(self) -> None:
        wanted = self.alone(7)["7"]
        for mode in self.modes:
            here, there = self.begun(mode)
            kv = here.export_range("7", there.reserve(here.manifest("7")))
            changed = tuple(part.copy() for part in kv.kv)
            changed[0].reshape(-1)[0] ^= 1
            with pytest.raises(SequenceStateError, match="checksum"):
                there.import_range(replace(kv, kv=changed))
            there.import_range(kv)
            there.import_sequence(here.export_sequence("7", kv.end))
            assert here.cancel("7")
            assert bits(drain(there)["7"]) == wanted

    def test_an_engine_of_other_weights_refuses_before_any_kv_is_sent(self) -> None:
        wanted = self.alone(7)["7"]
        for mode in self.modes:
            here, there = self.begun(mode)
            there.load_weights(perturbed(reference(), 0.3).state_dict(), version=1)
            with pytest.raises(SequenceStateError, match="weights_version"):
                there.reserve(here.manifest("7"))
            assert there.stats().num_free_blocks == there.stats().num_blocks
            assert bits(drain(here)["7"]) == wanted

    def test_a_range_begins_where_the_last_one_ended(self) -> None:
        for mode in self.modes:
            here, there = self.begun(mode)
            start = there.reserve(here.manifest("7"))
            first = here.export_range("7", start, max_bytes=3000)
            assert 0 < first.num_positions < len(_MOVED_PROMPT)
            assert first.start == start
            assert isinstance(first.end, Watermark)
            rest = here.export_range("7", first.end)
            with pytest.raises(SequenceStateError):
                there.import_range(rest)
            for kv in (first, rest):
                there.import_range(kv)

"""Moves of sequences between engines. Bad input is refused before anything changes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from rlhfspec.engine.base import MOST_RANGE_BYTES, Bytes, KVRange, Manifest, SequenceState, SequenceView, Watermark
from rlhfspec.engine.kv import arrival
from rlhfspec.engine.kv.space import KVSpace
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.kv.state_bytes import checksum_of
from rlhfspec.engine.scheduling.scheduler import Scheduler
from rlhfspec.engine.scheduling.sequences import MOVES, PREEMPTIONS, Generated, Sequence
from rlhfspec.engine.scheduling.speculation import Speculator
from rlhfspec.errors import InvalidRequest, SequenceStateError


class Moves:
    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.scheduler = Scheduler(state)
        self.speculation = Speculator(state, self.scheduler)
        self.scheduler.watch(self.speculation)
        self.num_imported = 0
        self.num_recomputed = 0  # tokens of imported sequences that had KV there and must run here again

    def sequences(self) -> tuple[SequenceView, ...]:
        lengths, cached = self.state.rows.lengths.tolist(), self.state.target.cached.tolist()
        views: list[SequenceView] = []
        for name, sequence in self.state.sequences.items():
            length = lengths[sequence.row] if sequence.has_row else sequence.num_tokens
            held = sequence.resting[0].num_cached if sequence.resting else 0
            missing = length - (cached[sequence.row] if sequence.has_row else held)
            generated = length - len(sequence.request.prompt_token_ids)
            views.append(
                SequenceView(
                    id=name,
                    num_generated=generated,
                    num_held=length,
                    num_prefill=missing if missing > 1 else 0,
                    is_waiting=not sequence.has_row,
                )
            )
        return tuple(views)

    def manifest(self, request_id: str) -> Manifest:
        sequence, target = self._ours(request_id), self.state.target
        return Manifest(
            schema=arrival.SCHEMA,
            fingerprints=tuple(space.runner.fingerprint() for space in self.state.spaces),
            architecture=target.runner.architecture,
            weights_version=self.state.weights_version,
            epoch=sequence.epoch,
            num_tokens=int(self.state.rows.lengths[sequence.row]) if sequence.has_row else sequence.num_tokens,
            request=replace(sequence.request, history=()),
        )

    def export_range(
        self, request_id: str, start: Watermark, *, max_bytes: int = MOST_RANGE_BYTES, out: Bytes | None = None
    ) -> KVRange:
        return self._pack(self._ours(request_id), start, max_bytes, out)

    def export_sequence(self, request_id: str, start: Watermark | None = None) -> SequenceState:
        if request_id not in self.state.sequences:
            raise InvalidRequest("request_id", request_id, "no such sequence here")
        sequence, manifest = self.state.sequences[request_id], self.manifest(request_id)
        everything = Watermark(epoch=sequence.epoch, positions=(0,) * len(self.state.spaces))
        rest = self._pack(sequence, start or everything, None, None)
        learnt = self.speculation.learnt(sequence)
        self.scheduler.detach(sequence)
        done = sequence.generated
        return SequenceState(
            manifest=manifest,
            rest=rest if sequence.has_row else None,
            token_ids=done.token_ids,
            log_probs=done.log_probs,
            tempered_log_probs=done.tempered_log_probs,
            weights_versions=done.weights_versions,
            counters=tuple(done.counters.tolist()),
            strategies=tuple(sorted(done.strategies.items())),
            acceptance=learnt,
            history=sequence.request.history,
            age_seconds=time.monotonic() - sequence.arrived,
        )

    def reattach(self, request_id: str) -> None:
        if request_id not in self.scheduler.away:
            raise InvalidRequest("request_id", request_id, "was not exported from here")
        self.scheduler.reattach(self.scheduler.away[request_id])

    def _ours(self, request_id: str) -> Sequence:
        sequence = self.state.sequences.get(request_id) or self.scheduler.away.get(request_id)
        if sequence is None:
            raise InvalidRequest("request_id", request_id, "no such sequence here")
        return sequence

    def _pack(self, sequence: Sequence, start: Watermark, max_bytes: int | None, out: Bytes | None) -> KVRange:
        arrival.check_watermark(start, sequence.epoch, len(self.state.spaces))
        ends = self._ends(sequence, start, max_bytes)
        sizes = [space.bytes_per_position for space in self.state.spaces]
        counts = [max(0, end - first) for first, end in zip(start.positions, ends, strict=True)]
        needed = sum(count * size for count, size in zip(counts, sizes, strict=True))
        if out is None:
            out = np.empty(needed, np.uint8)
        arrival.check_out(out, needed)
        parts: list[Bytes] = []
        for space, first, count, size in zip(self.state.spaces, start.positions, counts, sizes, strict=True):
            part, out = out[: count * size].reshape(count, size), out[count * size :]
            space.read(sequence.row, first, part)
            parts.append(part)
        kv = tuple(parts)
        return KVRange(request_id=sequence.request.id, start=start, kv=kv, checksum=checksum_of(kv))

    def _ends(self, sequence: Sequence, start: Watermark, max_bytes: int | None) -> list[int]:
        ends: list[int] = []
        is_empty = True
        for space, first in zip(self.state.spaces, start.positions, strict=True):
            end = int(space.cached[sequence.row]) if sequence.has_row else 0
            if max_bytes is not None:
                size = space.bytes_per_position
                end = min(end, first + max(max_bytes // size, is_empty))
                max_bytes = max(0, max_bytes - max(0, end - first) * size)
            is_empty = is_empty and end <= first
            ends.append(end)
        return ends

    def reserve(self, manifest: Manifest) -> Watermark:
        sequence = self._new(manifest, history=())
        self.scheduler.refuse_known(sequence.request.id)
        arrival.check_weights(manifest, self.state)
        if not self.scheduler.reserve(sequence, manifest.num_tokens, in_ranges=True):
            raise self._no_room(f"{manifest.num_tokens} tokens")
        cached = [
            arrival.NOT_WANTED if space is None else int(space.cached[sequence.row]) for space in self._spaces(manifest)
        ]
        return Watermark(epoch=manifest.epoch, positions=tuple(cached))

    def import_range(self, kv: KVRange) -> None:
        arrival.check_type("kv", kv, KVRange)
        arrival.check_type("request_id", kv.request_id, str)
        sequence = self.scheduler.arriving.get(kv.request_id)
        if sequence is None or sequence.origin is None or not sequence.has_row:
            raise SequenceStateError("reservation", kv.request_id, "none, or dropped because its room was needed")
        request, spaces = sequence.request, self._spaces(sequence.origin)
        limit = len(request.prompt_token_ids) + request.params.max_tokens
        arrival.check_range(kv, sequence.origin, spaces, limit)
        arrival.check_no_gap(kv, sequence.row, spaces)
        arrival.check_content(kv)
        wanted = zip(kv.start.positions, kv.kv, spaces, strict=True)
        end = max((first + len(part) for first, part, space in wanted if space and len(part)), default=0)
        if not self.scheduler.has_slots(sequence, end):
            raise self._no_room(f"{kv.num_positions} positions")
        self._write(kv, sequence, spaces)
        self.scheduler.landed(sequence)

    def import_sequence(self, arrived: SequenceState) -> None:
        arrival.check_type("state", arrived, SequenceState)
        manifest, rest = arrived.manifest, arrived.rest
        sequence = self._new(manifest, history=arrived.history)
        num_tokens, reserved = manifest.num_tokens, self.scheduler.arriving.get(sequence.request.id)
        if reserved is None:
            self.scheduler.refuse_known(sequence.request.id)
        arrival.check_state(arrived, self.state.target.runner.num_token_ids, sequence.stop_ids)
        spaces, is_alike = self._spaces(manifest), manifest.architecture == self.state.target.runner.architecture
        has_kv = is_alike and manifest.weights_version == self.state.weights_version
        if has_kv:
            arrival.check_weights(manifest, self.state)
        if rest is not None:
            arrival.check_range(rest, manifest, spaces, num_tokens)
            if has_kv and reserved is not None and reserved.has_row:
                arrival.check_no_gap(rest, reserved.row, spaces)
        if reserved is not None:
            arrival.check_reserved(manifest, reserved, self.state.spaces)
        if rest is not None:
            arrival.check_content(rest)
        # Nothing is refused from here on.
        if reserved is not None:
            reserved.request, sequence = sequence.request, reserved
        elif not (has_kv and rest is not None and self.scheduler.reserve(sequence, num_tokens, in_ranges=False)):
            self.scheduler.arriving[sequence.request.id] = sequence
        if sequence.has_row and not self.scheduler.has_slots(sequence, num_tokens + 1):
            self.scheduler.reclaim([sequence])
        if sequence.has_row and has_kv and rest is not None:
            self._write(rest, sequence, spaces)
            self.scheduler.landed(sequence)
        if sequence.has_row:
            self.scheduler.keep_promises(sequence)
        self._settle(sequence, arrived)

    def _settle(self, sequence: Sequence, arrived: SequenceState) -> None:
        counters = np.array(arrived.counters, np.int32)
        counters[MOVES] += 1
        if not sequence.has_row and arrived.manifest.epoch:  # its KV is recomputed
            counters[PREEMPTIONS] += 1
            self.scheduler.num_preemptions += 1
        sequence.generated = Generated(
            arrived.token_ids.copy(), arrived.log_probs.copy(), arrived.tempered_log_probs.copy(),
            arrived.weights_versions.copy(), counters, dict(arrived.strategies),
        )  # fmt: skip
        sequence.arrived = time.monotonic() - arrived.age_seconds
        self.scheduler.settle(sequence)
        self.speculation.take_over(sequence, arrived.acceptance)
        self.num_imported += 1
        if arrived.manifest.epoch:  # epoch 0: it had no KV there either
            had, rest = arrived.manifest.num_tokens - 1, arrived.rest
            had = had if rest is None else min(had, rest.end.positions[0])
            cached = int(self.state.target.cached[sequence.row]) if sequence.has_row else 0
            self.num_recomputed += max(0, had - cached)

    def _new(self, manifest: Manifest, *, history: tuple[tuple[int, ...], ...]) -> Sequence:
        architecture = self.state.target.runner.architecture
        arrival.check_manifest(manifest, architecture=architecture, weights_version=self.state.weights_version)
        request = replace(manifest.request, history=history)
        self.state.validate(request)
        sequence = self.state.new_sequence(request, Generated.of_prompt(request.prompt_token_ids))
        sequence.origin = manifest
        return sequence

    def _spaces(self, manifest: Manifest) -> list[KVSpace | None]:
        """Return the local KV space of each manifest model (target, draft); None for a draft that differs."""
        ours = dict(zip(range(2), self.state.spaces, strict=False))
        found = [ours.get(index) for index in range(len(manifest.fingerprints))]
        same = zip(found, manifest.fingerprints, strict=True)
        return [found[0], *[s if s and s.runner.fingerprint() == theirs else None for s, theirs in list(same)[1:]]]

    def _write(self, kv: KVRange, sequence: Sequence, spaces: list[KVSpace | None]) -> None:
        for space, first, part in zip(spaces, kv.start.positions, kv.kv, strict=True):
            have = 0 if space is None else int(space.cached[sequence.row])
            if space is not None and first <= have:
                space.write(sequence.row, have, part[have - first :])

    def _no_room(self, wanted: str) -> SequenceStateError:
        rows, blocks = len(self.state.rows.free_rows), self.state.pool.num_free
        return SequenceStateError("room", wanted, f"{rows} free rows, {blocks} free blocks")

"""Step scheduling: admission, prompt chunks, room for trees, preemption. It never changes tokens (docs/law.md)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from rlhfspec.common.arrays import BoolArray, IntArray
from rlhfspec.engine.drafting.cost import CostModel
from rlhfspec.engine.kv.cache import Prefix, check_blocks, check_slots, give_back
from rlhfspec.engine.kv.prefixes import Found, Prefixes
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling.pausing import beside_clients
from rlhfspec.engine.scheduling.sequences import PREEMPTIONS, Sequence, by_age
from rlhfspec.errors import InvalidRequest

_ROWS_PER_SPARE_ROW = 16  # while clients are served, one in so many stays free for the next, and no sample loses its KV
_RUNNING_PER_SPARE_BLOCK = 4  # blocks left free at admission, so that a new sequence is not preempted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Rows of one step: decode rows lack KV of exactly one token; prefill rows lack more, and run a chunk."""

    decode_rows: IntArray  # [B]
    prefill_rows: IntArray  # [P]
    prefill_starts: IntArray  # [P] first position of the chunk
    prefill_counts: IntArray  # [P]
    num_paused: int = 0  # decode rows left out
    most_rows: int | None = None  # with those of tree nodes, for the clients' time per token

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.prefill_counts.sum())

    @property
    def empty(self) -> bool:
        return not len(self.decode_rows) and not len(self.prefill_rows)


class RowWatcher(Protocol):
    def start(self, sequence: Sequence) -> None:
        """Handle a sequence that has taken a row."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that is about to leave its row."""
        ...


class Scheduler:
    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.pool = state.pool
        self.rows = state.rows
        self.waiting: deque[Sequence] = deque()  # higher priorities first
        self.running: list[Sequence] = []  # the youngest is preempted first
        self.away: dict[str, Sequence] = {}  # exported, until they are cancelled or taken back
        self.arriving: dict[str, Sequence] = {}  # hold rows and blocks for what another engine sends
        self.staying: dict[str, Sequence] = {}  # finished but extensible; the first one loses its KV first
        self.prefixes = Prefixes(state)
        self.promised: dict[bytes, int] = {}  # prefix hash -> whole prompt block that an arriving sequence will fill
        self.num_preemptions = 0
        self.num_found_tokens = 0  # tokens to prefill whose KV was already there
        self._watchers: list[RowWatcher] = []
        self._epochs = count(time.time_ns())  # never equal to those of another engine or an earlier process

    def watch(self, watcher: RowWatcher) -> None:
        self._watchers.append(watcher)

    def find(self, request_id: str) -> Sequence | None:
        places = (self.state.sequences, self.away, self.arriving, self.staying)
        return next((place[request_id] for place in places if request_id in place), None)

    def refuse_known(self, request_id: str) -> None:
        if self.find(request_id) is not None:
            raise InvalidRequest("id", request_id, "is already in the engine")

    def enqueue(self, sequence: Sequence, *, first: bool = False) -> None:
        """Let a sequence wait behind those of its priority, or `first` among them."""
        own = sequence.request.priority
        before = (each.request.priority > own - (not first) for each in self.waiting)
        self.waiting.insert(sum(before), sequence)

    def admit(self) -> None:
        self._make_way()
        self._admit()
        while self.waiting and not self.running and self.reclaim((*self.away.values(), *self.arriving.values())):
            self._admit()  # nothing runs, so only moving sequences can make room
        self.prefixes.copy_tails()

    def _make_way(self) -> None:
        """Preempt sequences of lower priority than those that wait, if these find no free row."""
        num_free = len(self.rows.free_rows)
        for urgent in list(self.waiting):
            if not self._lower_than(urgent):
                return
            if urgent.resting or not self._is_pending(urgent, self.prefixes.find(urgent)):
                if not num_free:
                    self.preempt(self._lower_than(urgent)[-1])
                num_free = max(num_free - 1, 0)

    def _lower_than(self, urgent: Sequence) -> list[Sequence]:
        """Return the running sequences of lower priority, the youngest last."""
        return [each for each in self.running if each.request.priority < urgent.request.priority]

    def _is_pending(self, sequence: Sequence, found: Found) -> bool:
        """Return whether a sequence waits for a prefix. It never waits for lower priorities, which may pause."""
        block, lower = found.pending, self._lower_than(sequence) if sequence.request.priority > 0 else ()
        return block is not None and not any(block in each.blocks for each in lower)

    def _admit(self) -> None:
        """Admit waiting sequences, except those whose prefix another sequence is computing."""
        passed: list[Sequence] = []
        while self.waiting and self._has_row(self.waiting[0]):
            sequence = self.waiting.popleft()
            found = Found() if sequence.resting else self.prefixes.find(sequence)
            if self._is_pending(sequence, found):
                passed.append(sequence)
                continue
            if not self._has_room(sequence, sequence.num_tokens, found.blocks):
                if lower := self._lower_than(sequence):
                    self.preempt(lower[-1])
                    self.waiting.appendleft(sequence)
                    continue
                passed.append(sequence)
                break
            tails = self.prefixes.tails(found)
            self._enter_row(sequence, sequence.num_tokens, found.blocks)
            for space, block in tails:
                space.copy_later(sequence, block)
            self.num_found_tokens += int(self.state.target.cached[sequence.row])
            self.running.append(sequence)
            self.prefixes.register(sequence)
            self._started(sequence)
        self.waiting.extendleft(reversed(passed))

    def schedule(self, costs: CostModel) -> StepRows:
        """Choose the rows of a step. While clients are served, the youngest samples pause, as `beside_clients` says."""
        running = sorted(self.running, key=lambda each: -each.request.priority)
        num_clients = sum(each.request.priority > 0 for each in running)
        active = np.fromiter((sequence.row for sequence in running), np.int32, len(running))
        config, cached = self.state.config, self.state.target.cached
        missing = self.rows.lengths[active] - cached[active]
        decodes, chunk = missing == 1, config.prefill_chunk
        most_rows: int | None = None
        if num_clients:
            lengths = self.rows.lengths[active]
            beside, chunk, most_rows = beside_clients(costs, config.target_tpot, num_clients, lengths, missing, chunk)
            decodes[num_clients:] &= decodes[num_clients:].cumsum() <= beside
        prefill, counts = active[missing > 1], missing[missing > 1]
        before = np.cumsum(counts) - counts
        counts = np.minimum(counts, np.maximum(chunk - before, 0)).astype(np.int32)
        prefill, counts = prefill[counts > 0], counts[counts > 0]
        return StepRows(
            decode_rows=active[decodes], prefill_rows=prefill, prefill_starts=cached[prefill], prefill_counts=counts,
            num_paused=int((missing == 1).sum()) - int(decodes.sum()), most_rows=most_rows,
        )  # fmt: skip

    def make_room(self) -> None:
        """Give every running row a slot for its next token, preempting the youngest of the lowest priority for it."""
        capacity = self.state.target.table.capacity
        for sequence in list(self.running):
            while sequence.has_row and capacity[sequence.row] < self.rows.lengths[sequence.row] + 1:
                if self.pool.num_free or self.give_way():
                    self._grow(sequence, 1)
                elif not self.reclaim(tuple(self.away.values())):
                    self.preempt(min(reversed(self.running), key=lambda each: each.request.priority))

    def make_tree_room(self, decode_rows: IntArray, slots_wanted: int) -> None:
        """Give decode rows up to `slots_wanted` slots for tree nodes from free blocks, never evicting a sequence."""
        table = self.state.target.table
        short = table.capacity[decode_rows] - self.rows.lengths[decode_rows] < slots_wanted
        if not short.any():
            return
        needy = set(decode_rows[short].tolist())
        width = table.slots.shape[1]
        for sequence in self.running:
            if sequence.row in needy:
                capacity, length = int(table.capacity[sequence.row]), int(self.rows.lengths[sequence.row])
                blocks = self.pool.blocks_for(min(length + slots_wanted, width) - capacity)
                blocks = min(blocks, self.pool.num_free, (width - capacity) // self.pool.block_size)
                if blocks > 0:
                    self._grow(sequence, blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's memory and put it first in the waiting queue, to recompute its KV."""
        self.rows.counters[sequence.row, PREEMPTIONS] += 1
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._leave_row(sequence)
        self.enqueue(sequence, first=True)

    def remove(self, sequence: Sequence) -> None:
        request_id = sequence.request.id
        if request_id in self.state.sequences:
            del self.state.sequences[request_id]
            (self.running if sequence.has_row else self.waiting).remove(sequence)
        if sequence.has_row:
            self._leave_row(sequence)
        self._lose_rest(sequence)
        for place in (self.away, self.arriving, self.staying):
            place.pop(request_id, None)

    def stay(self, sequence: Sequence) -> None:
        length = int(self.rows.lengths[sequence.row])
        sequence.resting = tuple(space.rest(sequence.row, length) for space in self.state.spaces)
        del self.state.sequences[sequence.request.id]
        self.running.remove(sequence)
        self._leave_row(sequence)
        self.staying[sequence.request.id] = sequence

    def extend(self, longer: Sequence) -> None:
        stayed = self.staying.pop(longer.request.id)
        if stayed.resting:  # blocks after its first prompt cannot be shared: their slots are permuted
            longer.prefix, longer.resting = stayed.prefix, stayed.resting
            longer.blocks, longer.num_shared_blocks = stayed.blocks, stayed.num_shared_blocks
        self.state.sequences[longer.request.id] = longer
        self.enqueue(longer)

    def give_way(self) -> bool:
        """Free the KV that one sequence keeps without a row. Return False if there is none."""
        holder = next(iter(self._holders), None)
        if holder is not None:
            self._lose_rest(holder)
        return holder is not None

    def drop_kv(self) -> None:
        """Drop all KV after the weights changed; running sequences are preempted and recompute."""
        for sequence in reversed(list(self.running)):
            self.preempt(sequence)
        while self.reclaim((*self.away.values(), *self.arriving.values())) or self.give_way():
            pass
        for space in self.state.spaces:  # return memory that was unused under the last weights
            give_back(space.runner.kv, first_block=self.pool.num_touched)
        self.pool.forget()

    def detach(self, sequence: Sequence) -> None:
        """Stop running an exported sequence; it keeps row and blocks until others need them."""
        del self.state.sequences[sequence.request.id]
        (self.running if sequence.has_row else self.waiting).remove(sequence)
        self.away[sequence.request.id] = sequence
        self._lose_rest(sequence)
        if sequence.has_row:
            self.rows.save(sequence)

    def reattach(self, sequence: Sequence) -> None:
        del self.away[sequence.request.id]
        self.state.sequences[sequence.request.id] = sequence
        by_age(self.running if sequence.has_row else self.waiting, sequence)

    def reserve(self, sequence: Sequence, num_tokens: int, *, in_ranges: bool) -> bool:
        """Reserve a row and blocks for a sequence that moves here. Return False if there is no room.

        Prompt blocks of samples of that prompt are shared; with `in_ranges`, also those still arriving.
        """
        shared = self.prefixes.find(sequence).blocks
        num_there = len(shared)
        hashes = sequence.prefix.hashes
        for prefix_hash in hashes[num_there:] if in_ranges else ():
            if prefix_hash not in self.promised:
                break
            shared.append(self.promised[prefix_hash])
        if not self._has_row(sequence) or not self._has_room(sequence, num_tokens, shared):
            return False
        num_shared = len(shared)
        self._enter_row(sequence, num_tokens, shared)
        self.arriving[sequence.request.id] = sequence
        filled = [space.num_filled(sequence.blocks[:num_there]) for space in self.state.spaces]
        sequence.num_promised = tuple(num_shared if each == num_there else each for each in filled)
        for space, num_blocks in zip(self.state.spaces, sequence.num_promised, strict=True):
            space.cached[sequence.row] = num_blocks * self.pool.block_size  # `keep_promises` checks again
        if self.state.config.prefix_sharing:
            self.promised |= zip(hashes[num_shared:], sequence.blocks[num_shared:], strict=False)
        return True

    def landed(self, sequence: Sequence) -> None:
        for space, first in zip(self.state.spaces, sequence.num_promised, strict=True):
            space.mark_prefix(sequence, first=first)
        for prefix_hash, block in zip(sequence.prefix.hashes, sequence.blocks, strict=False):
            if self.promised.get(prefix_hash) == block and self.state.target.filled[block]:
                del self.promised[prefix_hash]
                self.pool.register(prefix_hash, block)

    def keep_promises(self, sequence: Sequence) -> None:
        """Discard KV from the first shared block that another arriving sequence has not filled."""
        for space, num_blocks in zip(self.state.spaces, sequence.num_promised, strict=True):
            filled = space.num_filled(sequence.blocks[:num_blocks])
            if filled < num_blocks:
                space.cached[sequence.row] = filled * self.pool.block_size
                if space is self.state.target:
                    self._leave_row(sequence)  # wait, in case the sibling still sends it
                    return

    def has_slots(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = num_tokens - int(self.state.target.table.capacity[sequence.row])
        blocks = self.pool.blocks_for(max(missing, 0))
        if blocks > self.num_available:
            return False
        while blocks > self.pool.num_free and self.give_way():
            pass
        self._grow(sequence, blocks)
        return True

    def settle(self, sequence: Sequence) -> None:
        del self.arriving[sequence.request.id]
        self.state.sequences[sequence.request.id] = sequence
        by_age(self.running if sequence.has_row else self.waiting, sequence)
        if sequence.has_row:
            self.rows.write(sequence)
            self._withdraw_promises(sequence)
            self.prefixes.register(sequence)
            for space in self.state.spaces:
                space.mark_prefix(sequence)
            self._started(sequence)

    def _started(self, sequence: Sequence) -> None:
        for watcher in self._watchers:
            watcher.start(sequence)

    @property
    def room(self) -> int:
        """Estimate how many more sequences fit, at the mean size of running ones (none: at full context)."""
        whole = self.pool.blocks_for(self.state.config.max_context)
        free = self.num_available
        each = max((self.pool.num_blocks - free) // len(self.running), 1) if self.running else whole
        room = min(max(len(self.rows.free_rows) - self._num_spare, 0), free // each)
        return room if self.running else max(room, 1)

    @property
    def num_available(self) -> int:
        """Return the number of blocks that are free or held by sequences without a row."""
        return int(self._available.sum())

    @property
    def _available(self) -> BoolArray:
        owners = self.pool.references.copy()
        for holder in self._holders:
            owners[holder.blocks] -= 1
        return np.equal(owners, 0)

    @property
    def _holders(self) -> list[Sequence]:
        """Return sequences that keep blocks without a row, in eviction order."""
        return [each for each in (*self.staying.values(), *reversed(self.waiting)) if each.resting]

    @property
    def _num_spare(self) -> int:
        return any(each.request.priority > 0 for each in self.running) * len(self.rows.lengths) // _ROWS_PER_SPARE_ROW

    def _has_row(self, sequence: Sequence) -> bool:
        return len(self.rows.free_rows) > (0 if sequence.request.priority > 0 else self._num_spare)

    def _has_room(self, sequence: Sequence, num_tokens: int, shared: list[int]) -> bool:
        """Return whether a sequence sharing these blocks fits; if so, free KV of sequences without a row as needed."""
        need = self.pool.blocks_for(num_tokens + 1) - len(shared) - len(sequence.blocks)
        need = max(need, 0) + len(self.running) // _RUNNING_PER_SPARE_BLOCK
        available = self._available
        if need + available[shared].sum() > available.sum():
            return False  # without freeing any sequence's KV
        while need + self.pool.num_kept(shared) > self.pool.num_free and self.give_way():
            pass
        return True

    def _enter_row(self, sequence: Sequence, num_tokens: int, shared: list[int]) -> None:
        sequence.epoch = next(self._epochs)
        if not sequence.resting:
            self.pool.retain(shared)
            sequence.blocks, sequence.num_shared_blocks = shared, len(shared)
        self.state.by_row[self.rows.enter(sequence)] = sequence
        for index, space in enumerate(self.state.spaces):
            if sequence.resting:
                space.resume(sequence.row, sequence.resting[index], num_tokens)
            else:
                space.enter(sequence)
        sequence.resting = ()
        self._grow(sequence, max(self.pool.blocks_for(num_tokens + 1) - len(sequence.blocks), 0))

    def _grow(self, sequence: Sequence, count: int) -> None:
        blocks = self.pool.allocate(count)
        sequence.blocks.extend(blocks)
        for space in self.state.spaces:
            space.grow(sequence.row, blocks)

    def _leave_row(self, sequence: Sequence) -> None:
        if sequence.request.id not in self.arriving:
            for watcher in self._watchers:
                watcher.forget(sequence)
        self._withdraw_promises(sequence)
        for space in self.state.spaces:
            space.leave(sequence.row)
        del self.state.by_row[sequence.row]
        self.rows.leave(sequence)
        sequence.epoch = 0
        if not sequence.resting:
            self._let_go(sequence)

    def _lose_rest(self, sequence: Sequence) -> None:
        if sequence.resting:
            sequence.resting = ()
            self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Release a sequence's KV blocks; if `extend` grew its prompt, hash the prefix again."""
        self.pool.release(sequence.blocks, self.state.target.filled)
        sequence.blocks, sequence.num_shared_blocks = [], 0
        if sequence.prefix.num_tokens != len(sequence.request.prompt_token_ids) - 1:
            sequence.prefix = Prefix.of(sequence.request.prompt_token_ids, self.pool.block_size)

    def _withdraw_promises(self, sequence: Sequence) -> None:
        """Stop sharing the blocks that this arriving sequence was to fill."""
        first = sequence.num_shared_blocks
        for prefix_hash, block in zip(sequence.prefix.hashes[first:], sequence.blocks[first:], strict=False):
            if self.promised.get(prefix_hash) == block:
                del self.promised[prefix_hash]

    def reclaim(self, moving: Iterable[Sequence]) -> bool:
        """Free row and blocks of one of the moving sequences. Return False if none has any."""
        holder = next((sequence for sequence in moving if sequence.has_row), None)
        if holder is not None:
            self._leave_row(holder)
        return holder is not None

    def check(self) -> None:
        on_rows = list(self.state.by_row.values())
        resting = self._holders
        check_blocks(self.pool, [each.blocks for each in (*on_rows, *resting)], self.state.target.filled)
        for sequence in resting:
            assert not sequence.has_row, f"{sequence.request.id} rests, and has a row"
            for kv in sequence.resting:
                check_slots(sequence.request.id, kv.slots, sequence.blocks, self.pool.block_size)
        for sequence in on_rows:
            self.state.check_row(sequence)
            for space in () if sequence.request.id in self.arriving else self.state.spaces:
                cached, length = space.cached[sequence.row], self.rows.lengths[sequence.row]
                assert 0 <= cached < length, f"row {sequence.row}: KV of {cached} positions, {length} tokens"
        moving = [*self.away.values(), *self.arriving.values()]
        num_rows = len(self.running) + sum(sequence.has_row for sequence in moving)
        assert len(on_rows) == num_rows == len(self.rows.lengths) - len(self.rows.free_rows), "rows leaked"
        assert len(self.state.sequences) == len(self.running) + len(self.waiting), "sequences leaked"
        everywhere = [*self.state.sequences, *self.away, *self.arriving, *self.staying]
        assert len(set(everywhere)) == len(everywhere), "a sequence is in two places"
        leased = {block for sequence in self.arriving.values() for block in sequence.blocks}
        assert leased.issuperset(self.promised.values()), "a block is promised that no move fills"

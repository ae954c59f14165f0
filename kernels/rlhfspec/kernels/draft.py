"""Native CPU call that grows draft trees after their first level. Reference: `rlhfspec.engine.drafting.model`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.decoder import NativeDecoder
from rlhfspec.kernels.tree_attention import PROBLEMS

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LOG_ODDS_SHAPE = (3, 4, 256)  # depth 1 / 2 / 3+, rank 0 / 1 / 2 / 3+, gap in steps of 1/8

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_UINT64, _FLOAT32, _FLOAT64 = np.dtype(np.uint64), np.dtype(np.float32), np.dtype(np.float64)
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_PROBLEMS = {-1: "slot_table: a slot outside the cache", -2: "temperatures: every value must be finite and >= 0"}


class CostCurve(Protocol):
    """Seconds of a forward by its number of rows: piecewise linear through (`rows`, `knots`) [n], times `factor`."""

    @property
    def rows(self) -> Doubles: ...
    @property
    def knots(self) -> Doubles: ...
    @property
    def factor(self) -> float: ...


class LevelTermsProtocol(Protocol):
    @property
    def target(self) -> CostCurve: ...
    @property
    def level(self) -> CostCurve: ...
    @property
    def tokens_per_second(self) -> float: ...
    @property
    def success(self) -> float: ...
    @property
    def verified_rows(self) -> int: ...


class _Curve(ctypes.Structure):
    _fields_ = [("rows", _POINTER), ("knots", _POINTER), ("count", _LONG), ("factor", _DOUBLE)]


class _Rule(ctypes.Structure):
    """Mirror of struct PayingLevel in csrc/draft_rules.h."""

    _fields_ = [
        ("target", _Curve), ("level", _Curve),
        ("tokens_per_second", _DOUBLE), ("success", _DOUBLE), ("verified_rows", _LONG),
    ]  # fmt: skip


class _DraftStruct(ctypes.Structure):
    """Mirror of struct Draft in csrc/draft.cpp."""

    _fields_ = [
        ("decoder", _POINTER), ("vocab_size", _LONG), ("num_slots", _LONG), ("threads", _LONG),
        ("rows", _POINTER), ("lengths", _POINTER), ("prompt_lengths", _POINTER), ("room", _POINTER),
        ("seeds", _POINTER), ("temperatures", _POINTER), ("shifts", _POINTER), ("num_sequences", _LONG),
        ("capacity", _POINTER), ("slot_table", _POINTER),
        ("table_height", _LONG), ("table_width", _LONG), ("table_stride", _LONG),
        ("roots", _POINTER), ("root_tokens", _POINTER), ("root_scores", _POINTER), ("num_roots", _LONG), ("k", _LONG),
        ("log_odds", _POINTER), ("depth", _LONG), ("width", _LONG), ("branch", _LONG),
        ("nodes", _POINTER), ("chances", _POINTER), ("expanded", _POINTER),
        ("most_nodes", _LONG), ("most_expanded", _LONG), ("level_rows", _POINTER),
        ("num_nodes", _LONG), ("num_levels", _LONG), ("problem", _LONG), ("problem_row", _LONG),
        ("has_rule", _LONG), ("rule", _Rule),
    ]  # fmt: skip


class _KeepStruct(ctypes.Structure):
    """Mirror of struct Keep in csrc/draft.cpp."""

    _fields_ = [
        ("sequence", _POINTER), ("parent", _POINTER), ("token", _POINTER), ("held_at", _POINTER),
        ("level_rows", _POINTER), ("num_levels", _LONG),
        ("rows", _POINTER), ("lengths", _POINTER), ("new_lengths", _POINTER),
        ("tokens", _POINTER), ("slot_table", _POINTER), ("cached", _POINTER), ("alive", _POINTER),
        ("token_stride", _LONG), ("table_stride", _LONG),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class GrownNodes:
    """M tree nodes in level order. The draft model ran E of them (expanded) to get their children."""

    nodes: Ints  # [5, M] sequence, parent, depth, token, rank
    chances: Floats  # [2, M] gap, path acceptance
    expanded: Ints  # [4, E] sequence, parent (in the level above, -1 = root), token, place in the row's slot table
    level_rows: npt.NDArray[np.int64]  # [levels] nodes expanded for the second level, the third, ...


class NativeDraft:
    def __init__(self, decoder: NativeDecoder) -> None:
        self.decoder = decoder
        self._struct = _DraftStruct()
        self._reference = ctypes.byref(self._struct)
        self._grow = build.function("draft_grow")
        self._grow.argtypes = [_POINTER]
        build.check_sizes("draft", ctypes.sizeof(_DraftStruct), ctypes.sizeof(_KeepStruct))
        self._tables: tuple[Ints | None, Ints | None] = (None, None)
        self._most = (0, 0, 0)  # buffer capacity: nodes, expanded nodes, levels

    def grow(
        self, *, rows: Ints, lengths: Ints, prompt_lengths: Ints, room: Ints, seeds: npt.NDArray[np.uint64],
        temperatures: Floats, shifts: Doubles, capacity: Ints, slot_table: Ints,
        roots: Ints, tokens: Ints, scores: Floats, log_odds: Doubles,
        depth: int, width: int, branch: int, terms: LevelTermsProtocol | None,
    ) -> GrownNodes:  # fmt: skip
        """Grow trees of up to `depth` levels. Each level gives its best `width` * B nodes `branch` children.

        [B] by sequence: rows (of slot_table [R, L]), lengths, room (tokens still allowed), shifts (of log_odds), etc.
        capacity [R]: slots that a row owns. roots [n]: sequences with first candidates tokens, scores [n, k].
        terms: costs by which another level must pay for itself; None: all levels are grown.
        """
        size, num_roots, k = len(rows), len(roots), tokens.shape[1]
        if not (1 <= branch <= k and k >= 2 and width >= 1 and depth >= 1):
            raise ValueError(f"branch, width, depth: out of range (got {branch}, {width}, {depth} of {k} candidates)")
        struct = self._struct
        for name, array, dtype in (
            ("rows", rows, _INT32), ("lengths", lengths, _INT32), ("prompt_lengths", prompt_lengths, _INT32),
            ("room", room, _INT32), ("seeds", seeds, _UINT64), ("temperatures", temperatures, _FLOAT32),
            ("shifts", shifts, _FLOAT64),
        ):  # fmt: skip
            setattr(struct, name, _address(name, array, dtype, size))
        struct.num_sequences = size
        struct.roots = _address("roots", roots, _INT32, num_roots)
        struct.root_tokens = _address("tokens", tokens, _INT32, num_roots * k)
        struct.root_scores = _address("scores", scores, _FLOAT32, num_roots * k)
        struct.num_roots, struct.k = num_roots, k
        struct.log_odds = _address("log_odds", log_odds, _FLOAT64, int(np.prod(LOG_ODDS_SHAPE)))
        struct.depth, struct.width, struct.branch = depth, width, branch
        self._use_table(slot_table, capacity)
        self._make_room((num_roots + (depth - 1) * width * size) * branch, (depth - 1) * width * size, depth - 1)
        self._use_terms(terms)
        struct.decoder, struct.threads = self.decoder.address, build.num_threads()
        struct.vocab_size, struct.num_slots = self.decoder.vocab_size, self.decoder.num_slots
        struct.num_nodes = struct.num_levels = 0
        self._grow(self._reference)
        if struct.problem:
            problem = _PROBLEMS.get(struct.problem) or PROBLEMS[struct.problem]
            raise ValueError(f"{problem} (row {struct.problem_row} of a draft's level)")
        num_nodes, num_levels = struct.num_nodes, struct.num_levels
        level_rows = self._level_rows[:num_levels].copy()
        return GrownNodes(
            self._nodes[:, :num_nodes].copy(), self._chances[:, :num_nodes].copy(),
            self._expanded[:, : int(level_rows.sum())].copy(), level_rows,
        )  # fmt: skip

    def _use_table(self, slot_table: Ints, capacity: Ints) -> None:
        if slot_table is self._tables[0] and capacity is self._tables[1]:  # an engine has one table
            return
        self._tables = slot_table, capacity
        struct, height = self._struct, len(capacity)
        struct.capacity = _address("capacity", capacity, _INT32, height)
        struct.slot_table = _address("slot_table", slot_table, _INT32, height * slot_table.shape[1])
        struct.table_height, struct.table_width = slot_table.shape
        struct.table_stride = slot_table.shape[1]

    def _make_room(self, num_nodes: int, num_expanded: int, num_levels: int) -> None:
        if all(have >= wanted for have, wanted in zip(self._most, (num_nodes, num_expanded, num_levels), strict=True)):
            return
        have = self._most
        self._most = most = max(num_nodes, have[0]), max(num_expanded, have[1], 1), max(num_levels, have[2], 1)
        self._nodes, self._chances = np.empty((5, most[0]), np.int32), np.empty((2, most[0]), np.float32)
        self._expanded = np.empty((4, most[1]), np.int32)
        self._level_rows = np.empty(most[2], np.int64)
        struct = self._struct
        struct.most_nodes, struct.most_expanded = most[0], most[1]
        for name in ("nodes", "chances", "expanded", "level_rows"):
            setattr(struct, name, getattr(self, f"_{name}").ctypes.data)

    def _use_terms(self, terms: LevelTermsProtocol | None) -> None:
        self._struct.has_rule = terms is not None
        if terms is None:
            return
        rule = self._struct.rule
        for name, curve in (("target", terms.target), ("level", terms.level)):
            size = len(curve.rows)
            fields = getattr(rule, name)
            fields.rows = _address(f"{name}.rows", curve.rows, _FLOAT64, size)
            fields.knots = _address(f"{name}.knots", curve.knots, _FLOAT64, size)
            fields.count, fields.factor = size, curve.factor
        rule.tokens_per_second, rule.success = terms.tokens_per_second, terms.success
        rule.verified_rows = terms.verified_rows


def keep(
    expanded: Ints, level_rows: npt.NDArray[np.int64], *, rows: Ints, lengths: Ints, new_lengths: Ints,
    tokens: Ints, slot_table: Ints, cached: Ints,
) -> bool:  # fmt: skip
    """Keep the draft KV of accepted nodes by swapping `slot_table` entries; return False without a kernel library.

    rows, lengths (before the draft), new_lengths [B]; tokens [R, T]; cached [R] (positions with KV) is updated.
    """
    kernel = _keep_kernel()
    if kernel is None:
        return False
    size, alive = len(rows), np.empty(expanded.shape[1], np.uint8)
    base = _address("expanded", expanded, _INT32, expanded.size)
    columns = [base + index * expanded.shape[1] * 4 for index in range(4)]
    struct = _KeepStruct(
        *columns, _address("level_rows", level_rows, _INT64, len(level_rows)), len(level_rows),
        _address("rows", rows, _INT32, size), _address("lengths", lengths, _INT32, size),
        _address("new_lengths", new_lengths, _INT32, size),
        _address("tokens", tokens, _INT32, tokens.size), _address("slot_table", slot_table, _INT32, slot_table.size),
        _address("cached", cached, _INT32, len(cached)), alive.ctypes.data, tokens.shape[1], slot_table.shape[1],
    )  # fmt: skip
    kernel(ctypes.byref(struct))
    return True


@functools.cache
def _keep_kernel() -> Any:
    kernel = build.function("draft_keep")
    if kernel is not None:
        kernel.argtypes = [_POINTER]
        build.check_sizes("draft", ctypes.sizeof(_DraftStruct), ctypes.sizeof(_KeepStruct))
    return kernel


def _address(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], size: int) -> int:
    flags = array.flags
    if array.dtype != dtype or array.size != size or not flags.c_contiguous:
        raise ValueError(f"{name}: must be {size} contiguous {dtype} (got {array.size} {array.dtype})")
    if size and flags.writeable:  # several times faster than .ctypes
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return array.ctypes.data

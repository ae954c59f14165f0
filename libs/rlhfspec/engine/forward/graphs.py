"""CUDA graphs of forwards, one per shape bucket in a shared pool. Padding rows write and see nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlhfspec.kernels.tree_attention import AttentionMeta, IndexArray

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
EXTRA_BUCKETS = (0, 4, 8, 16)  # depth of the trees

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMeta], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


@dataclass(slots=True)
class _Captured:
    tokens: torch.Tensor  # [1, bucket]
    positions: torch.Tensor  # [1, bucket]
    meta: AttentionMeta
    replay: Callable[[], torch.Tensor]


class GraphedForward:
    def __init__(self, forward: Forward, device: torch.device, capture: Capture | None = None) -> None:
        self.forward = forward
        self.device = device
        self.capture = capture or CudaCapture()
        self._captured: dict[tuple[int, int, tuple[int, ...]], _Captured] = {}
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}  # by shape: one for all graphs

    def __call__(self, tokens: IndexArray, positions: IndexArray, meta: AttentionMeta) -> torch.Tensor | None:
        """Return hidden states [1, bucket, hidden] of N tokens, valid in the first N rows; None if N is too large."""
        rows, depth = len(tokens), meta.extra.shape[1]
        if rows > ROW_BUCKETS[-1] or depth > EXTRA_BUCKETS[-1]:
            return None
        bucket = ROW_BUCKETS[bisect_left(ROW_BUCKETS, rows)]
        width = EXTRA_BUCKETS[bisect_left(EXTRA_BUCKETS, depth)]
        captured = self._graph(bucket, width, meta.slot_table)
        self._fill(captured, tokens, positions, meta)
        return captured.replay()

    def record(self, slot_table: IndexArray, *, rows: tuple[int, int], depth: int) -> None:
        """Capture all row buckets of `rows` (fewest, most) and trees up to `depth`, largest first to reuse memory."""
        first, last = (bisect_left(ROW_BUCKETS, count) for count in rows)
        for bucket in reversed(ROW_BUCKETS[first : last + 1]):
            for width in reversed(EXTRA_BUCKETS[: bisect_left(EXTRA_BUCKETS, depth) + 1]):
                self._graph(bucket, width, slot_table)

    def _graph(self, bucket: int, width: int, slot_table: IndexArray) -> _Captured:
        key = (bucket, width, tuple(slot_table.shape))
        if key not in self._captured:
            self._captured[key] = self._new(bucket, width, slot_table)
        return self._captured[key]

    def _new(self, bucket: int, width: int, slot_table: IndexArray) -> _Captured:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        static = AttentionMeta(
            slots=zeros(bucket) - 1, table_rows=zeros(bucket), context_lens=zeros(bucket),
            extra=zeros(bucket, width) - 1, slot_table=self._table(slot_table),
        )  # fmt: skip
        tokens, positions = zeros(1, bucket, dtype=torch.int64), zeros(1, bucket, dtype=torch.int64)
        replay = self.capture(lambda: self.forward(tokens, positions, static))
        return _Captured(tokens, positions, static, replay)

    def _table(self, like: IndexArray) -> torch.Tensor:
        shape = tuple(like.shape)
        if shape not in self._tables:
            self._tables[shape] = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return self._tables[shape]

    def _fill(self, captured: _Captured, tokens: IndexArray, positions: IndexArray, meta: AttentionMeta) -> None:
        _write(captured.tokens[0], tokens, 0)
        _write(captured.positions[0], positions, 0)
        static = captured.meta
        for name, padding in (("slots", -1), ("table_rows", 0), ("context_lens", 0)):
            _write(getattr(static, name), getattr(meta, name), padding)
        _write(static.extra, meta.extra, -1)  # type: ignore[arg-type]
        static.slot_table.copy_(torch.as_tensor(meta.slot_table), non_blocking=True)  # type: ignore[union-attr]


def _write(buffer: torch.Tensor, values: IndexArray, padding: int) -> None:
    corner = tuple(slice(size) for size in values.shape)
    if isinstance(values, torch.Tensor):
        buffer.fill_(padding)
        buffer[corner].copy_(values)
        return
    padded = np.full(tuple(buffer.shape), padding, np.int32)
    padded[corner] = values
    buffer.copy_(torch.from_numpy(padded), non_blocking=True)


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


class CudaCapture:
    """Capture of CUDA graphs in one memory pool. Other threads may call CUDA meanwhile."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles Triton kernels and sizes workspaces before recording
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

"""Size of the KV cache on a device, beside weights and the largest forward.

A CPU maps memory on demand, so every row gets room for a full context. A device's memory is taken at the start.

    budget = the device's memory x fraction          # of this process
    KV     = budget - the process's memory there - 2 x largest forward - reserved
                                     # one plain, one in captured graphs; a copy of the weights in few bits
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.forward.device import FIELD, does_not_fit, free_bytes, gigabytes, is_measured, module_of
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.errors import InvalidRequest, first_line
from rlhfspec.job.file.memory import free_bytes as free_on_the_host
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.tree_attention import AttentionMeta

_FORWARDS = 2
_TREE_NODES = 16  # per row, when all rows have some


def least(config: EngineConfig) -> EngineConfig:
    """Return the configuration with KV for one sequence, to check a model, if the device decides the size."""
    if config.kv_cache_tokens is not None or not is_measured(torch.device(config.device)):
        return config
    return config.holding(config.table_width // config.block_size)


def sized(config: EngineConfig, runners: Sequence[ModelRunner], group: Ranks | None, reserved: int = 0) -> EngineConfig:
    """Resize the runners' KV to the device without `reserved` bytes. Return the configuration with that many blocks."""
    device = torch.device(config.device)
    if config.kv_cache_tokens is not None or not is_measured(device):
        return config
    try:
        forward = max(_forward_bytes(runner, config) for runner in runners)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(FIELD, config.gpu_memory_fraction, f"the largest forward: {first_line(error)}") from error
    for runner in runners:
        runner.hold(0)
    room = free_bytes(device, config.gpu_memory_fraction) - _FORWARDS * forward - reserved
    num_bytes = sum(runner.bytes_per_position for runner in runners) * config.block_size
    num_blocks = min(config.num_blocks, max(room, 0) // num_bytes)
    if group is not None:
        num_blocks = min(group.gather(num_blocks))
    if num_blocks < least(config).num_blocks:
        missing = least(config).num_blocks * num_bytes
        raise InvalidRequest(FIELD, config.gpu_memory_fraction, does_not_fit(
            device, config.gpu_memory_fraction, f"{_FORWARDS} forwards take {gigabytes(_FORWARDS * forward)}",
            f"keys and values of one sequence take {gigabytes(missing)}",
        ))  # fmt: skip
    for runner in runners:
        runner.hold(num_blocks)
    return config.holding(num_blocks)


def spare_bytes(config: EngineConfig, runner: ModelRunner) -> int:
    """Return the memory that the runner's weights, forwards and, on a device, KV leave."""
    device = torch.device(config.device)
    if not is_measured(device):
        return free_on_the_host()
    try:
        return free_bytes(device, config.gpu_memory_fraction) - _FORWARDS * _forward_bytes(runner, config)
    except torch.OutOfMemoryError:
        return 0


@torch.inference_mode()
def _forward_bytes(runner: ModelRunner, config: EngineConfig) -> int:
    """Measure temporary bytes of the largest step: a prefill chunk and all rows' trees."""
    num_logits = config.max_sequences * (1 + min(config.tree_slots, _TREE_NODES))
    rows = config.prefill_chunk + num_logits
    nothing, index = np.zeros(rows, np.int32), np.arange(num_logits, dtype=np.int32)
    meta = AttentionMeta(nothing - np.int32(1), nothing, nothing, np.full((rows, 0), -1, np.int32), nothing[None])
    module, device = module_of(runner.config.device), runner.config.device
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    logits = runner.forward(nothing, nothing, meta, index, graphed=False)
    ones = np.ones(num_logits, np.float32)
    gumbel.sample(logits, index.astype(np.uint64), index, ones, nothing[:num_logits], ones)
    return int(module.max_memory_allocated(device) - before) + runner.gathered_bytes

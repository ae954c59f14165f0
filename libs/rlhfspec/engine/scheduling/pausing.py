"""Share of a step that samples get while clients are served. Those left out pause: they keep row and KV."""

from __future__ import annotations

import numpy as np

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.drafting.cost import CostModel

TIMES_ALONE = 2.0  # without a target, a step takes at most this many times as long as with the clients alone
LEAST_CHUNK = 32  # prompt tokens in a step, at least: the kernels are at full speed from here
LEAST_SHARE = 8  # samples always get a token for each eight of them, and for each eight rows of clients


def beside_clients(
    costs: CostModel, target: float | None, num_clients: int, lengths: IntArray, missing: IntArray, chunk: int
) -> tuple[int, int, int | None]:
    """Return how many decoding samples run in a step with clients, the prompt tokens of all, and the most rows.

    The step then takes at most `target` seconds besides drafting. Tree nodes count as rows, and get those that samples
    leave; None allows any number. `lengths` and `missing` (tokens without KV) are those of `num_clients` clients, then
    of samples; `chunk` is the most prompt tokens of a step.
    """
    decodes = missing == 1
    clients, samples = lengths[:num_clients][decodes[:num_clients]], lengths[num_clients:][decodes[num_clients:]]
    num, context = len(clients), int(clients.sum())
    most = target or TIMES_ALONE * float(costs.step_seconds(max(num, 1), context))

    def most_rows(context: int) -> int:
        seconds = costs.step_seconds(np.arange(1, len(lengths) + chunk + 1), context)
        return int(np.searchsorted(seconds, most, side="right"))

    owed = min(int(missing[:num_clients][~decodes[:num_clients]].sum()), chunk)
    first = min(owed, max(most_rows(context) - num, LEAST_CHUNK)) if num else owed  # else all at once
    num_samples = len(lengths) - num_clients
    least = min(max(-(-num_samples // LEAST_SHARE), (num + first) // LEAST_SHARE), num_samples)
    contexts = context + samples.cumsum()
    seconds = costs.step_seconds(num + first + np.arange(1, len(samples) + 1), contexts)
    beside = max(int(np.searchsorted(seconds, most, side="right")), min(least, len(samples)))
    allowed = most_rows(int(contexts[beside - 1]) if beside else context)
    chunk = min(max(allowed - num - beside, first + LEAST_CHUNK * (beside < least)), chunk)
    return beside, chunk, allowed if num and num_samples else None

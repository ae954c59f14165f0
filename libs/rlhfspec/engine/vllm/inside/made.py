"""Accumulated results of several passes, in the wire format of one reply."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

LAW = -1  # the second id beside every token drawn by the law
_REASONS = {"STOP": "stop", "LENGTH": "length"}


class Made:
    def __init__(self) -> None:
        self.num_passes = 0
        self.num_decoding = self.num_prefill = 0  # rows and tokens, over all passes
        self.is_to_be_told = False  # the answer must be sent now
        self._outputs: dict[str, list[Any]] = defaultdict(list)  # by sequence
        self._drafted: dict[str, int] = defaultdict(int)
        self._reasons: dict[str, str] = {}

    def take(self, outputs: list[Any], schedule: Any) -> None:
        self.num_passes += 1
        for each in outputs:
            self._outputs[each.request_id] += [each] if each.new_token_ids else []
            if each.finish_reason is not None:
                self._reasons[each.request_id] = _REASONS.get(each.finish_reason.name, "error")
        num_decoded = self._decoded(schedule) if schedule is not None else 0
        num_prefill = schedule.total_num_scheduled_tokens - num_decoded if schedule is not None else 0
        self.num_prefill += num_prefill
        self.is_to_be_told = bool(self._reasons) or num_prefill > 0 or not outputs

    def _decoded(self, schedule: Any) -> int:
        counts, drafts = schedule.num_scheduled_tokens, schedule.scheduled_spec_decode_tokens
        if not drafts:
            num_decoding: int = sum(count == 1 for count in counts.values())
            self.num_decoding += num_decoding
            return num_decoding
        decoding = [name for name, count in counts.items() if count == len(drafts.get(name, ())) + 1]
        self.num_decoding += len(decoding)
        for name in decoding:
            self._drafted[name] += len(drafts.get(name, ()))
        return sum(int(counts[name]) for name in decoding)

    def answer(self) -> dict[str, Any]:
        outputs = [each for of_one in self._outputs.values() for each in of_one]
        tokens = [token for each in outputs for token in each.new_token_ids]
        arrays = b""
        if outputs:
            beside = [(each.new_logprobs, len(each.new_token_ids)) for each in outputs]
            marks = np.concatenate([of_one.logprob_token_ids[:count] for of_one, count in beside])[:, 1]
            log_probs = np.concatenate([of_one.logprobs[:count] for of_one, count in beside])
            if (num_others := np.count_nonzero(marks != LAW)) > 0:
                raise RuntimeError(f"{num_others} tokens were not drawn by the sampling rule of docs/law.md")
            arrays = np.array(tokens, np.int32).tobytes() + log_probs.T.astype(np.float32).tobytes()
        names = list(self._outputs)
        return {
            "names": names,
            "counts": [sum(len(each.new_token_ids) for each in of_one) for of_one in self._outputs.values()],
            "verifications": [len(each) for each in self._outputs.values()],
            "drafted": [self._drafted.get(name, 0) for name in names],
            "reasons": self._reasons,
            "num_passes": self.num_passes,
            "num_decoding": self.num_decoding,
            "num_prefill_tokens": self.num_prefill,
            "arrays": arrays,
        }  # fmt: skip

"""Sampling by the law in vLLM's V2 model runner (GPUs), without synchronization."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rlhfspec.engine.vllm.inside.made import LAW
from rlhfspec.engine.vllm.inside.witness import Witness
from rlhfspec.kernels import gumbel

_NO_LAW = {"seed": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_prompt": 0}  # for the runner's own trials


class Slots:
    def __init__(self, num: int, device: torch.device) -> None:
        self.witness = Witness()
        self._seeds = torch.zeros(num, dtype=torch.int64, device=device)
        self._num_prompt = torch.zeros(num, dtype=torch.int32, device=device)
        self._top_k = torch.zeros(num, dtype=torch.int32, device=device)
        self._temperatures, self._top_p = torch.ones(num, device=device), torch.ones(num, device=device)

    def put(self, slot: int, law: dict[str, Any]) -> None:
        seed = law["seed"]
        self._seeds[slot] = seed - (1 << 64) if seed >= 1 << 63 else seed
        self._temperatures[slot], self._top_k[slot] = law["temperature"], law["top_k"]
        self._top_p[slot], self._num_prompt[slot] = law["top_p"], law["num_prompt"]

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the response position of the token after each position; 0 inside prompts."""
        return (positions.to(torch.int32) + 1 - self._num_prompt[slots]).clamp_(min=0)

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> Any:
        slots, logits = slots.long(), logits.float()
        places = self.places(slots, positions)
        parameters = (self._temperatures[slots], self._top_k[slots], self._top_p[slots])
        drawn = gumbel.sample(logits, self._seeds[slots], places, *parameters)
        self.witness.saw(logits, drawn, self._seeds[slots], places, *parameters)
        return drawn

    def draft(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        slots = slots.clamp(min=0).long()
        places = self.places(slots, positions)
        drawn = gumbel.candidates(logits.float(), self._seeds[slots], places, self._temperatures[slots], 1)
        return drawn.tokens[:, 0].long().clamp_(min=0)


class V2Sampler:
    def __init__(self, vllms: Any, device: torch.device) -> None:
        self._vllms = vllms
        self.slots = Slots(vllms.req_states.max_num_reqs, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllms, name)

    def add_request(self, slot: int, params: Any) -> None:
        self._vllms.add_request(slot, params)
        self.slots.put(slot, (params.extra_args or {}).get("law", _NO_LAW))

    def __call__(self, logits: torch.Tensor, batch: Any) -> Any:
        drawn = self.slots.sample(logits, batch.expanded_idx_mapping, batch.positions[batch.logits_indices])
        counts = _counts(batch.seq_lens.new_ones(batch.num_reqs), batch, self._vllms)
        return SamplerOutput(drawn.tokens.long().view(-1, 1), _both(drawn), None, *counts)


class V2Verifier:
    """Verifier that accepts drafted tokens equal to the law's, then adds the law's next one, all on the device."""

    def __init__(self, vllms: Any, sampler: V2Sampler) -> None:
        self._vllms, self._sampler = vllms, sampler
        self._width = vllms.num_speculative_steps + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllms, name)

    def __call__(self, logits: torch.Tensor, batch: Any, draft_logits: Any = None, invalid_drafts: Any = None) -> Any:
        indices, columns, num = batch.logits_indices, batch.expanded_local_pos.long(), batch.num_reqs
        drawn = self._sampler.slots.sample(logits, batch.expanded_idx_mapping, batch.positions[indices])
        counts = (batch.cu_num_logits[1:] - batch.cu_num_logits[:-1]).long()  # rows of each request
        owners = torch.repeat_interleave(torch.arange(num, device=logits.device), counts, output_size=len(logits))
        drafted = batch.input_ids[indices].roll(-1)  # the token after a row, if it belongs to the same request
        hits = torch.zeros((num, self._width), dtype=torch.bool, device=logits.device)
        hits[owners, columns] = (drawn.tokens == drafted) & (columns < counts[owners] - 1)
        kept = (hits.int().cumprod(1).sum(1) + 1).to(torch.int32)
        tokens = torch.zeros((num, self._width), dtype=torch.int64, device=logits.device)
        tokens[owners, columns] = drawn.tokens.long()
        starts = batch.cu_num_logits_np.tolist() if len(logits) != num else None
        return SamplerOutput(tokens, _both(drawn, starts), None, *_counts(kept, batch, self._sampler))


def _counts(num_sampled: torch.Tensor, batch: Any, sampler: Any) -> Any:
    prefill = sampler.req_states.prefill_len.gpu
    return get_num_sampled_and_rejected(num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill)


def _both(drawn: Any, starts: list[int] | None = None) -> LogprobsTensors:
    ids = torch.stack((drawn.tokens, torch.full_like(drawn.tokens, LAW)), 1)
    values = torch.stack((drawn.log_probs, drawn.tempered_log_probs), 1)
    return LogprobsTensors(ids, values, torch.zeros_like(drawn.tokens, dtype=torch.int64), starts)


def _couple(speculator: Any, slots: Slots) -> None:
    def sample_draft(
        hidden_states: torch.Tensor, sample_src_positions: torch.Tensor, idx_mapping: torch.Tensor,
        temperature: Any, seeds: Any, draft_step: Any, draft_logits: Any, spec_step_idx: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
        return slots.draft(logits, idx_mapping[: len(logits)], sample_src_positions[: len(logits)])

    speculator.sample_draft = sample_draft


def install(runner: Any) -> Slots:
    sampler = V2Sampler(runner.sampler, runner.device)
    runner.sampler = sampler
    if runner.rejection_sampler is not None:
        runner.rejection_sampler = V2Verifier(runner.rejection_sampler, sampler)
        if hasattr(runner.speculator, "sample_draft"):
            _couple(runner.speculator, sampler.slots)
    return sampler.slots

"""Sampling by the law in vLLM's V1 model runner (CPU build): sampler, verifier and drafter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.vllm.inside.made import LAW
from rlhfspec.engine.vllm.inside.witness import Witness
from rlhfspec.kernels import gumbel


class Batch:
    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.witness = Witness()
        self.next_places: IntArray | None = None  # response position of each request's next token
        self._ids: list[str] = []

    def look(self) -> int:
        batch = self.runner.input_batch
        ids = batch.req_ids[: batch.num_reqs]
        if ids != self._ids:  # names are unique
            laws = [self.runner.requests[name].sampling_params.extra_args["law"] for name in ids]
            self._ids = list(ids)
            self.seeds = np.array([law["seed"] for law in laws], np.uint64)
            self.temperatures = np.array([law["temperature"] for law in laws], np.float32)
            self.top_k = np.array([law["top_k"] for law in laws], np.int32)
            self.top_p = np.array([law["top_p"] for law in laws], np.float32)
            self.num_prompt = np.array([law["num_prompt"] for law in laws], np.int32)
        return len(ids)

    def sample(self, logits: torch.Tensor, owners: IntArray | slice, source_rows: IntArray) -> tuple[Any, IntArray]:
        """Sample a token per row; return draws and response positions. `owners`: each row's request index."""
        positions = self.runner.positions.cpu().numpy()[source_rows].astype(np.int32)
        places = np.maximum(positions + 1 - self.num_prompt[owners], 0)  # parts of a prompt keep nothing
        logits = logits.float()
        parameters = (self.temperatures[owners], self.top_k[owners], self.top_p[owners])
        drawn = gumbel.sample(logits, self.seeds[owners], places, *parameters)
        self.witness.saw(logits, drawn, self.seeds[owners], places, *parameters)
        return drawn, places


class _Beside(torch.nn.Module):
    def __init__(self, batch: Batch, vllms: Any) -> None:
        super().__init__()
        self.batch, self.vllms = batch, vllms

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("vllms"), name)


class V1Sampler(_Beside):
    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *others: Any, **more: Any) -> Any:
        batch = self.batch
        num = batch.look()
        if num == 0 or len(logits) != num:  # a trial of the runner at start-up
            return self.vllms(logits, sampling_metadata, *others, **more)
        drawn, places = batch.sample(logits, slice(None), batch.runner.query_start_loc.np[1 : num + 1] - 1)
        batch.next_places = places + 1
        return SamplerOutput(drawn.tokens[:, None], LogprobsTensors(*map(torch.from_numpy, _both(drawn))))


class V1Verifier(_Beside):
    """Verifier that accepts drafted tokens equal to the law's, then adds the law's next one."""

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        batch = self.batch
        num = batch.look()
        counts = np.array(metadata.num_draft_tokens) + 1  # rows of each request
        if len(counts) != num:
            return self.vllms(metadata, draft_probs, logits, sampling_metadata)
        owners = np.repeat(np.arange(num, dtype=np.int32), counts)
        drawn, places = batch.sample(logits, owners, metadata.logits_indices.cpu().numpy())
        width = metadata.max_spec_len + 1
        starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
        columns = np.arange(len(owners)) - starts[owners]
        cells = owners * width + columns  # of [num, width], flat
        tokens, drafted = np.full(num * width, -1, np.int64), np.full(num * width, -2, np.int64)
        tokens[cells] = drawn.tokens.cpu().numpy()
        drafted[cells[columns < counts[owners] - 1]] = metadata.draft_token_ids.cpu().numpy()
        hits = (tokens == drafted).reshape(num, width)
        kept = np.cumprod(hits, 1).sum(1).astype(np.int32) + 1
        is_kept = np.arange(width) < kept[:, None]
        batch.next_places = places[starts] + kept
        grid = torch.from_numpy(np.where(is_kept, tokens.reshape(num, width), -1).astype(np.int32))
        both = _both(drawn)
        in_cells = [np.zeros((num * width, *each.shape[1:]), each.dtype) for each in both]
        for each, rows in zip(in_cells, both, strict=True):
            each[cells] = rows
        logprobs = LogprobsTensors(*map(torch.from_numpy, in_cells))
        return SamplerOutput(sampled_token_ids=grid.to(logits.device), logprobs_tensors=logprobs)


def _both(drawn: Any) -> tuple[IntArray, FloatArray, IntArray]:
    """Return fields of LogprobsTensors: ids and log-probs (plain, tempered) [N, 2], and ranks."""
    tokens = drawn.tokens.cpu().numpy()
    ids, values = np.full((len(tokens), 2), LAW, np.int32), np.empty((len(tokens), 2), np.float32)
    ids[:, 0], values[:, 0] = tokens, drawn.log_probs.cpu().numpy()
    values[:, 1] = drawn.tempered_log_probs.cpu().numpy()
    return ids, values, np.zeros(len(tokens), np.int32)


def _couple(drafter: Any, batch: Batch) -> None:
    propose, num_drafted = drafter.propose, [0]

    def begun(*arguments: Any, **options: Any) -> Any:
        num_drafted[0] = 0
        return propose(*arguments, **options)

    def draft(hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        logits, places = drafter.model.compute_logits(hidden_states).float(), batch.next_places
        if places is None or len(places) != len(logits) or batch.look() != len(logits):
            return logits.argmax(-1), None
        at = places + np.int32(num_drafted[0])
        drawn = gumbel.candidates(logits, batch.seeds, at, batch.temperatures, 1)
        num_drafted[0] += 1
        return drawn.tokens[:, 0].long(), None

    drafter.propose, drafter._sample_draft_tokens = begun, draft


def install(runner: Any) -> Batch:
    batch = Batch(runner)
    runner.sampler = V1Sampler(batch, runner.sampler)
    if getattr(runner, "rejection_sampler", None) is not None:
        runner.rejection_sampler = V1Verifier(batch, runner.rejection_sampler)
        if hasattr(runner.drafter, "_sample_draft_tokens"):
            _couple(runner.drafter, batch)
    return batch

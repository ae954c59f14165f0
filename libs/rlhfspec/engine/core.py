"""The engine. `step()` reads like the algorithm: schedule, draft, select, verify, commit, learn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfspec.drafting.base import PLAIN, BatchState, BoolArray, FloatArray, Forest, IntArray, Plan
from rlhfspec.drafting.tree import Walk, accept, index_in_sequence
from rlhfspec.engine import commit, text, transfer, verify
from rlhfspec.engine.base import Completion, EngineStats, FinishReason, Request, StepReport, check_types
from rlhfspec.engine.cache import BlockPool, SlotTable, check_blocks, check_slots
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.params import SamplingParams
from rlhfspec.engine.runner import ModelRunner
from rlhfspec.engine.scheduler import Schedule, Scheduler
from rlhfspec.engine.sequences import Progress, RowTable, Sequence
from rlhfspec.engine.speculation import Speculation
from rlhfspec.errors import InvalidRequest, WeightsVersionError
from rlhfspec.huggingface.check import ModelReport
from rlhfspec.kernels import gumbel

Sample = tuple[IntArray, FloatArray, FloatArray, BoolArray]  # tokens, log-probs, tempered log-probs, finite


class Engine:
    """Generates by the law on one model; `rlhfspec.engine.base.EngineProtocol` holds the promises.

    >>> engine = Engine.from_pretrained("path/to/model", speculation="suffix")    # doctest: +SKIP
    >>> [done] = engine.generate(["2+2="], SamplingParams(max_tokens=8), seeds=[7])    # doctest: +SKIP
    """

    def __init__(
        self,
        target: ModelRunner,
        config: EngineConfig,
        *,
        draft: ModelRunner | None = None,
        tokenizer: text.Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.target = target
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.rows = RowTable(config.max_sequences, config.table_width)
        self.table = SlotTable(config.max_sequences, config.table_width, config.block_size)
        self.speculation = Speculation(self, draft)
        self.scheduler = Scheduler(
            pool=self.pool, rows=self.rows, tables=[self.table, self.speculation.draft_table],
            prefill_chunk=config.prefill_chunk, prefix_sharing=config.prefix_sharing,
            on_start=self._started, on_leave=self._leaving,
        )  # fmt: skip
        self.sequences: dict[str, Sequence] = {}
        self.by_row: dict[int, Sequence] = {}
        self.weights_version = 0
        self._undelivered: list[Completion] = []  # for the next step's report
        self._num_steps = 0
        self._num_generated = 0

    @property
    def reports(self) -> dict[str, ModelReport]:
        """How the model, and the drafter where there is one, were found right when they were loaded."""
        space = self.speculation.space
        return {"model": self.target.report} | ({} if space is None else {"drafter": space.runner.report})

    @classmethod
    def from_pretrained(cls, path: str | Path, *, drafter: str | Path | None = None, **options: Any) -> Engine:
        """Load a Hugging Face causal LM (folder or hub id) and, if given, a smaller one to draft with.

        Options are those of `rlhfspec.engine.config.EngineConfig`: dtype, device, speculation, num_threads,
        max_sequences, max_context, kv_cache_tokens, ...
        """
        from rlhfspec.engine.loading import load_engine

        return load_engine(path, drafter=drafter, options=options)

    # -- what a person types first --------------------------------------------------------------------------

    def generate(
        self,
        prompts: SequenceOf[str] | SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        seeds: SequenceOf[int] | None = None,
    ) -> list[Completion]:
        """Generate for every prompt (text or token ids); completions come back in the prompts' order."""
        each = params if isinstance(params, SequenceOf) else [params or SamplingParams()] * len(prompts)
        seeds = list(range(len(prompts))) if seeds is None else seeds
        for name, values in (("params", each), ("seeds", seeds)):
            if len(values) != len(prompts):
                raise InvalidRequest(name, len(values), f"must be as many as prompts ({len(prompts)})")
        requests = [
            Request(
                id=f"generate-{self._num_steps}/{index}",
                prompt_token_ids=text.encode_prompt(self.tokenizer, prompt),
                params=each[index],
                seed=seeds[index],
            )
            for index, prompt in enumerate(list[str | SequenceOf[int]](prompts))
        ]
        for request in requests:  # all or nothing: nothing is left behind by a bad one
            self.validate(request)
        for request in requests:
            self.submit(request)
        wanted = {request.id for request in requests}
        finished: dict[str, Completion] = {}
        others: list[Completion] = []
        while len(finished) < len(wanted):
            for done in self.step().finished:
                if done.id in wanted:
                    finished[done.id] = done
                else:
                    others.append(done)
        self._undelivered.extend(others)  # somebody submitted those; their step reports them
        return [finished[request.id] for request in requests]

    # -- the protocol ---------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.validate(request)
        self.scheduler.waiting.append(self._new_sequence(request, Progress.of_prompt(request.prompt_token_ids)))

    def step(self) -> StepReport:
        """One target forward for everything that can run."""
        began = time.perf_counter()
        self.scheduler.admit()
        self.scheduler.make_room()
        schedule = self.scheduler.schedule()
        if schedule.empty:
            assert not self.scheduler.waiting, "with nothing running, a waiting sequence always fits"
            return self._report(began, schedule, [], 0, 0, PLAIN)
        num_decode = len(schedule.decode_rows)

        proposal = self.speculation.propose(self._state(schedule), schedule.decode_rows)
        forest = proposal.forest

        verify_began = time.perf_counter()
        node_index = index_in_sequence(forest, num_decode)
        batch = verify.lay_out(self.rows, self.table, schedule, forest, node_index)
        sample = self._sample(batch)
        verify_seconds = time.perf_counter() - verify_began

        walk = accept(forest, num_decode, *_choices(sample[0], num_decode, batch))
        drafted_for = self.speculation.batch(schedule.decode_rows)  # as it was before the commit
        self._keep_accepted(schedule, walk, node_index)
        new = verify.gather(batch, walk, num_decode, sample)
        kept, reasons = commit.truncate(self.rows, new)
        kept = self._stop_at_strings(new, kept, reasons)
        commit.append(self.rows, new, kept, self.weights_version)
        self._count(schedule, forest, new.rows, kept)

        self.speculation.learn(
            proposal, walk, drafted_for, num_committed=int(kept[:num_decode].sum()),
            verify_seconds=verify_seconds, step_seconds=time.perf_counter() - began,
        )  # fmt: skip
        finished = [self._finish(row, reason) for row, reason in reasons.items()]
        return self._report(began, schedule, finished, forest.size, int(kept.sum()), proposal.plan)

    def cancel(self, request_id: str) -> bool:
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self._detach(sequence)
        return sequence is not None

    def preempt(self, request_id: str) -> bool:
        """Take a running sequence's memory back; it recomputes and goes on with the same tokens."""
        sequence = self.sequences.get(request_id)
        if sequence is None or not sequence.is_running:
            return False
        self.scheduler.preempt(sequence)
        return True

    def load_weights(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        version: int,
        draft_state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if version <= self.weights_version:
            raise WeightsVersionError(version, self.weights_version, "must grow with every swap")
        if draft_state_dict is not None:  # first: should it be refused, the target is still whole
            self.speculation.load_draft_weights(dict(draft_state_dict))
        self.target.load_weights(dict(state_dict))
        for sequence in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(sequence)  # its KV is of the old weights
        self.weights_version = version
        self.speculation.reset()
        for sequence in list(self.sequences.values()):
            pinned = sequence.request.weights_version
            if pinned not in (None, version):
                self.cancel(sequence.request.id)
                error = f"weights_version: the request wants {pinned}, the engine now has {version}"
                self._undelivered.append(sequence.complete("error", error=error))

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            weights_version=self.weights_version,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated,
            num_preemptions=self.scheduler.num_preemptions,
            expert_rows=self.target.expert_load.rows(),
        )

    def export_sequence(self, request_id: str) -> transfer.SequenceState:
        sequence = self.sequences.get(request_id)
        if sequence is None:
            raise InvalidRequest("request_id", request_id, "no such sequence here")
        state = transfer.pack(self, sequence)
        self.cancel(request_id)
        return state

    def import_sequence(self, state: transfer.SequenceState) -> None:
        transfer.check_manifest(self, state)
        self.validate(state.request)
        sequence = self._new_sequence(state.request, state.progress)
        if not transfer.unpack(self, sequence, state):
            self.scheduler.waiting.append(sequence)  # no room for its KV now: it will recompute, with the same tokens

    # -- beyond the protocol --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or bool(self._undelivered)

    def set_speculation(self, speculation: str | Plan) -> None:
        """Change how drafts are made, at any time; the tokens stay the same."""
        self.speculation.choose(speculation)

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field, for what can never run here."""
        check_types(request)
        prompt, params = request.prompt_token_ids, request.params
        if request.id in self.sequences:
            raise InvalidRequest("id", request.id, "is already in the engine")
        ids = (("prompt_token_ids", prompt), ("stop_token_ids", params.stop_token_ids))
        for name, token_ids in (*ids, *(("history", sample) for sample in request.history)):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.target.num_token_ids:
                outside = next(token for token in token_ids if not 0 <= token < self.target.num_token_ids)
                raise InvalidRequest(name, outside, f"token id outside [0, {self.target.num_token_ids})")
        limit = min(self.config.max_context, (self.pool.num_blocks - 1) * self.config.block_size)
        if len(prompt) >= limit:
            raise InvalidRequest("prompt_token_ids", f"{len(prompt)} tokens", f"must be shorter than {limit}")
        if len(prompt) + params.max_tokens > limit:
            raise InvalidRequest(
                "max_tokens", params.max_tokens, f"with a prompt of {len(prompt)} must be <= {limit - len(prompt)}"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop", params.stop, "stop strings need a tokenizer, and the model folder holds none")
        if request.weights_version not in (None, self.weights_version):
            raise WeightsVersionError(request.weights_version or 0, self.weights_version, "not the loaded one")

    def check_integrity(self) -> None:
        """Free plus owned blocks are everything, tables match blocks, rows match sequences; AssertionError if not."""
        running = self.scheduler.running
        check_blocks(self.pool, [sequence.blocks for sequence in running])
        for sequence in running:
            for table in self.scheduler.tables:
                check_slots(table, sequence.row, sequence.blocks)
            assert self.by_row[sequence.row] is sequence, f"row {sequence.row} belongs to another"
            assert self.rows.cached[sequence.row] < self.rows.lengths[sequence.row], "a running row always has work"
        assert len(self.by_row) == len(running) == self.config.max_sequences - len(self.rows.free_rows), "rows leaked"
        assert len(self.sequences) == len(running) + len(self.scheduler.waiting), "sequences leaked"

    # -- the parts of a step --------------------------------------------------------------------------------

    def _state(self, schedule: Schedule) -> BatchState:
        rows = schedule.decode_rows
        lengths = self.rows.lengths[rows]
        return BatchState(
            rows=rows,
            room=self.rows.limits[rows] - lengths,
            num_prefill_rows=schedule.num_prefill_tokens,
            kv_tokens=int(lengths.sum()) + schedule.num_prefill_tokens,
        )

    def _sample(self, batch: verify.VerifyBatch) -> Sample:
        """The forward, and the target's choice by the law at every wanted row."""
        logits = self.target.forward(batch.tokens, batch.positions, batch.meta, batch.logit_rows)
        rows = batch.sampled_rows
        if not len(rows):  # chunks in the middle of prompts
            return np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.bool_)
        result = gumbel.sample(
            logits, self.rows.seeds[rows], batch.noise_positions, self.rows.temperatures[rows],
            self.rows.top_k[rows], self.rows.top_p[rows],
        )  # fmt: skip
        return (
            result.tokens.cpu().numpy(),
            result.log_probs.cpu().numpy(),
            result.tempered_log_probs.cpu().numpy(),
            result.finite.cpu().numpy(),
        )

    def _keep_accepted(self, schedule: Schedule, walk: Walk, node_index: IntArray) -> None:
        """Accepted branches stay where they are; the slot table learns their place. Prompts advance."""
        decode = schedule.decode_rows
        lengths = self.rows.lengths[decode]
        for level in range(1, walk.path.shape[1]):
            sequences = np.flatnonzero(walk.path[:, level] >= 0)
            position = lengths[sequences] + level - 1
            held_at = lengths[sequences] + node_index[walk.path[sequences, level]]
            self.table.keep_path(decode[sequences], position, held_at)
        self.rows.cached[decode] = lengths + walk.num_accepted
        self.rows.cached[schedule.prefill_rows] += schedule.prefill_counts
        for row in schedule.prefill_rows.tolist():
            self.scheduler.mark_prefilled(self.by_row[row])

    def _stop_at_strings(self, new: verify.Committed, kept: IntArray, reasons: dict[int, FinishReason]) -> IntArray:
        """Shorten what ends at a stop string; only rows that have any are looked at."""
        for index, row in enumerate(new.rows.tolist()):
            stops = self.by_row[row].request.params.stop
            if stops and self.tokenizer is not None:
                start, length = int(self.rows.prompt_lengths[row]), int(self.rows.lengths[row])
                response = np.concatenate((self.rows.tokens[row, start:length], new.tokens[index, : kept[index]]))
                found = text.first_stop(self.tokenizer, response, int(kept[index]), stops)
                if found is not None:
                    kept[index] = found
                    reasons[row] = "stop"
        return kept

    def _count(self, schedule: Schedule, forest: Forest, rows: IntArray, kept: IntArray) -> None:
        """Verifications and accepted nodes add up to the tokens that were kept."""
        counters = self.rows.counters
        counters[rows, 0] += kept > 0
        drafted = np.bincount(forest.sequence, minlength=len(schedule.decode_rows))
        counters[schedule.decode_rows, 1] += drafted.astype(np.int32)
        counters[rows, 2] += np.maximum(kept - 1, 0)

    def _finish(self, row: int, reason: FinishReason) -> Completion:
        sequence = self.by_row[row]
        del self.sequences[sequence.request.id]
        self.scheduler.remove(sequence)
        response = sequence.progress.token_ids[len(sequence.request.prompt_token_ids) :].tolist()
        words = text.decode(self.tokenizer, response)
        if words is not None:
            words = text.cut_at_stop(words, sequence.request.params.stop)
        error = "logits: the model gave NaN or infinity for this sequence" if reason == "error" else ""
        return sequence.complete(reason, error=error, text=words)

    def _report(
        self,
        began: float,
        schedule: Schedule,
        finished: list[Completion],
        num_nodes: int,
        num_committed: int,
        plan: Plan,
    ) -> StepReport:
        self._num_steps += 1
        self._num_generated += num_committed
        undelivered, self._undelivered = self._undelivered, []
        return StepReport(
            finished=(*undelivered, *finished),
            num_decoding=len(schedule.decode_rows),
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_verified_nodes=num_nodes,
            num_committed=num_committed,
            strategy=plan.name,
            seconds=time.perf_counter() - began,
        )

    # -- coming and going -----------------------------------------------------------------------------------

    def _new_sequence(self, request: Request, progress: Progress) -> Sequence:
        eos = () if request.params.ignore_eos else self.eos_token_ids
        sequence = Sequence(
            request=request,
            group=request.group or f"prompt-{hash(request.prompt_token_ids)}",
            progress=progress,
            stop_ids=(*request.params.stop_token_ids, *eos),
            prefix_hashes=self.pool.prefix_hashes(request.prompt_token_ids),
        )
        self.sequences[request.id] = sequence
        return sequence

    def _started(self, sequence: Sequence) -> None:
        self.by_row[sequence.row] = sequence
        self.speculation.start(sequence)

    def _leaving(self, sequence: Sequence) -> None:
        self.speculation.forget(sequence)
        del self.by_row[sequence.row]

    def _detach(self, sequence: Sequence) -> None:
        if sequence.is_running:
            self.scheduler.remove(sequence)
        else:
            self.scheduler.waiting.remove(sequence)


def _choices(tokens: IntArray, num_decode: int, batch: verify.VerifyBatch) -> tuple[IntArray, IntArray]:
    """Of all sampled tokens, those after the roots and those after the tree nodes."""
    return tokens[:num_decode], tokens[num_decode + len(batch.finishing) :]

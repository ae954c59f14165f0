"""The generation engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.engine.base import (
    Abilities,
    Completion,
    EngineStats,
    EngineStep,
    FinishReason,
    Gain,
    MovableWithKV,
    Request,
)
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.distilling.learning import DraftLearning
from rlhfspec.engine.drafting.base import PLAIN, DraftPlan
from rlhfspec.engine.drafting.tree import accept, index_in_sequence
from rlhfspec.engine.forward.models import load_state, make_state
from rlhfspec.engine.forward.profile import record
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.kv.transfer import Moves
from rlhfspec.engine.params import SamplingParams
from rlhfspec.engine.requests import check_response
from rlhfspec.engine.scheduling import commit, text, verify
from rlhfspec.engine.scheduling.scheduler import StepRows
from rlhfspec.engine.scheduling.sequences import Generated
from rlhfspec.errors import InvalidRequest, WeightsVersionError
from rlhfspec.messages.records.models import ModelReport


class Engine(Moves):
    """Engine that generates tokens with one model by the law, its sampling rule (docs/law.md).

    >>> engine = Engine.from_pretrained("path/to/model", speculation="suffix")    # doctest: +SKIP
    >>> [done] = engine.generate(["2+2="], SamplingParams(max_tokens=8), seeds=[7])    # doctest: +SKIP
    """

    def __init__(self, state: EngineState) -> None:
        super().__init__(state)
        self.learning = DraftLearning(state) if state.student is not None else None
        if self.learning is not None:
            self.scheduler.watch(self.learning)
        self._undelivered: list[Completion] = []  # for the next step's report
        self._undelivered_gains: list[Gain] = []
        self._num_steps = 0
        self._num_generated = 0
        self._num_prefill = 0
        record(state)
        self.set_speculation(state.config.speculation)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, drafter: str | Path | None = None, **options: Any) -> Engine:
        """Load a Hugging Face causal LM (folder or hub id), and a draft model if given. `options`: see EngineConfig."""
        return cls(load_state(path, drafter=drafter, options=options))

    @property
    def reports(self) -> dict[str, ModelReport]:
        return dict(zip(("model", "drafter"), (space.runner.report for space in self.state.spaces), strict=False))

    def generate(
        self,
        prompts: SequenceOf[str] | SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        seeds: SequenceOf[int] | None = None,
    ) -> list[Completion]:
        """Generate a completion for every prompt (text or token ids), in order."""
        each = params if isinstance(params, SequenceOf) else [params or SamplingParams()] * len(prompts)
        seeds = list(range(len(prompts))) if seeds is None else seeds
        for name, values in (("params", each), ("seeds", seeds)):
            if len(values) != len(prompts):
                raise InvalidRequest(name, len(values), f"must have one entry for each of the {len(prompts)} prompts")
        requests = [
            Request(
                id=f"generate-{self._num_steps}/{index}",
                prompt_token_ids=text.encode_prompt(self.state.tokenizer, prompt),
                params=each[index],
                seed=seeds[index],
            )
            for index, prompt in enumerate(list[str | SequenceOf[int]](prompts))
        ]
        for request in requests:  # check all first, so that a bad request leaves nothing behind
            self.validate(request)
        is_alone = not self.has_work
        for request in requests:
            self.submit(request)
        wanted = {request.id for request in requests}
        finished: dict[str, Completion] = {}
        others: list[Completion] = []
        gains: list[Gain] = []
        while len(finished) < len(wanted):
            report = self.step()
            gains.extend(() if is_alone else (gain for gain in report.gains if gain.id not in wanted))
            for done in report.finished:
                if done.id in wanted:
                    finished[done.id] = done
                else:
                    others.append(done)
        self._undelivered.extend(others)  # of other callers; the next step() returns them
        self._undelivered_gains.extend(gains)
        return [finished[request.id] for request in requests]

    @property
    def abilities(self) -> Abilities:
        return Abilities(moves_tokens=self, moves_kv=self, learning=self.learning)

    def submit(self, request: Request, response: SequenceOf[int] = ()) -> None:
        """Queue a request. `response`: its first tokens, if another engine has sampled them; none is a stop token."""
        self.validate(request)
        check_response(request, response, num_token_ids=self.state.target.runner.num_token_ids)
        sequence = self.state.new_sequence(request, Generated.of_prompt(request.prompt_token_ids, response))
        self.state.sequences[request.id] = sequence
        self.scheduler.enqueue(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.state.sequences or self._undelivered or self._undelivered_gains)

    def step(self) -> EngineStep:
        began = time.perf_counter()
        state, rows = self.state, self.state.rows
        self.scheduler.admit()
        self.scheduler.make_room()
        schedule = self.scheduler.schedule(self.speculation.costs)
        if schedule.empty:
            assert not self.scheduler.waiting, "with nothing running, a waiting sequence always fits"
            return self._report(began, schedule, (), [], 0, 0, PLAIN)
        decode_rows = schedule.decode_rows

        proposal = self.speculation.propose(schedule)
        forest = proposal.forest

        verify_began = time.perf_counter()
        node_index = index_in_sequence(forest, len(decode_rows))
        batch = verify.lay_out(state, schedule, forest, node_index)
        sampled = verify.sample(state, batch)
        verify_seconds = time.perf_counter() - verify_began

        walk = accept(forest, len(decode_rows), *verify.choices(batch, sampled, len(decode_rows)))
        commit.keep_accepted(state, schedule, walk, node_index)
        new = verify.gather(batch, walk, len(decode_rows), sampled)
        kept, reasons = commit.truncate(rows, new)
        commit.stop_at_strings(state, new, kept, reasons)
        if self.learning is not None and self.learning.records:
            self.learning.record(new, kept, sampled.logits, batch.logit_rows)
        commit.append(rows, new, kept, state.weights_version)
        commit.count(rows, decode_rows, forest, new, kept)
        rows.count_step(decode_rows, proposal.plan.name)

        self.speculation.learn(
            proposal, walk, kept[: len(decode_rows)],
            verify_seconds=verify_seconds, step_seconds=time.perf_counter() - began,
        )  # fmt: skip
        gains = commit.StepGains(state, new, kept, reasons, verify.top_log_probs(state, new, kept, sampled))
        finished = [self._finish(row, reason) for row, reason in reasons.items()]
        report = self._report(began, schedule, gains, finished, forest.size, int(kept.sum()), proposal.plan)
        if self.learning is not None:
            drafting = proposal.num_drafting
            self.learning.stepped(
                report.seconds, drafting, int(kept[:drafting].sum()), proposal.plan.drafter,
                has_finished=bool(finished),
            )  # fmt: skip
        return report

    def cancel(self, request_id: str) -> bool:
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self.scheduler.remove(sequence)
        return sequence is not None

    @property
    def weights_version(self) -> int:
        return self.state.weights_version

    def load_weights(self, state_dict: Mapping[str, torch.Tensor], *, version: int) -> None:
        state = self.state
        if version <= state.weights_version:
            raise WeightsVersionError(version, state.weights_version, "must grow with every swap")
        state.target.runner.load_weights(dict(state_dict))
        if state.few_bits is not None:
            state.few_bits.is_stale = True
        self.scheduler.drop_kv()
        state.weights_version = version
        self.speculation.reset()
        for sequence in list(state.sequences.values()):
            pinned = sequence.request.weights_version
            if pinned not in (None, version):
                self.scheduler.remove(sequence)
                error = f"weights_version: the request wants {pinned}, the engine now has {version}"
                failed = sequence.complete("error", error=error)
                self._undelivered.append(failed)
                self._undelivered_gains.append(Gain.of_completion(failed, since=len(failed.token_ids)))

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            room=self.scheduler.room,
            num_free_blocks=self.state.pool.num_free,
            num_free_tokens=self.scheduler.num_available * self.state.pool.block_size,
            num_kept_blocks=len(self.state.pool.kept),
            num_staying=len(self.scheduler.staying),
            num_prefill_tokens=self._num_prefill,
            num_found_tokens=self.scheduler.num_found_tokens,
            num_blocks=self.state.pool.num_blocks,
            weights_version=self.state.weights_version,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated,
            num_preemptions=self.scheduler.num_preemptions,
            num_moves=self.num_imported,
            num_recomputed_tokens=self.num_recomputed,
            expert_rows=self.state.target.runner.expert_load.rows(),
            drafting=self.speculation.drafting(),
        )

    def extend(
        self, request_id: str, token_ids: SequenceOf[int], *, seed: int, params: SamplingParams | None = None,
        top_log_probs: int = 0, priority: int = 0,
    ) -> None:  # fmt: skip
        """Continue a finished sequence that `stays`, as a new request whose prompt is all its tokens plus `token_ids`.

        Response positions restart at 0, so that noise would repeat unless every turn has its own `seed`.
        """
        stayed = self.scheduler.staying.get(request_id)
        if stayed is None:
            raise InvalidRequest(
                "request_id", request_id, "is not kept here: it must be submitted with stays=True and have finished"
            )
        prompt = (*stayed.generated.token_ids.tolist(), *token_ids)
        params = params or stayed.request.params
        request = replace(
            stayed.request, prompt_token_ids=prompt, seed=seed, params=params, top_log_probs=top_log_probs,
            priority=priority,
        )  # fmt: skip
        self.state.validate(request)
        self.scheduler.extend(self.state.new_sequence(request, Generated.of_prompt(prompt)))

    def preempt(self, request_id: str) -> bool:
        """Free a running sequence's KV, and recompute it later with the same tokens. Return False if not running."""
        sequence = self.state.sequences.get(request_id)
        if sequence is None or not sequence.has_row:
            return False
        self.scheduler.preempt(sequence)
        return True

    def forget_kept(self) -> None:
        self.state.pool.forget_kept()

    def set_speculation(self, speculation: str | DraftPlan) -> None:
        self.speculation.choose(speculation)

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest if the request can never run here."""
        self.state.validate(request)
        self.scheduler.refuse_known(request.id)

    def close(self) -> None:
        if (others := self.state.target.runner.others) is not None:
            others.stop()

    def check_integrity(self) -> None:
        self.scheduler.check()

    def _finish(self, row: int, reason: FinishReason) -> Completion:
        sequence = self.state.by_row[row]
        if sequence.request.stays and reason != "error":
            self.scheduler.stay(sequence)
        else:
            self.scheduler.remove(sequence)
        response = sequence.generated.token_ids[len(sequence.request.prompt_token_ids) :].tolist()
        words = text.decode(self.state.tokenizer, response)
        if words is not None:
            words = text.cut_at_stop(words, sequence.request.params.stop)
        error = "logits: the model gave NaN or infinity for this sequence" if reason == "error" else ""
        return sequence.complete(reason, error=error, text=words)

    def _report(
        self,
        began: float,
        schedule: StepRows,
        gains: Iterable[Gain],
        finished: list[Completion],
        num_nodes: int,
        num_committed: int,
        plan: DraftPlan,
    ) -> EngineStep:
        self._num_steps += 1
        self._num_generated += num_committed
        self._num_prefill += schedule.num_prefill_tokens
        if self._undelivered_gains:
            gains, self._undelivered_gains = (*self._undelivered_gains, *gains), []
        undelivered, self._undelivered = self._undelivered, []
        return EngineStep(
            gains=gains,
            finished=(*undelivered, *finished),
            num_decoding=len(schedule.decode_rows),
            num_paused=schedule.num_paused,
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_verified_nodes=num_nodes,
            num_committed=num_committed,
            strategy=plan.name,
            seconds=time.perf_counter() - began,
        )


_: type[MovableWithKV] = Engine  # mypy checks the protocol


def make_engine(
    model: Any, config: EngineConfig, *, draft: Any = None, tokenizer: Any = None, group: Ranks | None = None
) -> Engine:
    """Build an engine of Hugging Face models, which are modified in place.

    `group`: ranks that share the model, of which this is rank 0; others call `engine.forward.models.follow_engine`.
    """
    return Engine(make_state(model, config, draft=draft, tokenizer=tokenizer, group=group))

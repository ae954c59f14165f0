"""Records of every kind, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from hypothesis import strategies as st

from rlhfspec.messages.records import (
    DatasetInfo,
    Demand,
    DraftWeights,
    EvaluationReport,
    Heartbeat,
    Load,
    Move,
    Moved,
    Plan,
    PlannedMove,
    Prompt,
    Record,
    Sample,
    Score,
    StepReport,
    Weights,
    WorkerInfo,
)
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import Lengths, LogProbDifference, Seconds, Spread, StepMetrics
from rlhfspec.messages.records.models import ModelReport

texts = st.text(st.characters(codec="utf-8"), max_size=20)
counts = st.integers(0, 2**64 - 1)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple)
finite = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8).map(tuple)
numbers = st.lists(st.floats(), max_size=8).map(tuple)
seconds = st.floats(0, allow_infinity=False)
moves = {"id": texts, "job": texts, "sample_id": texts, "source": counts, "destination": counts}
named = {"id": texts, "job": texts, "step": counts}
purposes = st.sampled_from(["training", "evaluation"])
placed = {**named, "purpose": purposes, "prompt": counts, "replica": counts, "columns_json": texts}
components = st.lists(st.tuples(texts, st.floats(allow_nan=False, allow_infinity=False)), max_size=3).map(tuple)
scores = {**named, "purpose": purposes, "sample_id": texts, "stage": st.sampled_from(["reward", "reference", "critic"])}
said = {
    **placed,
    "prompt_text": texts,
    "prompt_token_ids": tokens,
    "text": texts,
    "token_ids": tokens,
    "log_probs": numbers,
    "tempered_log_probs": numbers,
    "weights_versions": st.lists(counts, max_size=8).map(tuple),
    "error": texts,
    "num_verifications": counts,
    "num_drafted": counts,
    "num_accepted": counts,
    "strategies": st.lists(st.tuples(texts, counts), max_size=3).map(tuple),
    "experts": st.lists(st.tuples(texts, st.lists(counts).map(tuple))).map(tuple),
    "seconds": st.floats(),
    "generator": texts,
}


real = st.floats(allow_nan=False, allow_infinity=False)
some = st.lists(counts, max_size=8).map(tuple)
by_name = st.dictionaries(texts, real, max_size=3)
names = st.lists(texts, max_size=3).map(tuple)
spreads = st.builds(Spread, mean=real, std=real, min=real, max=real)
lengths = st.builds(Lengths, mean=real, min=counts, p50=counts, p95=counts, max=counts, edges=some, histogram=some)
step_seconds = st.builds(Seconds, **{field.name: real for field in fields(Seconds)})
metrics = st.builds(
    StepMetrics,
    **{name: counts for name, hint in get_type_hints(StepMetrics).items() if hint is int},
    **{name: real for name, hint in get_type_hints(StepMetrics).items() if hint is float},
    **{name: st.none() | real for name, hint in get_type_hints(StepMetrics).items() if hint == float | None},
    weights_digest=texts,
    equal_reward_groups=st.none() | counts,
    reward=spreads,
    reward_components=by_name,
    advantage=spreads,
    kl=st.none() | st.dictionaries(texts, real, min_size=1, max_size=3),
    learning=by_name,
    response_length=lengths,
    strategy=st.dictionaries(texts, counts, max_size=3),
    expert_rows=st.dictionaries(texts, some, max_size=3),
    log_prob_difference=st.builds(LogProbDifference, max=real, mean=real),
    seconds=step_seconds,
)
evaluations = st.builds(
    Evaluation,
    step=counts,
    weights_version=counts,
    num_samples=counts,
    num_failed=counts,
    reward=spreads,
    reward_components=by_name,
    response_length=lengths,
    truncated_fraction=real,
    seconds=real,
)
planned_moves = st.builds(
    PlannedMove, id=texts, sample=texts, source=counts, destination=counts, gain_seconds=st.floats(), reason=texts
)
models = st.builds(
    ModelReport,
    model=texts,
    path=texts,
    attentions=names,
    guarded=names,
    probes=names,
    difference=st.floats(),
    noise=st.floats(),
    bits=texts,
    attention_split=st.none() | counts,
    seconds=st.floats(),
    dtype=texts,
    prefill=texts,
)


def samples_of(num_tokens: int) -> st.SearchStrategy[Sample]:
    def each(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(values, min_size=num_tokens, max_size=num_tokens).map(tuple)

    of_tokens = {
        "token_ids": each(st.integers(0, 2**32 - 1)),
        "log_probs": each(st.floats()),
        "tempered_log_probs": each(st.floats()),
        "weights_versions": each(counts),
    }
    return st.builds(Sample, **said | of_tokens, finish_reason=st.sampled_from(["stop", "length"]))


STRATEGIES: dict[type[Record], st.SearchStrategy[Any]] = {
    Prompt: st.builds(Prompt, **placed, text=texts, token_ids=tokens, seed=counts, weights_version=counts),
    Sample: st.integers(0, 8).flatmap(samples_of) | st.builds(Sample, **said, finish_reason=st.just("error")),
    Score: st.builds(Score, **scores, values=finite, components=components, weights_version=counts, seconds=st.floats())
    | st.builds(Score, **scores, values=numbers, components=components, error=st.just("the model gave NaN")),
    DraftWeights: st.builds(DraftWeights, id=texts, job=texts, version=counts, uri=texts, digest=texts),
    Weights: st.builds(
        Weights,
        id=texts,
        job=texts,
        version=counts,
        role=st.sampled_from(["policy", "critic", "drafter"]),
        uri=texts,
        digest=texts,
    ),
    DatasetInfo: st.builds(
        DatasetInfo,
        id=texts,
        job=texts,
        num_prompts=counts,
        num_held_out=counts,
        last_step=counts,
        columns=st.dictionaries(texts, texts, max_size=3),
    ),
    WorkerInfo: st.builds(
        WorkerInfo,
        id=texts,
        job=texts,
        stage=texts,
        worker=counts,
        host=texts,
        pid=counts,
        grpc_address=texts,
        http_address=texts,
        models=st.dictionaries(texts, models, max_size=3),
        moves_address=texts,
    ),
    Demand: st.builds(Demand, **named, round=counts, num_prompts=counts),
    Load: st.integers(0, 8).flatmap(
        lambda number: st.builds(
            Load,
            **named,
            worker=counts,
            incarnation=texts,
            host=texts,
            weights_version=counts,
            is_leaving=st.booleans(),
            step_seconds=seconds,
            sequence_seconds=seconds,
            prefill_seconds=seconds,
            prefill_tokens=counts,
            num_free_rows=counts,
            num_free_tokens=counts,
            num_prefilled=counts,
            num_found=counts,
            learning_seconds=seconds,
            saved_seconds=seconds,
            tokens_before_learning=st.none() | st.floats(),
            tokens_while_learning=st.none() | st.floats(),
            drafter_version=counts,
            sample_ids=st.lists(texts, min_size=number, max_size=number).map(tuple),
            num_generated=st.lists(st.integers(0, 2**32 - 1), min_size=number, max_size=number).map(tuple),
            num_held=st.lists(st.integers(0, 2**32 - 1), min_size=number, max_size=number).map(tuple),
            generator=texts,
            num_running=counts,
            num_waiting=counts,
            num_finished=counts,
            num_tokens=counts,
            tokens_per_second=st.floats(),
            accepted_per_verification=st.none() | st.floats(),
            strategy=texts,
        )
    ),
    Move: st.builds(Move, **moves, gain_seconds=st.floats(), reason=texts),
    Moved: st.builds(
        Moved,
        **moves,
        how=st.sampled_from(["kv", "tokens", "kept", "lost"]),
        reason=texts,
        num_bytes=counts,
        num_rounds=counts,
        num_tokens=counts,
        num_recomputed=counts,
        pause_seconds=st.floats(),
    ),
    Plan: st.builds(
        Plan,
        id=texts,
        job=texts,
        num_wanted=counts,
        why_wanted=texts,
        ends=st.dictionaries(counts, st.floats(), max_size=3),
        num_generators=counts,
        num_samples=counts,
        latest_end=st.floats(),
        latest_end_after=st.floats(),
        moves=st.lists(planned_moves, max_size=3).map(tuple),
        why_not=st.lists(texts, max_size=3).map(tuple),
        dry=st.dictionaries(counts, texts, max_size=3),
    ),
    Heartbeat: st.builds(
        Heartbeat,
        id=texts,
        job=texts,
        stage=texts,
        worker=counts,
        doing=st.sampled_from(["working", "waiting", "stopped"]),
        what=texts,
        since_seconds=st.floats(),
        overdue_seconds=st.floats(),
        busy_seconds=st.floats(),
    ),
    EvaluationReport: st.builds(EvaluationReport, id=texts, job=texts, evaluation=evaluations),
    StepReport: st.builds(StepReport, id=texts, job=texts, metrics=metrics),
}


records: st.SearchStrategy[Record] = st.one_of(*STRATEGIES.values())
SAMPLE = Sample(
    id="sums/3/7/1", job="sums", step=3, prompt=7, replica=1, prompt_text="2+2=", prompt_token_ids=(50, 43),
    columns_json='{"answer": "4"}', text="4", token_ids=(52, 0), log_probs=(-0.5, -0.25),
    tempered_log_probs=(-0.5, -0.25), weights_versions=(2, 2), finish_reason="stop",
)  # fmt: skip


SCORE = Score(id="sums/3/7/1/reward", sample_id="sums/3/7/1", job="sums", step=3, stage="reward", values=(0.5,))

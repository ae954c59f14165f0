"""One trace a sample over all stages is connected and unchanged by repetition."""

import asyncio
import re
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from collector import running_collector
from example_records import example_evaluation
from stays import PROMPT, UID, traced_sample
from views import Hand

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.records import EvaluationReport, Load, Prompt, Sample, Score, ScoringStage, StepReport, Weights
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.records.models import Drafting
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.vitals import Vitals
from rlhfspec.telemetry import otlp
from rlhfspec.telemetry.base import Delivered, Watcher, WorkerPlace
from rlhfspec.telemetry.folder import SpanFiles, read_spans
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.opening import watching
from rlhfspec.telemetry.prometheus import text_of
from rlhfspec.telemetry.read import life_of, slowest
from rlhfspec.telemetry.spans import Span, span_id, trace_id
from rlhfspec.telemetry.tracer import Tracer
from rlhfspec.worker.health import Health

SAMPLE = traced_sample()
WEIGHTS = Weights(id="sums/weights/3", job="sums", version=3, role="policy", uri="memory:3", digest="00")
LOAD = Load(
    id="sums/load", job="sums", generator="generator-0", step=3, num_running=5, num_waiting=2, num_finished=1,
    num_tokens=9, tokens_per_second=120.5, accepted_per_verification=1.75, strategy="suffix", num_prefilled=40,
    num_found=600, learning_seconds=1.5, saved_seconds=4.0, drafter_version=4096, drafting=(
        Drafting(
            drafter="model", acceptance=(0.9, 0.8), level_share=0.25, num_verifications=10, num_tokens=31,
            saved_seconds=6.5,
        ),
    ),
)  # fmt: skip
STAGES = ("prompts", "generator", "reward", "reference", "trainer")
SPANS = ("prompt", "generation", "reward", "reference", "training")


def score(stage: ScoringStage, *, error: str = "") -> Score:
    values = () if error else (0.5,)
    return Score(
        id=f"{SAMPLE.id}/{stage}", sample_id=SAMPLE.id, job="sums", step=3, stage=stage, values=values, error=error
    )


def report(step: int = 3, *, num_dropped: int = 0) -> StepReport:
    return StepReport(id="sums/3", job="sums", metrics=replace(example_step(step=step), num_dropped=num_dropped))


async def one_life(of: dict[str, Bus], clock: Hand) -> None:
    """Run a sample through separate buses; a stage takes a second, a queue half a second."""
    prompts, samples, trained, scores = await asyncio.gather(
        of["generator"].of("generator").subscribe(Prompt),
        asyncio.gather(*(of[stage].of(stage).subscribe(Sample) for stage in ("reward", "reference"))),
        of["trainer"].of("trainer").subscribe(Sample),
        of["trainer"].of("trainer").subscribe(Score),
    )
    await of["prompts"].of("prompts").publish(PROMPT)
    clock.seconds += 0.5
    [prompt] = await prompts.pull(max_records=1, timeout_seconds=0)
    clock.seconds += 1.0
    await of["generator"].of("generator").publish(SAMPLE)
    await prompt.ack()
    clock.seconds += 0.5
    [arrived] = await trained.pull(max_records=1, timeout_seconds=0)
    for stage, inbox in zip(("reward", "reference"), samples, strict=True):
        [sample] = await inbox.pull(max_records=1, timeout_seconds=0)
        clock.seconds += 1.0
        await of[stage].of(stage).publish(score("reward" if stage == "reward" else "reference"))
        await sample.ack()
    clock.seconds += 0.5
    told = await scores.pull(max_records=2, timeout_seconds=0)
    clock.seconds += 1.0
    await of["trainer"].of("trainer").publish(WEIGHTS)
    clock.seconds += 7.0  # writing the step down is not training
    await of["trainer"].of("trainer").publish(report())
    for delivery in (arrived, *told):
        await delivery.ack()


async def opened(transport: MemoryTransport, watcher: Watcher | None) -> Bus:
    bus = await Bus.open(transport, "sums", uid=UID, workers=dict.fromkeys(STAGES, 1))
    bus.watcher = watcher
    return bus


def traced_life() -> tuple[list[Span], list[Tracer]]:
    spans: list[Span] = []
    clock = Hand()

    async def main() -> list[Tracer]:
        transport = MemoryTransport()
        tracers = {stage: Tracer(UID, spans.append, now=clock) for stage in STAGES}
        await one_life({stage: await opened(transport, tracers[stage]) for stage in STAGES}, clock)
        return list(tracers.values())

    return spans, asyncio.run(main())


def test_a_sample_is_one_connected_trace_over_all_processes() -> None:
    spans, _ = traced_life()
    assert tuple(span.name for span in spans) == SPANS
    assert {span.trace for span in spans} == {trace_id(UID, SAMPLE.id)}
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    parents = {span.name: by_id[span.parent].name if span.parent else "" for span in spans}
    assert parents == {"prompt": "", "generation": "prompt"} | dict.fromkeys(SPANS[2:], "generation")
    places = {span.name: (span.stage, span.worker) for span in spans}
    assert places == dict(zip(SPANS, ((stage, 0) for stage in STAGES), strict=True))


def test_spans_record_waiting_and_working_times() -> None:
    spans, _ = traced_life()
    times = {span.name: (span.waited_seconds, span.seconds) for span in spans}
    assert [times[name] for name in ("generation", "reward", "reference")] == [(0.5, 1.0), (0.5, 1.0), (1.5, 1.0)]
    training = spans[-1]
    assert (training.began, training.ended) == (102.0, 105.5), "from when it arrived to when the weights were out"
    assert training.attributes == {"scored": 104.5, "complete": 104.5}


def test_spans_record_their_work_as_attributes() -> None:
    generation, reward = traced_life()[0][1:3]
    assert generation.attributes == {
        "generator": "generator-0", "tokens": 3, "strategies": "suffix x 3", "engine_steps": 3, "verifications": 3,
        "drafted": 4, "accepted": 2, "weights_versions": "2", "finish_reason": "stop", "work_seconds": 0.5,
    }  # fmt: skip
    assert reward.attributes == {"work_seconds": 0.0, "reward": 0.5}


def test_tracers_keep_nothing_after_a_step() -> None:
    for tracer in traced_life()[1]:
        assert not tracer._taken
        assert not tracer._steps


async def done_twice(taken: type[Prompt] | type[Sample], by: str, made: Sample | Score) -> list[Span]:
    spans: list[Span] = []
    transport = MemoryTransport(clock=(clock := FakeClock()))
    first, second = [await opened(transport, Tracer(UID, spans.append)) for _ in range(2)]
    slow, fast = [await bus.of(by).subscribe(taken) for bus in (first, second)]
    await first.of("prompts").publish(PROMPT)
    if taken is Sample:
        await first.of("generator").publish(SAMPLE)
    await slow.pull(max_records=1, timeout_seconds=0)
    await clock.advance(60.0)
    [delivery] = await fast.pull(max_records=1, timeout_seconds=0)
    await second.of(by).publish(made)
    await delivery.ack()
    await first.of(by).publish(made)
    return spans


async def test_a_repeated_score_has_the_same_span_id_and_is_marked() -> None:
    spans = await done_twice(Sample, "reward", score("reward"))
    assert [(span.name, span.again) for span in spans[2:]] == [("reward", False), ("reward", True)]
    assert spans[2].id == spans[3].id


async def test_a_regenerated_sample_has_a_span_of_its_own() -> None:
    prompt, fast, slow = await done_twice(Prompt, "generator", SAMPLE)
    assert [(span.delivery, span.again) for span in (fast, slow)] == [(2, False), (1, True)]
    assert fast.id != slow.id
    assert fast.parent == slow.parent == prompt.id


def test_spans_report_failed_scores_and_dropped_samples() -> None:
    spans: list[Span] = []
    tracer = Tracer(UID, spans.append)
    tracer.published(WorkerPlace("reward", 0), score("reward", error="timed out"), 1.0, True)
    tracer.taken(WorkerPlace("trainer", 0), SAMPLE, Delivered({}))
    tracer.published(WorkerPlace("trainer", 0), report(num_dropped=12), 1.0, True)
    assert spans[0].attributes["error"] == "timed out"
    assert (spans[1].name, spans[1].attributes["dropped"]) == ("training", 12)


def test_an_evaluation_span_ends_with_its_report_and_bad_headers_are_ignored() -> None:
    spans: list[Span] = []
    tracer = Tracer(UID, spans.append)
    sample = replace(SAMPLE, id="sums/evaluation-3/7/1", purpose="evaluation")
    tracer.taken(WorkerPlace("trainer", 0), sample, Delivered({"traceparent": "00-zz", "sent": "yesterday"}))
    tracer.published(WorkerPlace("trainer", 0), report(), 1.0, True)
    assert not spans, "the step's end is not the evaluation's"
    done = EvaluationReport(id="sums/3/evaluation", job="sums", evaluation=example_evaluation(step=3))
    tracer.published(WorkerPlace("trainer", 0), done, 1.0, True)
    assert [(span.name, span.sample, span.sent) for span in spans] == [("evaluation", sample.id, None)]


def span(name: str = "generation", **fields: object) -> Span:
    stage = {"prompt": "prompts", "generation": "generator", "training": "trainer"}.get(name, name)
    given = {"run": UID, "sample": SAMPLE.id, "stage": stage, "worker": 0, "step": 3, "began": 1.0, "ended": 2.0}
    return Span(**(given | {"name": name} | fields))  # type: ignore[arg-type]


def write(run: Path, *spans: Span) -> None:
    with SpanFiles(run) as files:
        for one in spans:
            files.keep(one)


def test_spans_read_back_from_the_folder_are_those_written(tmp_path: Path) -> None:
    spans, _ = traced_life()
    write(tmp_path, *spans)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(f"{s}-0.jsonl" for s in STAGES)
    spans[0].began = round(spans[0].began, 6)  # the bus read the clock of the system
    assert sorted(read_spans(tmp_path), key=lambda each: SPANS.index(each.name)) == spans


def test_spans_are_written_each_second_not_only_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec.telemetry.folder.FLUSH_SECONDS", 0.01)
    with SpanFiles(tmp_path) as files:
        files.keep(span())
        end = time.monotonic() + 60.0
        while not list(read_spans(tmp_path)) and time.monotonic() < end:
            files._closing.wait(0.01)
        assert list(read_spans(tmp_path)) == [span()]


def test_half_a_line_of_a_killed_process_costs_that_line_alone(tmp_path: Path) -> None:
    write(tmp_path, span())
    file = tmp_path / "traces" / "generator-0.jsonl"
    file.write_text(file.read_text() + span(began=0.5).to_line()[:40])
    write(tmp_path, span(sample="sums/3/7/2"))
    assert [each.sample for each in read_spans(tmp_path)] == [SAMPLE.id, "sums/3/7/2"]


NO_TIME = span().to_line().strip().replace('"began":1.000000', '"began":"x"')


@pytest.mark.parametrize("line", ["{}", "[]", "3", '{"began": 1}', '{"worker":"x"', "€", NO_TIME])
def test_lines_that_are_no_spans_are_left_out(tmp_path: Path, line: str) -> None:
    write(tmp_path, span())
    file = tmp_path / "traces" / "generator-0.jsonl"
    file.write_text(line + "\n" + file.read_text())
    assert list(read_spans(tmp_path)) == [span()]


def test_a_folder_that_is_not_writable_ends_traces_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("a file")
    with SpanFiles(tmp_path) as files:
        files.keep(span())
    files.keep(span())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["traces are no longer written"]
    assert not files._spans


def test_a_trace_shows_the_last_run_and_the_first_of_repeated_spans(tmp_path: Path) -> None:
    first, again = span("prompt", began=0.0, ended=0.1), span(again=True, worker=1, ended=1.5)
    write(tmp_path, first, again, span(ended=3.0), span("prompt", run="later", began=50.0, ended=50.1))
    assert [each.run for each in life_of(tmp_path, SAMPLE.id).spans] == ["later"]
    (tmp_path / "traces" / "prompts-0.jsonl").write_text(span("prompt", began=0.0, ended=0.1).to_line())
    assert [(each.name, each.worker) for each in life_of(tmp_path, "3/7/1").spans] == [("prompt", 0), ("generation", 0)]


def test_an_unknown_sample_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, *(span(sample=f"sums/3/7/{replica}") for replica in range(3)))
    with pytest.raises(InvalidRequest, match=re.escape("the nearest: sums/3/7/0, sums/3/7/1, sums/3/7/2")):
        life_of(tmp_path, "sums/3/7/9")
    with pytest.raises(InvalidRequest, match="the nearest: sums/3/7/"):
        life_of(tmp_path, "smus-3/7/1")


def test_slowest_returns_the_slowest_samples_of_the_last_trained_step(tmp_path: Path) -> None:
    names = [f"sums/3/{prompt}/0" for prompt in range(4)]
    write(
        tmp_path,
        *(span(sample=name, ended=2.0 + seconds) for name, seconds in zip(names, (1.0, 9.0, 3.0, 2.0), strict=True)),
        span("training", sample=names[0], ended=99.0),
        span(sample="sums/4/0/0", step=4, ended=50.0),
        span(sample="sums/evaluation-3/0/0", ended=60.0),
    )
    assert [life.sample for life in slowest(tmp_path, 2)] == [names[1], names[2]]
    assert [life.sample for life in slowest(tmp_path, 2, step=4)] == ["sums/4/0/0"]
    with pytest.raises(InvalidRequest, match="no traces of this step"):
        slowest(tmp_path, 2, step=5)


def test_a_collector_gets_one_connected_trace_from_several_processes(tmp_path: Path) -> None:
    with running_collector() as (collector, endpoint):

        async def main() -> None:
            transport = MemoryTransport()
            with ExitStack() as stack:
                each = {s: stack.enter_context(watching("sums", UID, run=None, otlp_endpoint=endpoint)) for s in STAGES}
                await one_life({s: await opened(transport, looking.watcher) for s, looking in each.items()}, Hand())

        asyncio.run(main())
        queues = [f"queue of {name}" for name in SPANS[1:]]
        assert sorted(found.name for _, found in collector.spans) == sorted([*SPANS, *queues])
        collector.wait_for(lambda: "rlhfspec_records_published" in collector.metrics)
    found = {each.span_id: each for _, each in collector.spans}
    assert {each.trace_id.hex() for each in found.values()} == {trace_id(UID, SAMPLE.id)}
    assert [each.name for each in found.values() if not each.parent_span_id] == ["prompt"]
    assert all(each.parent_span_id in found for each in found.values() if each.name != "prompt")
    services = {each.name: service for service, each in collector.spans}
    assert {services[name] for name in SPANS} == {f"rlhfspec-{stage}" for stage in STAGES}
    by_name = {each.name: {a.key: a.value for a in each.attributes} for each in found.values()}
    assert by_name["generation"]["rlhfspec.strategies"].string_value == "suffix x 3"
    assert by_name["training"]["rlhfspec.sample"].string_value == SAMPLE.id


def test_a_lost_collector_costs_spans_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.2)
    with otlp.OtlpSpans("http://127.0.0.1:1", {}) as away:
        for _ in range(3):
            away.keep(span())
    assert "did not accept the last spans in time" in caplog.text


def numbers(meters: Meters) -> dict[str, float]:
    lines = [x for x in text_of(meters.metrics()).splitlines() if x.startswith("rlhfspec_") and "_created" not in x]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_meters_count_published_and_received_records() -> None:
    clock = Hand()
    place = WorkerPlace("generator", 1)
    meters = Meters(now=clock)
    headers = meters.publishing(WorkerPlace("prompts", 0), PROMPT)
    meters.published(WorkerPlace("prompts", 0), PROMPT, 99.5, True)
    meters.published(WorkerPlace("prompts", 0), PROMPT, 99.5, False)
    clock.seconds += 2.0
    meters.taken(place, PROMPT, Delivered(headers))
    clock.seconds += 3.0
    meters.published(place, LOAD, 105.0, True)
    meters.published(place, SAMPLE, 105.0, True)
    meters.ended(place, Prompt, PROMPT.id, "ack")
    meters.ended(place, Prompt, "sums/3/7/2", "nak")
    lost = {"nats": 1, "redis": 0}
    for server in ("nats", "redis"):
        meters.reconnects(server, lambda server=server: lost[server])  # type: ignore[misc]
    meters.restarts("generator", 1, lambda: 2)
    found = numbers(meters)
    assert not meters._records[place, Prompt].sent
    told = 'stage="generator",type="prompt",worker="1"'
    expected = {
        'rlhfspec_records_published_total{stage="prompts",there="false",type="prompt",worker="0"}': 1.0,
        'rlhfspec_records_published_total{stage="prompts",there="true",type="prompt",worker="0"}': 1.0,
        f"rlhfspec_records_taken_total{{{told}}}": 1.0,
        f'rlhfspec_records_ended_total{{how="ack",{told}}}': 1.0,
        f'rlhfspec_records_ended_total{{how="nak",{told}}}': 1.0,
        'rlhfspec_publish_seconds_sum{stage="prompts",type="prompt",worker="0"}': 1.0,
        f"rlhfspec_queue_seconds_sum{{{told}}}": 2.0,
        f"rlhfspec_trip_seconds_sum{{{told}}}": 5.0,
        f"rlhfspec_trip_seconds_count{{{told}}}": 1.0,
        'rlhfspec_generator_tokens_per_second{stage="generator",worker="1"}': 120.5,
        'rlhfspec_generator_accepted_per_verification{stage="generator",worker="1"}': 1.75,
        'rlhfspec_generator_running{stage="generator",worker="1"}': 5.0,
        'rlhfspec_generator_waiting{stage="generator",worker="1"}': 2.0,
        'rlhfspec_weights_version{role="policy",stage="generator",worker="1"}': 2.0,
        'rlhfspec_generator_strategies_total{stage="generator",strategy="suffix",worker="1"}': 1.0,
        'rlhfspec_generator_prefill_tokens_total{how="run",stage="generator",worker="1"}': 40.0,
        'rlhfspec_generator_prefill_tokens_total{how="found",stage="generator",worker="1"}': 600.0,
        'rlhfspec_generator_learning_seconds{how="spent",stage="generator",worker="1"}': 1.5,
        'rlhfspec_generator_learning_seconds{how="saved",stage="generator",worker="1"}': 4.0,
        'rlhfspec_generator_drafter_version{stage="generator",worker="1"}': 4096.0,
        'rlhfspec_generator_tokens_per_verification{drafter="model",stage="generator",worker="1"}': 3.1,
        'rlhfspec_generator_draft_saved_seconds{drafter="model",stage="generator",worker="1"}': 6.5,
        'rlhfspec_generator_draft_level_share{drafter="model",stage="generator",worker="1"}': 0.25,
        'rlhfspec_generator_draft_acceptance{depth="1",drafter="model",stage="generator",worker="1"}': 0.9,
        'rlhfspec_generator_draft_acceptance{depth="2",drafter="model",stage="generator",worker="1"}': 0.8,
        f'rlhfspec_records_ended_total{{how="term",{told}}}': 0.0,
        'rlhfspec_reconnects_total{server="nats"}': 1.0,
        'rlhfspec_reconnects_total{server="redis"}': 0.0,
        'rlhfspec_restarts_total{stage="generator",worker="1"}': 2.0,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_step_metrics_are_set_as_far_as_they_apply() -> None:
    meters = Meters()
    report = StepReport(id="r", job="sums", metrics=replace(example_step(step=3), kl=None))
    meters.published(WorkerPlace("trainer", 0), report, 0.0, True)
    assert 'rlhfspec_step_kl{stage="trainer",worker="0"}' not in numbers(meters)
    metrics = example_step(step=4)
    meters.published(WorkerPlace("trainer", 0), replace(report, metrics=metrics), 0.0, True)
    found = numbers(meters)
    assert found['rlhfspec_step{stage="trainer",worker="0"}'] == 4.0
    assert found['rlhfspec_step_kl{stage="trainer",worker="0"}'] == metrics.kl_k3
    assert found['rlhfspec_step_reward{stage="trainer",worker="0"}'] == metrics.reward.mean
    assert found['rlhfspec_step_policy_loss{stage="trainer",worker="0"}'] == metrics.policy_loss


def test_vitals_report_the_seconds_of_each_kind_of_work() -> None:
    vitals = Vitals(clock := FakeClock())
    meters = Meters()
    vitals.told = meters.worked
    with vitals.worker("generator", 0).working("loading weights version 7", deadline_seconds=60.0):
        clock._now = 1.5
    found = numbers(meters)
    assert found['rlhfspec_work_seconds_sum{stage="generator",work="loading weights version",worker="0"}'] == 1.5


def test_meters_of_two_processes_are_separate() -> None:
    one, other = Meters(), Meters()
    one.reconnects("nats", lambda: 1)
    assert "rlhfspec_reconnects_total" in text_of(one.metrics())
    assert "rlhfspec_reconnects_total" not in text_of(other.metrics())


def test_a_process_serves_its_metrics_where_prometheus_asks() -> None:
    with watching("sums", UID, run=None, metrics=True) as looking:
        assert looking.watcher is looking.meters
        with Health("reward", 0, Vitals(), metrics=looking.metrics_text) as health:
            looking.meters.reconnects("redis", lambda: 1)
            with urllib.request.urlopen(f"http://{health.http_address}/metrics", timeout=30) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                assert 'rlhfspec_reconnects_total{server="redis"} 1.0' in answer.read().decode()


def test_trace_headers_follow_the_w3c_format() -> None:
    headers = Tracer(UID, lambda _: None).publishing(WorkerPlace("generator", 0), SAMPLE)
    trace = trace_id(UID, SAMPLE.id)
    assert headers["traceparent"] == f"00-{trace}-{span_id(trace, 'generation')}-01"
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])

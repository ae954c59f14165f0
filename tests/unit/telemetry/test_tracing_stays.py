"""The trace of a sample moved in all ways has no gap."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from collector import running_collector
from hypothesis import given, strategies as st
from stays import PROMPT, UID, Watched, moved_there_and_back, progress
from traced_moves import check_times
from views import printed

from rlhfspec.messages.records import MoveOutcome, Prompt
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.messages.wire.codec import encode
from rlhfspec.runs.view.waterfall import slowest_table, waterfall
from rlhfspec.stage.bus import Bus
from rlhfspec.telemetry.joining import joined
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.otlp import OtlpSpans
from rlhfspec.telemetry.read import Life
from rlhfspec.telemetry.spans import Span, span_id, trace_id
from rlhfspec.telemetry.tracer import Tracer


def test_a_sample_moved_there_and_back_has_three_stays_and_two_moves() -> None:
    watched, last = moved_there_and_back()
    life = watched.life()
    assert watched.told(life) == [
        ("generation", 0, 1.0, 4.0), ("move", 0, 4.0, 4.5), ("generation", 1, 4.5, 6.0), ("move", 1, 6.0, 6.5),
        ("generation", 0, 6.5, 10.5),
    ]  # fmt: skip
    assert life.queue_seconds == pytest.approx(1.0)
    check_times(life, list(life.stays), list(life.moves))
    by_id = {span.id: span for span in life.spans}
    assert len(by_id) == 6
    parents = [by_id[span.parent].what for span in life.spans if span.parent]
    assert parents == ["prompt", "generation", "generation", "generation 1.2", "generation 1.2"]
    assert by_id[last] is life.stays[-1]


def test_each_stay_says_what_it_made() -> None:
    stays = moved_there_and_back()[0].life().stays
    names = ("generator", "tokens_before", "tokens", "strategies")
    names += ("engine_steps", "drafted", "accepted", "work_seconds")
    assert [tuple(stay.attributes.get(name) for name in names) for stay in stays] == [
        ("generator-0", None, 4, "plain x 4", 4, 0, 0, 1.0),
        ("generator-1", 4, 2, "plain x 1", 1, 0, 1, 0.5),
        ("generator-0", 6, 4, "suffix x 4", 4, 6, 0, 1.5),
    ]  # fmt: skip
    assert [stay.attributes["work_seconds"] for stay in stays] == [1.0, 0.5, 1.5]
    assert [stay.attributes["weights_versions"] for stay in stays] == ["2", "2", "3"]
    assert [stay.attributes.get("left") for stay in stays] == ["moved", "moved", None]


def test_a_move_span_records_source_destination_bytes_and_pause() -> None:
    moves = moved_there_and_back()[0].life().moves
    assert moves[0].attributes == {
        "move": "sums/move/01", "source": 0, "destination": 1, "how": "kv", "bytes": 1_200_000, "rounds": 2,
        "recomputed": 0, "pause_seconds": 0.5,
    }  # fmt: skip


def test_a_failed_move_leaves_one_stay_and_a_refused_one_no_span() -> None:
    watched = Watched()
    watched.after(1.0).takes(0)
    watched.after(1.0).tells(0, 1, "kept", pause=0.0, reason="busy")
    watched.after(2.0).tells(0, 2, "kept", pause=1.5, reason="the destination is gone")
    last = watched.after(1.0).finishes(0)
    life = watched.life()
    assert watched.told(life) == [("generation", 0, 1.0, 5.0), ("move", 0, 2.5, 4.0)]
    assert last == life.stays[0].id == span_id(trace_id(UID, PROMPT.id), "generation")
    assert "came to nothing: the destination is gone; 1.2 MB in 2 rounds" in shown(life)


def test_queue_time_of_a_redelivered_sample_is_its_wait_for_the_dead_generator() -> None:
    watched = Watched()
    watched.after(0.5).takes(0)
    watched.after(0.9).says(0)
    watched.after(0.2).says(0)
    watched.after(0.2).says(0)
    watched.after(10.0).takes(1, delivery=2)
    last = watched.after(2.0).finishes(1)
    life = watched.life()
    assert watched.told(life) == [("generation", 0, 0.5, 11.8), ("generation", 1, 11.8, 13.8)]
    assert life.queue_seconds == pytest.approx(0.5)
    assert [life.is_in_vain(stay) for stay in life.stays] == [True, False]
    assert last == life.stays[1].id
    assert "its generator ended without reporting it" in shown(life)
    assert "× in vain: it was generated again" in shown(life)
    [row] = [line for line in printed(slowest_table([life])) if PROMPT.id in line]
    assert row.split("   ")[0].strip() == PROMPT.id
    for part in ("13.8 s", "500 ms", "2.00 s, and 11.3 s in vain", "10", "generator 1"):
        assert part in row


def test_a_stay_at_a_generator_that_died_after_a_move_is_lost() -> None:
    watched = Watched()
    watched.takes(0)
    first = progress(4, plain=4)
    watched.after(3.5).takes(1, came=first)
    watched.gives(0, first, 1)
    watched.after(2.0).says(1)
    watched.after(12.0).takes(2, delivery=2)
    watched.after(1.0).finishes(2)
    life = watched.life()
    assert watched.told(life) == [
        ("generation", 0, 0.0, 3.0), ("move", 0, 3.0, 3.5), ("generation", 1, 3.5, 17.5), ("generation", 2, 17.5, 18.5),
    ]  # fmt: skip
    assert [life.is_in_vain(stay) for stay in life.stays] == [True, True, False]
    assert len({span.id for span in life.spans}) == len(life.spans)
    assert life.queue_seconds == 0.0


def test_a_trace_shows_where_a_sample_is_still_generated() -> None:
    watched = Watched()
    watched.takes(0)
    watched.after(4.0).says(0)
    life = watched.life()
    assert watched.told(life) == [("generation", 0, 0.0, 4.0)]
    assert "it is still there, or its generator is gone" in shown(life)
    watched.after(1.0).finishes(0)
    assert watched.told(watched.life()) == [("generation", 0, 0.0, 5.0)]


def test_a_stay_of_a_killed_generator_ends_when_its_sample_was_sent() -> None:
    watched = Watched()
    watched.takes(0)
    watched.after(4.0).says(0)
    watched.after(2.0).scored()
    life = watched.life()
    assert watched.told(life) == [("generation", 0, 0.0, 5.5), ("reward", 0, 6.0, 6.0)]
    assert "its generator ended without reporting it" in shown(life)


def test_a_stay_records_tokens_generated_before_though_the_first_span_is_lost() -> None:
    watched = Watched()
    watched.after(3.0).takes(1, came=progress(4, plain=4))
    watched.after(1.0).finishes(1)
    life = watched.life()
    assert [(stay.attributes["tokens_before"], stay.attributes["tokens"]) for stay in life.stays] == [(4, 6)]
    [row] = [line for line in printed(slowest_table([life])) if PROMPT.id in line]
    assert row.split()[-3:] == ["10", "generator", "1"]


def test_a_handed_back_sample_is_queued_until_it_is_taken_again() -> None:
    watched = Watched()
    watched.after(1.0).takes(0)
    watched.after(3.0).hands_back(0)
    watched.after(2.0).takes(1, delivery=2)
    watched.after(1.0).finishes(1)
    life = watched.life()
    assert watched.told(life) == [("generation", 0, 1.0, 4.0), ("generation", 1, 6.0, 7.0)]
    assert life.queue_seconds == pytest.approx(3.0)
    assert "handed back" in shown(life)


@pytest.mark.parametrize(
    ("how", "moved_at", "finished_at", "told_at", "moved_until"),
    [("lost", 3.5, 7.5, 23.5, 3.5), ("kv", 3.1, 3.2, 3.5, 3.2)],
    ids=["the destination never confirmed it", "it was finished before it was said"],
)
def test_a_stay_begins_where_the_sample_went_on_whatever_its_source_reports(
    how: MoveOutcome, moved_at: float, finished_at: float, told_at: float, moved_until: float
) -> None:
    watched = Watched()
    watched.takes(0)
    first = progress(4, plain=4)
    watched.after(moved_at).takes(1, came=first)
    watched.after(finished_at - moved_at).finishes(1)
    watched.after(told_at - finished_at).gives(0, first, 1, how, pause=told_at - 3.0)
    assert watched.told(watched.life()) == [
        ("generation", 0, 0.0, 3.0), ("move", 0, 3.0, moved_until), ("generation", 1, moved_until, finished_at),
    ]  # fmt: skip


def test_a_lost_move_lasts_until_the_sample_is_delivered_again() -> None:
    watched = Watched()
    watched.takes(0)
    reason = "the destination never confirmed it"
    watched.after(23.0).gives(0, progress(4, plain=4), 1, "lost", pause=20.0, reason=reason)
    watched.after(10.0).takes(2, delivery=2)
    watched.after(1.0).finishes(2)
    life = watched.life()
    assert watched.told(life) == [("generation", 0, 0.0, 3.0), ("move", 0, 3.0, 33.0), ("generation", 2, 33.0, 34.0)]
    assert life.queue_seconds == 0.0
    assert "the destination never confirmed it; 1.2 MB in 2 rounds" in shown(life)


def test_a_slow_second_copy_of_a_sample_is_marked_as_in_vain() -> None:
    watched = Watched()
    watched.takes(0)
    watched.after(12.0).takes(1, delivery=2)
    watched.after(1.0).finishes(0)
    watched.after(1.0).finishes(1, is_new=False)
    life = watched.life()
    assert [(stay.worker, life.is_in_vain(stay)) for stay in life.stays] == [(0, False), (1, True)]


async def test_a_failed_import_of_a_moved_sample_leaves_no_stay() -> None:
    """The prompt is adopted before the engine takes the sequence, and returned on failure."""
    spans: list[Span] = []
    meters = Meters()
    bus = await Bus.open(MemoryTransport(), "sums", uid=UID, workers={"prompts": 1, "generator": 2, "reward": 1})
    inboxes = []
    for watcher in (None, Tracer(UID, spans.append), meters):
        bus.watcher = watcher
        inboxes.append(await bus.of("generator", 1).subscribe(Prompt))
    source, *watched = inboxes
    await bus.of("prompts").publish(PROMPT)
    [held] = await source.pull(max_records=1, timeout_seconds=0)
    for inbox in watched:
        adopted = await inbox.adopt(encode(held.record), PROMPT.id, held.held.token, held.headers)
        adopted.held.leave(None)
        adopted = await inbox.adopt(encode(held.record), PROMPT.id, held.held.token, held.headers)
        inbox.arrived(adopted, progress(4, plain=4))
        adopted.held.leave(progress(6, plain=6, moves=1, at=200.0))
    assert [(span.stay, span.attributes["tokens"]) for span in spans if span.name == "generation"] == [(2, 2)]
    counted = {metric.name: metric.values for metric in meters.metrics()}
    assert [value for _, value in counted["records_taken"]] == [1]
    assert [value for _, value in counted["records_ended"] if value] == [1]
    assert counted["queue_seconds"] == [], "it was in no queue"


@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_stays_and_moves_never_overlap_despite_clock_skew(num_stays: int, draw: random.Random) -> None:
    """Clocks differ by seconds, and files are in any order."""
    now, spans = 0.0, []
    for number in range(1, num_stays + 1):
        skew = draw.uniform(-3.0, 3.0)
        shared: dict[str, Any] = {"run": UID, "sample": "s", "stage": "generator", "step": 1, "stay": number}
        for name, most in (("generation", 2.0), ("move", 0.5))[: 1 + (number < num_stays)]:
            began, now = now, now + draw.uniform(0.0, most)
            told = {"how": "kv", "move": f"m{number}"} if name == "move" else {}
            span = Span(name=name, worker=1, began=began + skew, ended=now + skew, attributes=told, **shared)
            spans.append(span)
    draw.shuffle(spans)
    parts = sorted(joined(spans), key=lambda span: (span.stay, span.name == "move"))
    assert all(part.ended >= part.began for part in parts)
    assert all(after.began >= before.ended for before, after in pairwise(parts))


def test_a_collector_gets_each_ended_stay_and_move_once() -> None:
    watched, _ = moved_there_and_back()
    scored = Span(
        run=UID, sample=PROMPT.id, name="reward", stage="reward", worker=0, step=3, began=112.0, ended=113.0,
        sent=111.0, parent=watched.spans[-1].id,
    )  # fmt: skip
    with running_collector() as (collector, endpoint):
        with OtlpSpans(endpoint, {}) as sending:
            for span in [*watched.spans, scored, replace(watched.spans[-1], delivery=2, is_open=True)]:
                sending.keep(span)
        found = [each for _, each in collector.spans]
    names = sorted(each.name for each in found)
    assert names == [*["generation"] * 3, *["move"] * 2, "prompt", "queue of generation", "queue of reward", "reward"]
    ids = {each.span_id for each in found}
    assert len(ids) == len(found)
    assert all(each.parent_span_id in ids for each in found if each.name != "prompt")
    told = [{a.key: a.value for a in each.attributes} for each in found if each.name == "generation"]
    assert sorted(each["rlhfspec.stay"].int_value for each in told) == [1, 2, 3]
    assert sum(each["rlhfspec.tokens"].int_value for each in told) == 10


def test_the_printed_trace_shows_stays_and_moves() -> None:
    text = shown(life := moved_there_and_back()[0].life())
    rows = [line for line in text.splitlines() if line.lstrip().startswith(("generation", "move"))]
    assert [row.split("  ")[1:2] for row in rows]
    for row, said in zip(
        rows,
        (
            "4 tokens in 4 steps: plain x 4; weights 2",
            "with its KV; 1.2 MB in 2 rounds",
            "2 more tokens in 1 steps: plain x 1",
            "with its KV; 1.2 MB in 2 rounds",
            "4 more tokens in 4 steps: suffix x 4; 0 of 6 drafted tokens accepted; weights 3",
        ),
        strict=True,
    ):
        assert said in row
    assert "generator 0 -> 1" in rows[1]
    assert "generator 1 -> 0" in rows[3]
    assert "─ paused while it moves" in text
    assert "in vain" not in text
    [row] = [line for line in printed(slowest_table([life])) if PROMPT.id in line]
    for part in ("1.00 s", "8.50 s", "2, 1.00 s", "10", "generator 0, 1, 0"):
        assert part in row


def shown(life: Life) -> str:
    return "\n".join(printed(waterfall(life, width=20), 240))

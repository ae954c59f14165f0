"""kubectl-rlhf without a cluster prints tables and starts light. See also e2e/test_plugin.py."""

from rich.console import Console

from rlhfspec.control.show import document_of
from rlhfspec.messages.records import Doing, Heartbeat, Load, WorkerInfo
from rlhfspec.plugin.logs import parsed
from rlhfspec.plugin.pods import state_of
from rlhfspec.plugin.status import table_of
from rlhfspec.runs.live.live import LiveView
from rlhfspec.runs.live.run_state import RunState, after


def test_what_control_shows_becomes_a_table() -> None:
    load = Load(
        id="load/1", job="sums", generator="generator-1", step=3, num_running=7, num_waiting=2, num_finished=9,
        num_tokens=900, tokens_per_second=123.4, accepted_per_verification=2.345, strategy="tree 16", worker=1,
        sample_ids=("a", "b"), num_generated=(1, 2), num_held=(3, 4),
    )  # fmt: skip
    told = [*of("reward", 0, "waiting", "responses"), *of("generator", 1, "working", "step 3"), load]
    view = LiveView(run=after(RunState(), [(0.0, each) for each in told]), now=0.1)
    pod = {
        "metadata": {"labels": {"rlhfspec.io/role": "generator", "rlhfspec.io/worker": "1"}},
        "spec": {"nodeName": "node2"},
    }
    console = Console(width=150)
    with console.capture() as captured:
        console.print(table_of(document_of(view), [pod]))
    rows = [line.replace("│", " ").split() for line in captured.get().splitlines() if "-" in line and "┃" not in line]
    assert rows[0] == ["generator-1", "node2", "step", "3", "tree", "16", "5s", "123", "7", "2", "2.35", "2"]
    assert rows[1] == ["reward-0", "waits", "for", "responses", "5s"]


def of(stage: str, worker: int, doing: Doing, what: str) -> tuple[WorkerInfo, Heartbeat]:
    ready = WorkerInfo(
        id="w", job="sums", stage=stage, worker=worker, host="h", pid=1, grpc_address="", http_address=""
    )
    beat = Heartbeat(
        id="b", job="sums", stage=stage, worker=worker, doing=doing, what=what, since_seconds=5.0, overdue_seconds=-1.0,
        busy_seconds=1.0,
    )  # fmt: skip
    return ready, beat


def test_lines_that_are_no_json_are_shown_as_they_are() -> None:
    line = parsed("2026-01-01T00:00:00.123456789Z Traceback (most recent call last):", "trainer-0")
    assert (line.level, line.message) == ("", "Traceback (most recent call last):")
    assert line.as_text().plain.startswith("00:00:00.123  trainer-0")
    assert parsed('2026-01-01T00:00:00Z {"a": 1}', "trainer-0").message == '{"a": 1}'
    assert parsed("2026-01-01T00:00:00Z 12", "trainer-0").message == "12"


def test_a_sample_is_found_in_words_too() -> None:
    line = parsed("2026-01-01T00:00:00Z no answer for sums/3/7/1", "reward-0")
    assert line.is_about("sums/3/7/1")
    assert not line.is_about("sums/4/7/1")


def test_a_pod_that_goes_or_was_evicted() -> None:
    pod = {"metadata": {"name": "a"}, "spec": {}, "status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}}
    assert (state_of(pod).word, state_of(pod).detail, state_of(pod).is_well) == ("Evicted", "disk", False)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert state_of(pod).word == "Terminating"

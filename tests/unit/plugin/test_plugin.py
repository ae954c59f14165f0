"""kubectl-rlhf without a cluster: tables, a light start, and sanitised output. See also e2e/test_plugin.py."""

import io
import json
import sys
import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from dashboards import beat, snapshot
from hypothesis import example, given, strategies as st
from views import printed

from rlhfspec.control.show import document_of
from rlhfspec.plugin.logs import parsed
from rlhfspec.plugin.output import SafeConsole, say, shown
from rlhfspec.plugin.pods import state_of
from rlhfspec.plugin.status import table_of, tree_of
from rlhfspec.plugin.why import explanation
from rlhfspec.runs.live.live import LiveView
from rlhfspec.runs.live.run_state import RunState, after


def test_the_view_of_control_becomes_a_table() -> None:
    speed = {"tokens_per_second": 123.4, "accepted_per_verification": 2.345}
    ready, busy, working = snapshot(1, owned=("a", "b"), what="step 3")
    idle = replace(beat(), doing="waiting", what="responses")
    told = [ready, busy, replace(working, **speed), replace(ready, stage="reward", worker=0), idle]
    view = LiveView(run=after(RunState(), [(0.0, each) for each in told]), now=0.1)
    labels = {"rlhfspec.io/role": "generator", "rlhfspec.io/worker": "1"}
    pod = {"metadata": {"labels": labels}, "spec": {"nodeName": "node2"}}
    lines = [line for line in printed(table_of(document_of(view), [pod])) if "-" in line and "┃" not in line]
    rows = [line.replace("│", " ").split() for line in lines]
    assert rows[0] == ["generator-1", "node2", "step", "3", "suffix-d4-w1-b2", "1s", "123", "3", "1", "2.35", "2"]
    assert rows[1] == ["reward-0", "waits", "for", "responses", "1s"]


def test_lines_that_are_no_json_are_shown_as_they_are() -> None:
    line = parsed("2026-01-01T00:00:00.123456789Z Traceback (most recent call last):", "trainer-0")
    assert (line.level, line.message) == ("", "Traceback (most recent call last):")
    assert line.as_text().plain.startswith("00:00:00.123  trainer-0")
    assert parsed('2026-01-01T00:00:00Z {"a": 1}', "trainer-0").message == '{"a": 1}'
    assert parsed("2026-01-01T00:00:00Z 12", "trainer-0").message == "12"


def test_a_log_line_is_about_a_sample_named_in_its_text() -> None:
    line = parsed("2026-01-01T00:00:00Z no answer for sums/3/7/1", "reward-0")
    assert line.is_about("sums/3/7/1")
    assert not line.is_about("sums/4/7/1")


def test_the_state_of_a_pod_says_evicted_or_terminating() -> None:
    pod = {"metadata": {"name": "a"}, "spec": {}, "status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}}
    assert (state_of(pod).word, state_of(pod).detail, state_of(pod).is_well) == ("Evicted", "disk", False)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert state_of(pod).word == "Terminating"


SINCE = "2026-01-01T00:00:00Z"
# What a terminal acts upon, or shows other text by: C0 but line ends, DEL, C1, marks that reverse text or hide.
MARKS = st.sampled_from("\x00\x07\x08\x1b\x7f\x84\x9b\x9c\u202a\u202e\u2066\u2069\u200b\u2028\ud800\r\t\n[]mH;0?")
HOSTILE = st.text(MARKS | st.characters(), min_size=1, max_size=60)
RED = "\x1b[31mred\x1b]0;title\x07 \u202e\x9b2J[link=https://example.com]here[/link]"


def is_tame(text: str) -> bool:
    return all(each == "\n" or unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for each in text)


class Cluster:
    def __init__(self, said: str) -> None:
        self._said = said

    def pods(self, job: str) -> list[dict[str, Any]]:
        ended = {"exitCode": 1, "reason": self._said, "message": self._said}
        return [pod({"terminated": ended}), pod({"waiting": {"reason": self._said, "message": self._said}})]

    def warnings(self, about: set[str]) -> list[dict[str, Any]]:
        return [{"involvedObject": {"name": "sums"}, "reason": self._said, "message": self._said}]

    def log(self, name: str, *, tail: int) -> list[str]:
        line = {"level": self._said, "message": self._said, "sample": self._said, "error": self._said}
        return [f"{SINCE} {json.dumps(line)}", f"{SINCE} {self._said}"]


def pod(state: dict[str, Any]) -> dict[str, Any]:
    labels = {"rlhfspec.io/role": "reward", "rlhfspec.io/worker": "0"}
    status = {"phase": "Running", "containerStatuses": [{"name": "worker", "state": state}]}
    metadata = {"name": "sums-reward-0", "uid": "p1", "labels": labels, "creationTimestamp": SINCE}
    return {"metadata": metadata, "spec": {"nodeName": "node1"}, "status": status}


def job(said: str) -> dict[str, Any]:
    condition = {"type": "Healthy", "status": "False", "reason": said, "message": said, "lastTransitionTime": SINCE}
    status = {"phase": said, "reason": said, "message": said, "conditions": [condition], "roles": {said: {}},
              "run": {"number": 1, "folder": said}, "progress": {"shown": said}}  # fmt: skip
    return {"metadata": {"name": "sums", "uid": "j1", "creationTimestamp": SINCE}, "spec": {}, "status": status}


@given(HOSTILE)
@example(RED)
def test_shown_text_has_no_control_characters_and_loses_nothing(said: str) -> None:
    assert is_tame(shown(said))
    assert shown(shown(said)) == shown(said)
    assert "\t" in said or "\r\n" in said or len(shown(said)) == len(said)


@given(HOSTILE)
@example(RED)
def test_no_command_prints_control_characters(said: str) -> None:
    cluster, printed = Cluster(said), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", printed)
        for line in explanation(cluster, job(said)):  # type: ignore[arg-type]
            say(line)
    console = SafeConsole(file=printed, width=200)
    console.print(tree_of(job(said), cluster.pods("sums")))
    state = {"doing": said, "what": said, "since_seconds": 1.0}
    load = {"strategy": said, "tokens_per_second": 1.0, "num_running": 1, "num_waiting": 1, "num_samples": 1}
    console.print(table_of({"workers": [{"name": said, **state, "load": load}]}, cluster.pods("sums")))
    for line in cluster.log("sums-reward-0", tail=1):
        console.print(parsed(line, said).as_text(), soft_wrap=True)
    assert is_tame(printed.getvalue()), printed.getvalue()


def test_in_a_terminal_the_only_escapes_are_our_own_colours() -> None:
    printed = io.StringIO()
    console = SafeConsole(file=printed, width=200, force_terminal=True, color_system="standard", legacy_windows=False)
    console.print(tree_of(job(RED), Cluster(RED).pods("sums")))
    state = {"doing": RED, "what": RED, "since_seconds": 1.0}
    console.print(table_of({"workers": [{"name": RED, **state, "load": None}]}, []))
    said = printed.getvalue()
    escapes = {part.partition("m")[0] for part in said.split("\x1b")[1:]}
    assert escapes
    assert all(each.startswith("[") and set(each[1:]) <= set("0123456789;") for each in escapes), escapes
    assert "[link=https://example.com]" in said
    assert is_tame(said.replace("\x1b", ""))


def test_what_a_log_says_stays_readable() -> None:
    line = parsed(f"{SINCE} \x1b[32mloss\x1b[0m\t0.5 50%|#####\r 100%|##########\r", "trainer-0")
    assert line.as_text().plain == "00:00:00.000  trainer-0     ␛[32mloss␛[0m   0.5 50%|#####␍ 100%|##########"
    assert shown("two\nlines, a\ttab, naïve 漢字 ✓") == "two\nlines, a        tab, naïve 漢字 ✓"


def test_status_shows_a_gateway_only_while_it_serves() -> None:
    served = job("fine")
    served["metadata"]["namespace"] = "rl"
    served["status"]["serving"] = {"url": "http://gateway/v1", "tokenSecret": "clients"}
    for status in ("False", "True"):
        condition = {"type": "Serving", "status": status, "reason": "", "lastTransitionTime": SINCE}
        served["status"]["conditions"] = [condition]
        console = SafeConsole(file=io.StringIO(), width=200)
        console.print(tree_of(served, []))
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("kubectl get secret clients -n rl " in printed) is ("serves http://gateway/v1" in printed)
        assert ("serves" in printed) is (status == "True")

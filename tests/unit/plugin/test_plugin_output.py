"""kubectl rlhf sanitises everything from pods and the API server."""

import io
import json
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlhfspec.plugin.logs import parsed
from rlhfspec.plugin.output import SafeConsole, say, shown
from rlhfspec.plugin.status import table_of, tree_of
from rlhfspec.plugin.why import explanation

SINCE = "2026-01-01T00:00:00Z"
# What a terminal acts upon, or shows other text by: C0 but line ends, DEL, C1, marks that reverse text or hide.
HOSTILE = st.text(
    st.one_of(
        st.sampled_from("\x00\x07\x08\x1b\x7f\x84\x9b\x9c\u202a\u202e\u2066\u2069\u200b\u2028\ud800\r\t\n[]mH;0?"),
        st.characters(),
    ),
    min_size=1,
    max_size=60,
)
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
def test_nothing_that_a_terminal_acts_upon_is_shown_and_nothing_is_lost(said: str) -> None:
    assert is_tame(shown(said))
    assert shown(shown(said)) == shown(said)
    assert "\t" in said or "\r\n" in said or len(shown(said)) == len(said)


@given(HOSTILE)
@example(RED)
def test_no_command_prints_it_as_it_is(said: str) -> None:
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

"""A job and its events are read without the right to read logs: they hold no words of its processes."""

import json

import pytest
from operator_world import World

WORDS = ("the key is hunter2", "spec.hunter2-x: no", "storage away: hunter2", "left: hunter2", "completed: hunter2")


@pytest.mark.parametrize("code", [0, 1, 75, 78, 137])
@pytest.mark.parametrize("role", ["prepare", "reward", "trainer", "control"])
@pytest.mark.parametrize("words", WORDS)
def test_no_words_of_a_pod_are_in_the_status_or_its_events(role: str, code: int, words: str) -> None:
    world = World()
    world.settle() if role == "prepare" else world.to_running()
    world.run_all().end_pod(f"sums-{role}-0", code, words).settle()
    world.pass_time(61).settle()
    assert "hunter2" not in json.dumps(world.status) + str(world.events)

"""A device's costs exclude launches; recording them disturbs no other thread."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rlhfspec.engine import SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward import graphs, profile, runner
from rlhfspec.engine.loading import make_engine
from rlhfspec.tiny import perturbed, random_model

TREE = DraftPlan(drafter="model", depth=3, width=2, branch=2)


class DeviceClock:
    def __init__(self, second: Any) -> None:
        self.now, self._second, self._num_kernels = 0.0, second, second.seen().kernels

    def synchronize(self, *device: Any) -> None:
        self.now += self._second.seen().kernels > self._num_kernels
        self._num_kernels = self._second.seen().kernels

    def perf_counter(self) -> float:
        return self.now


def test_a_forward_is_timed_to_its_end_and_without_its_first_sight(
    second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_sequences": 4, "max_context": 64, "profile": False, "speculation": "off"}
    engine = make_engine(random_model("llama", seed=0), EngineConfig(device="second:0", **settings))
    clock = DeviceClock(second)
    monkeypatch.setattr(torch.get_device_module("second"), "synchronize", clock.synchronize)
    monkeypatch.setattr(profile, "time", clock)
    target = engine.state.target.runner
    for draft in (False, True):
        assert profile._time_forward(target, 4, 16, engine.state.target.table.slots.shape, draft=draft) == 1.0


def test_what_is_timed_is_what_steps_replay(second: Any) -> None:
    """Graphs depend on the slot table's shape, so the profile uses the engine's."""
    settings = {"max_sequences": 4, "max_context": 64, "profile": False, "speculation": "off"}
    engine = make_engine(random_model("llama", seed=0), EngineConfig(device="second:0", **settings))
    target = engine.state.target.runner
    target._graphs = graphs.GraphedForward(target._run_layers, torch.device("second:0"), graphs.call_again)
    profile.profile(engine.state)
    shapes = set(target._graphs._captured)
    assert {shape[2] for shape in shapes} == {engine.state.target.table.slots.shape}
    engine.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=8))
    assert set(target._graphs._captured) == shapes


def test_a_capture_is_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture mode "global" would break on calls of other threads, such as a trainer's."""
    given: list[dict[str, Any]] = []
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: type("Graph", (), {"replay": lambda self: None})())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **keywords: given.append(keywords) or nullcontext())
    assert graphs.CudaCapture()(lambda: torch.ones(1))().item() == 1.0
    assert given == [{"pool": (0, 1), "capture_error_mode": "thread_local"}]


@pytest.mark.parametrize(("speculation", "exact"), [("off", "off"), (TREE, "off"), (TREE, "on")])
def test_steps_capture_nothing(second: Any, monkeypatch: pytest.MonkeyPatch, speculation: Any, exact: str) -> None:
    """All graphs are captured at construction, the largest first, as a capture takes as long as many steps."""
    captured: list[int] = []

    def capture(run: Any) -> Any:
        captured.append(run().shape[1])
        return run

    monkeypatch.setattr(runner, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "CudaCapture", lambda: capture)
    settings = {"max_sequences": 4, "max_context": 64, "profile": False, "prefill_chunk": 8, "tree_slots": 16}
    config = EngineConfig(device="second:0", speculation=speculation, exact=exact, **settings)
    model = random_model("llama", seed=0)
    engine = make_engine(model, config, draft=perturbed(random_model("llama", seed=0), 0.1))
    assert captured == [rows for space in captures(engine) for rows in space]
    at_the_start = len(captured)
    assert at_the_start > 0
    engine.generate([[5, 6, 7]] * 3 + [[8] * 20], SamplingParams(max_tokens=12))
    assert len(captured) == at_the_start


def captures(engine: Any) -> list[list[int]]:
    found = []
    for space in engine.state.spaces:
        shapes = [key[:2] for key in space.runner._graphs._captured]
        assert shapes == sorted(shapes, reverse=True)
        found.append([rows for rows, _ in shapes])
    return found

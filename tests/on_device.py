"""Device of all tests: the CPU, or the second device with RLHFSPEC_TEST_DEVICE=second."""

import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

VARIABLE = "RLHFSPEC_TEST_DEVICE"
DEVICE = os.environ.get(VARIABLE, "cpu")
# The CPU's own kernels add a row up alone; torch's products, which the second device has, round it by those beside it:
# each of two may be 1e-5 from the slow decoder, which the suites assert too.
LOG_PROB_TOLERANCE = 0.0 if DEVICE == "cpu" else 2e-5
BY_COMPANY = "in torch's products a row's bits depend on the rows beside it"


def call_again(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return `run` itself as the capture of a graph without CUDA: a replay is a call."""
    return run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"on_the_cpu(reason): skipped where {VARIABLE} is another device")
    if DEVICE not in ("cpu", "second"):
        raise pytest.UsageError(f"{VARIABLE} is cpu or second, not {DEVICE}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        return
    absent = why_no_second()
    for item in items:
        marker = item.get_closest_marker("on_the_cpu")
        if reason := absent or (f"on the CPU alone: {marker.args[0]}" if marker else ""):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the second device before any test, as torch starts device threads at the first backward pass only."""
    if DEVICE != "cpu" and not why_no_second():
        _take(DEVICE)
    elif any("second" in getattr(item, "fixturenames", ()) for item in session.items):
        why_no_second()


@functools.cache
def why_no_second() -> str:
    """Load the second device; return the reason if there is none, else ""."""
    import second_device

    try:
        second_device.load()
    except second_device.Unavailable as reason:
        return str(reason)
    return ""


def _take(device: str) -> None:
    import torch
    from second_device.attention import attend

    from rlhfspec.engine.config import EngineConfig
    from rlhfspec.engine.forward import chunks, eagle_forward, runner
    from rlhfspec.training.learning.learner import Learner
    from rlhfspec.training.scoring.log_probs import LogProbScorer
    from rlhfspec.training.scoring.rewards.model import ModelRewards
    from rlhfspec.training.scoring.rewards.sources import RewardSources
    from rlhfspec.training.scoring.values import ValueScorer

    torch.__future__.set_swap_module_params_on_conversion(True)  # see second_device.swapping
    made = (EngineConfig, Learner, LogProbScorer, ModelRewards, RewardSources, ValueScorer)
    for takes in (*(each.__init__ for each in made), Learner.from_spec.__func__):
        assert takes.__kwdefaults__["device"] == "cpu"
        takes.__kwdefaults__["device"] = device
    for calls in (runner, chunks, eagle_forward):
        calls.tree_attention = attend  # type: ignore[attr-defined]


@pytest.fixture
def second() -> Iterator[ModuleType]:
    """Yield tests/second_device, loaded: torch has the devices second:0 and second:1."""
    import second_device

    if reason := why_no_second():
        pytest.skip(reason)
    with second_device.swapping():
        yield second_device

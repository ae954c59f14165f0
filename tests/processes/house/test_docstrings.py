import doctest
import importlib

import pytest
from house import House
from places import ROOT

# Run by another Python.
SCRIPTS = {
    "rlhfspec.bench.rivals.vllm_worker",
    *(f"rlhfspec.engine.vllm.inside.{name}" for name in ("host", "law_v1", "law_v2", "worker")),
}


@pytest.mark.parametrize("name", sorted(set(House.of_git(ROOT).modules) - SCRIPTS))
def test_module_imports_and_its_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("name", ["choose_tests", "counting", "house", "selector_world", "tiers", "twins.simulator"])
def test_examples_of_tools_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_a_failing_example_would_be_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda _: None).failed == 1

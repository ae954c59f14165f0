"""The GPU day script runs to its end without a GPU."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[3] / "bench"
sys.path.insert(0, str(BENCH))
import gpu_day  # noqa: E402
from gpu_parts.measure import Day, Found  # noqa: E402

from rlhfspec.engine.vllm.finding import INSTALL_VLLM, VARIABLE, find_python  # noqa: E402

QUICK = [name for name in gpu_day.PARTS if name not in ("loop", "vllm")]  # a run of its own, which other tests have


@pytest.mark.sweep(parts=len(QUICK))
@pytest.mark.parametrize("part", QUICK)
def test_part_runs_through(part: str, tmp_path: Path) -> None:
    day = Day.on("cpu", tmp_path / "day.jsonl")
    gpu_day.run_all([part], day, minutes=2.5)
    results = day.results()
    assert results
    assert all(set(result) == {"part", "name", "value", "unit", "expected"} for result in results), results


@pytest.mark.whole("children of vLLM")
@pytest.mark.skipif(find_python(None) is None, reason=INSTALL_VLLM)
@pytest.mark.timeout(900)
def test_the_part_of_vllm_runs_through(tmp_path: Path) -> None:
    day = Day.on("cpu", tmp_path / "day.jsonl")
    gpu_day.run_all(["vllm"], day, minutes=14)
    found = {result["name"]: result["value"] for result in day.results()}
    assert found["arithmetic"] == "vllm-0.32-cpu"
    assert found["samples other than our engine's"] == 0
    assert min(found[f"{name}, 2 sequences"] for name in ("own", "vllm", "LLM.generate", "the law")) > 0


def test_without_vllm_its_part_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = Day.on("cpu", tmp_path / "day.jsonl")
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    gpu_day.run_part("vllm", day)
    assert (day.results()[-1]["name"], day.results()[-1]["value"]) == ("left out", INSTALL_VLLM)


@pytest.mark.whole("a GPU day on the second device")
def test_a_part_runs_through_on_the_second_device(second: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_day.py"), "--device", "second", "--only", "environment"]
    command += ["--minutes", "2", "--out", str(tmp_path / "day.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "0 failed" in done.stdout, done.stdout + done.stderr


def test_part_that_hangs_leaves_a_line_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "LEAST_SECONDS", 0.2)  # less than torch takes to be imported
    day = Day.on("cpu", tmp_path / "day.jsonl")
    gpu_day.run_all(["environment", "law"], day, minutes=0.0)
    assert [(result["part"], result["error"]) for result in day.results()] == [
        ("environment", "its time was over"), ("law", "its time was over"),
    ]  # fmt: skip


def test_part_that_fails_leaves_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_day.ROOMS, "law", "kernels")
    day = Day.on("cpu", tmp_path / "day.jsonl")
    gpu_day.run_part("law", day)
    [result] = day.results()
    assert "AttributeError" in result["error"]


def test_a_finding_is_compared_with_its_expectation() -> None:
    assert Found("a", "b", 3.5, expected=">= 3.4").is_met
    assert Found("a", "b", 1, expected="= 0").is_met is False
    assert Found("a", "b", "2.13").is_met is None

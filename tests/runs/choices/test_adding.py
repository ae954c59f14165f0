"""The steps of docs/adding.md work: its files and entries alone, put into place, run jobs."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT
from runs import answers_of, invoke

MOST_LINES_OF_AN_ENGINE = 60


@dataclass(frozen=True)
class Shown:
    path: str
    table: str | None
    text: str


def shown(title: str) -> list[Shown]:
    """Return the blocks under a title that become part of the package."""
    return [block for block in blocks_of(title) if not block.path.startswith("tests/")]


def shown_test(title: str) -> Shown:
    (test,) = [block for block in blocks_of(title) if block.path.startswith("tests/")]
    return test


def blocks_of(title: str) -> list[Shown]:
    document = (ROOT / "docs" / "adding.md").read_text()
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", document, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"```python\n# (\S+?\.py)(?:, in (\w+))?\n(.*?)```", section, re.DOTALL)
    return [Shown(path, table or None, text) for path, table, text in blocks]


def with_entry(module: str, table: str, entry: str) -> str:
    begin = module.index(f"{table} = Registry(")
    end = module.index("\n)", begin)
    beside = module.find("\n    beside=", begin, end)
    place = end if beside < 0 else beside
    return f"{module[:place]}\n{entry.rstrip()}{module[place:]}"


class Overlay:
    """The packages that the blocks extend, placed before the repository's."""

    def __init__(self, folder: Path, blocks: list[Shown]) -> None:
        self._folder = folder
        for block in blocks:
            original = ROOT / block.path
            mirror = folder / original.relative_to(ROOT / "libs")
            self._mirror(original.parent, mirror.parent)
            if block.table is None:
                assert not original.exists(), f"{block.path} is there already"
                mirror.write_text(block.text)
            else:
                mirror.unlink()
                mirror.write_text(with_entry(original.read_text(), block.table, block.text))

    def _mirror(self, package: Path, mirror: Path) -> None:
        """Make real folders of the package and its parents, up to the namespace `rlhfspec`."""
        if mirror.is_dir() and not mirror.is_symlink():
            return
        if mirror.parent.name != "rlhfspec":
            self._mirror(package.parent, mirror.parent)
            mirror.unlink()
        mirror.mkdir(parents=True)
        for file in package.iterdir():
            (mirror / file.name).symlink_to(file)

    def pytest(self, block: Shown) -> subprocess.CompletedProcess[str]:
        path = self._folder / block.path
        path.parent.mkdir(parents=True)
        path.write_text(block.text)
        settings = ("-c", os.devnull, "--rootdir", str(self._folder), "-p", "no:cacheprovider", "-W", "error")
        return self.python("-m", "pytest", "-q", *settings, str(path))

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        paths = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)

    def rlhfspec(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "rlhfspec.cli.start", *map(str, arguments))


def test_each_example_of_adding_is_one_file_and_one_table_entry() -> None:
    for title, table in (("An algorithm", "ALGORITHMS"), ("A drafter", "DRAFTERS"), ("An engine", "ENGINES")):
        assert [block.table for block in shown(title)] == [None, table]


def test_the_example_engine_is_short() -> None:
    engine = next(block.text for block in shown("An engine") if block.table is None)
    assert len(engine[engine.index("class ") :].strip().splitlines()) <= MOST_LINES_OF_AN_ENGINE


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("title", ["A drafter", "An engine"])
def test_the_added_examples_pass_the_tests_of_their_contract(title: str, tmp_path: Path) -> None:
    """It runs the subclassed suites of `rlhfspec.testing`, in every mode that the document names."""
    ran = Overlay(tmp_path, shown(title)).pytest(shown_test(title))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


@pytest.mark.parametrize(
    ("path", "value"),
    [("algorithm.name", "raft"), ("generation.speculation.mode", "echo"), ("generation.engine", "plain")],
)
def test_the_added_choices_are_refused_without_their_blocks(job_file: Path, path: str, value: str) -> None:
    result = invoke(job_file, "out", f"{path}={value}")
    assert result.exit_code != 0
    assert f"spec.{path}" in result.output


def test_an_algorithm_is_added(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    overlay = Overlay(tmp_path_factory.mktemp("overlay"), shown("An algorithm"))
    alone = overlay.rlhfspec(
        "validate", job_file, "--set", "algorithm.name=raft", "--set", "algorithm.samplesPerPrompt=1"
    )
    assert "raft compares the responses to one prompt: must be >= 2" in " ".join(alone.stderr.split())
    assert '"gspo", "raft"' in " ".join(overlay.rlhfspec("schema", "--crd").stdout.replace("\\", "").split())
    out = job_file.parent / "out"
    ran = overlay.rlhfspec("run", job_file, "--out", out, "--set", "algorithm.name=raft", "--set", "training.steps=2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert json.loads((out / "manifest.json").read_text())["outcome"] == "completed"


GENERATES = """
import json, sys
from rlhfspec.engine import Engine, SamplingParams

def tokens(engine, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    done = engine.generate([[3, 4, 5, 3, 4], [9, 8]], params)
    strategies = {name for each in done for name, _ in each.stats.strategies}
    return [list(each.token_ids) for each in done], sum(each.stats.num_accepted for each in done), strategies

engine = Engine.from_pretrained(sys.argv[1], speculation="off", max_context=64, profile=False)
for temperature in (0, 1.0):
    engine.set_speculation("off")
    plain, _, _ = tokens(engine, temperature)
    for mode in ("echo", "echo-d4", "adaptive"):
        engine.set_speculation(mode)
        drafted, accepted, strategies = tokens(engine, temperature)
        assert drafted == plain, (mode, temperature)
        if mode == "echo-d4":
            assert any(name.startswith("echo") for name in strategies), strategies
            assert accepted or temperature, "greedy decoding of a tiny model repeats itself"
print("the same tokens")
"""


def test_a_drafter_is_added(models: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    overlay = Overlay(tmp_path_factory.mktemp("overlay"), shown("A drafter"))
    ran = overlay.python("-c", GENERATES, str(models / "policy"))
    assert ran.stdout.strip() == "the same tokens", ran.stderr


def test_an_engine_is_added(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    small = ("training.steps=2", "generation.speculation.mode=off")
    invoke(job_file, "ours", *small, code=0)
    overlay = Overlay(tmp_path_factory.mktemp("overlay"), shown("An engine"))
    given = (*small, "generation.engine=plain", "roles.generator.workers=2")
    sets = [argument for each in given for argument in ("--set", each)]
    elastic = ("--set", "generation.engine=plain", "--set", "roles.generator.replicas={min: 1, max: 2}")
    refused = overlay.rlhfspec("validate", job_file, *elastic)
    assert "samples of the engine plain cannot move" in " ".join(refused.stderr.split())
    theirs = overlay.rlhfspec("run", job_file, "--out", job_file.parent / "theirs", *sets)
    assert theirs.returncode == 0, theirs.stdout + theirs.stderr
    samples = answers_of(job_file.parent / "theirs")
    assert len(samples) == 2 * 3 * 3
    assert samples == answers_of(job_file.parent / "ours")

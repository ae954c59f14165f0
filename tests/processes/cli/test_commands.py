import os
import re
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from faults.processes import is_alive
from places import ROOT
from runs import command
from started import eventually
from typer.testing import CliRunner

from rlhfspec.cli.beside import BENCH
from rlhfspec.cli.main import app
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.sweep.table import BEGIN, END
from rlhfspec.sweep.verdict import Verdict
from rlhfspec.tiny import random_model

OUTSIDE = {"bench", "simulator", "sweep"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"no wheel can be built here: {built.stderr[-200:]}")
    [file] = folder.glob("rlhfspec-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("rlhfspec", "_rlhfspec")):
            (folder / path.name).symlink_to(path)
    return folder


def test_the_wheel_configuration_includes_no_package_of_the_bench() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {path.name for root in built["only-include"] for path in (ROOT / root).iterdir()}
    assert {"cli", "engine"} <= packages
    assert not packages & OUTSIDE


def test_the_wheel_has_no_benchmark_and_works_without(wheel: Path, others: Path, tmp_path: Path) -> None:
    packages = {path.name for path in (wheel / "rlhfspec").iterdir()}
    assert {"cli", "engine", "tiny", "testing"} <= packages
    assert not packages & OUTSIDE

    def rlhfspec(*words: str) -> subprocess.CompletedProcess[str]:
        """Run rlhfspec with -S: site-packages' .pth files would lead to this checkout."""
        command = [sys.executable, "-S", "-m", "rlhfspec.cli.start", *words]
        environment = os.environ | {"PYTHONPATH": f"{wheel}{os.pathsep}{others}"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    for words in (["--help"], ["--version"], ["schema"], ["validate", str(ROOT / "examples" / "grpo.yaml")]):
        done = rlhfspec(*words)
        assert done.returncode == 0, done.stderr
    for name in BENCH:
        missed = rlhfspec(name, "--help")
        assert (missed.returncode, missed.stdout) == (2, "")
        assert missed.stderr == f"rlhfspec {name} is a command of rlhfspec-bench: pip install rlhfspec-bench\n"


@pytest.mark.parametrize("name", BENCH)
def test_help_of_a_bench_command_shows_its_own_description(name: str) -> None:
    assert BENCH[name] in " ".join(CliRunner().invoke(app, [name, "--help"]).stdout.split())
    assert name in CliRunner().invoke(app, ["--help"]).stdout


def test_an_unknown_command_is_refused() -> None:
    assert "No such command 'nowhere'" in command(["nowhere"], 2).output


def check(*arguments: str | Path, code: int = 0) -> str:
    return command(["models", "check", *map(str, arguments)], code).output


def test_models_check_reports_a_right_model_in_detail(tmp_path: Path) -> None:
    random_model("llama", seed=0).save_pretrained(tmp_path / "mine")
    output = check(tmp_path / "mine")
    assert f"{tmp_path}/mine: right in every bit" in output
    lines = dict(line.strip().split(maxsplit=1) for line in output.splitlines() if line.startswith("  "))
    assert lines["class"] == "LlamaForCausalLM"
    assert lines["runs"] == "as        all layers in one call of our kernels"
    assert lines["attention"] == "4 heads of 12 over 2, scale 0.288675"
    assert lines["exactOnPolicy"] == "yes, in float32 and bfloat16"
    assert re.fullmatch(
        r"log-probs at most [01]\.\d\d times as far from float32's as Hugging Face's at positions \d+ to \d+",
        lines["bfloat16"],
    )
    assert lines["judged"] == "in every way"
    assert "up to position 512" in output, "as far as the model goes"


def test_models_check_reports_device_flips(second: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model("llama", seed=0).save_pretrained(tmp_path / "mine")
    monkeypatch.setattr("rlhfspec.sweep.verdict.judge", lambda make, **how: Verdict("right"))
    monkeypatch.setattr("rlhfspec.sweep.flips._PROMPT_LENGTHS", (5,))
    monkeypatch.setattr("rlhfspec.sweep.flips._TEMPERATURES", (1.0,))
    output = check(tmp_path / "mine", "--device", "second:0")
    found = r"\d+ of 64 tokens are not the oracle's(, which led by \S+ at most)?; {} of 1 samples parts? from itself"
    for line, parted in (("fast on second:0 bfloat16", r"\d"), ("exact on second:0 float32", "0")):
        name, _, dtype = line.rpartition(" ")
        assert re.search(rf"{name} *{dtype}: {found.format(parted)}", output), output
    output = check("llama", "--device", "second:0", code=2)
    assert "--device: is for a model given by folder or hub id" in output


def test_models_check_refuses_a_state_space_model(tmp_path: Path) -> None:
    tiny_model(tiny_config("mamba")).save_pretrained(tmp_path / "state-space")
    output = check(tmp_path / "state-space", code=2)
    assert "refused: MambaMixer: backbone.layers.0.mixer mixes tokens outside of AttentionInterface" in output


def test_one_wrong_model_decides_the_exit_code_of_models_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model("llama", seed=0).save_pretrained(tmp_path / "mine")
    verdicts = iter([Verdict("wrong", "another token than the oracle's"), Verdict("refused", "a reason")])
    monkeypatch.setattr("rlhfspec.sweep.verdict.judge", lambda make, **how: next(verdicts))
    assert "wrong: another token than the oracle's" in check(tmp_path / "mine", tmp_path / "mine", code=1)


def test_a_large_model_is_judged_in_fewer_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tiny_config("mixtral")).save_pretrained(tmp_path / "large")
    monkeypatch.setattr("rlhfspec.bench.commands.models._LARGE", 1000)
    output = check(tmp_path / "large", "--max-context", "256")
    assert "judged         without gradients, low-rank update, trees and moves: it is large" in output
    assert "up to position 256" in output


def test_a_missing_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "no such folder, and the model cannot be loaded" in check(tmp_path / "nope", code=2)


def test_a_misspelt_model_type_is_refused_before_the_hub_is_asked() -> None:
    assert check("mixtrall", code=2) == "models: no such folder or type; did you mean mixtral? (got 'mixtrall')\n"


def test_types_are_judged_with_their_variants_and_written_into_a_document(tmp_path: Path) -> None:
    document = tmp_path / "models.md"
    document.write_text(f"# Mine\n{BEGIN}{END}")
    output = check("xlnet", "biogpt", "--no-variants", "--workers", "1", "--table", document)  # a refusal is no mistake
    assert "1 right, 0 wrong, 1 refused, 0 not made" in output
    text = document.read_text()
    assert text.startswith("# Mine\n")
    assert re.search(r"at most \de-0\d from the oracle's\.\nIn bfloat16 they are at most [01]\.\d\d times", text)
    assert "| its layers | biogpt |" in text
    assert "| xlnet |" in text


def test_help_says_what_the_exit_codes_mean() -> None:
    result = command(["models", "check", "--help"], 0)
    assert "right in every bit (exit code 0), wrong (1)" in " ".join(result.output.split())


# The first is refused at once; then there is work for so long that it is ended in its midst on any machine.
TYPES = ("xlnet", "llama", "mixtral", "gemma2", "qwen2", "mistral", "gpt2", "falcon", "phi3", "gemma3_text", "opt")


def test_ctrl_c_ends_models_check_and_its_processes() -> None:
    command = [sys.executable, "-m", "rlhfspec.cli.start", "models", "check", *TYPES, "--workers", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it would be ignored
    )  # fmt: skip
    process.stdout.readline()  # the first verdict
    children = _children(process.pid)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    eventually(lambda: not any(map(is_alive, children)), "its processes end")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

"""Commands of rlhfspec-bench are found if installed; otherwise one line says so."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from rlhfspec.cli.beside import BENCH
from rlhfspec.cli.main import app

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


def test_its_configuration_names_no_root_of_the_bench() -> None:
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
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    for words in (["--help"], ["--version"], ["schema"], ["validate", str(ROOT / "examples" / "grpo.yaml")]):
        done = rlhfspec(*words)
        assert done.returncode == 0, done.stderr
    for name in BENCH:
        missed = rlhfspec(name, "--help")
        assert (missed.returncode, missed.stdout) == (2, "")
        assert missed.stderr == f"rlhfspec {name} is a command of rlhfspec-bench: pip install rlhfspec-bench\n"


@pytest.mark.parametrize("name", BENCH)
def test_help_says_of_each_what_it_says_itself(name: str) -> None:
    said = " ".join(CliRunner().invoke(app, [name, "--help"]).stdout.split())
    assert BENCH[name] in said
    assert name in CliRunner().invoke(app, ["--help"]).stdout


def test_help_imports_none_of_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from rlhfspec.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "sys.exit(any(name.startswith('rlhfspec.bench') for name in sys.modules) or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_command_is_none() -> None:
    done = CliRunner().invoke(app, ["nowhere"])
    assert done.exit_code == 2
    assert "No such command 'nowhere'" in done.output

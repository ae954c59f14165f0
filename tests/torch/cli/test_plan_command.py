"""`rlhfspec plan` on the cluster examples, and its refusals."""

from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from rlhfspec.cli.main import app

JOBS = ROOT / "examples" / "cluster"
FITS = {"8b-8xh100": "h100", "70b-4x8xb200": "b200"}


def rlhfspec(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def test_every_example_for_a_cluster_is_here() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == set(FITS)


@pytest.mark.parametrize(("name", "gpu"), FITS.items())
def test_an_example_for_a_cluster_is_valid_and_fits(name: str, gpu: str) -> None:
    job = JOBS / f"{name}.yaml"
    code, output = rlhfspec("validate", job, "--set", "roles.generator.workers=1")  # memory is not that of this machine
    assert (code, output.splitlines()[0]) == (0, f"{job}: valid"), output
    code, output = rlhfspec("plan", job, "--gpu-memory", gpu)
    assert code == 0, output
    assert [line.split()[0] for line in output.splitlines()[1:]] == ["model", "trainer", "generator", "weights"]


def test_what_cannot_fit_is_refused_with_the_sum() -> None:
    code, output = rlhfspec("plan", JOBS / "70b-4x8xb200.yaml", "--gpu-memory", "80")
    assert code == 2
    assert "does not fit\n  trainer: weights 17.6 + gradients 17.6 + optimizer 35.3" in output
    assert "  generator: weights 141.1 + KV 1.4 + forwards 1.8 = 144.3 GB of the 68 GB that it may take" in output


def test_roles_that_share_a_gpu_add_up() -> None:
    job = JOBS / "8b-8xh100.yaml"
    code, output = rlhfspec("plan", job, "--gpus", "4")
    assert code == 2
    assert "wanted by each of 8 processes (trainer 4, generator 4), and there are 4" in output
    shared = ("--gpus", "4", "--set", "shareGpus=true", "--set", "generation.gpuMemoryFraction=0.5")
    code, output = rlhfspec("plan", job, *shared)
    assert code == 2
    assert "GPU 3: 1 x trainer 43.9 + 1 x generator 40.0 = 83.9 GB" in output
    code, output = rlhfspec("plan", job, *shared, "--gpu-memory", "141")
    assert code == 0, output


def test_a_model_whose_configuration_is_not_here_is_named(tmp_path: Path) -> None:
    code, output = rlhfspec("plan", JOBS / "8b-8xh100.yaml", "--set", f"model.path={tmp_path}")
    assert code == 2
    assert "spec.model.path" in output


def test_an_unknown_gpu_is_refused() -> None:
    code, output = rlhfspec("plan", JOBS / "8b-8xh100.yaml", "--gpu-memory", "h10")
    assert code == 2
    assert "--gpu-memory: must be a number of GB or one of a10g" in output

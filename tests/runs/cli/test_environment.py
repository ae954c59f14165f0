"""Commands in unusual environments work, or one line names the problem."""

import errno
import os
import pwd
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from runs import invoke
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.errors import StorageError, TransportUnavailable
from rlhfspec.messages.servers.guardian import Guardians
from rlhfspec.tiny.recipe import cache_folder
from rlhfspec.worker.worker import host_told

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # what a locale that is not UTF-8 does


def command(*arguments: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "rlhfspec.cli.start", *arguments],
        capture_output=True, encoding="utf-8", env=os.environ | environment, timeout=120, check=False,
    )  # fmt: skip


def test_names_and_contents_are_utf_8_in_every_locale(job_file: Path) -> None:
    folder = job_file.parent / "über 数据"
    folder.mkdir()
    (folder / "dä ta.jsonl").write_text('{"prompt": "über 数据", "answer": "✓"}\n' * 6, encoding="utf-8")
    (folder / "rewards.py").write_text((job_file.parent / "rewards.py").read_text() + "# ✓\n", encoding="utf-8")
    job = yaml.safe_load(job_file.read_text())
    job["spec"]["dataset"]["path"] = "./dä ta.jsonl"
    path = folder / "jöb ✓.yaml"
    path.write_text(yaml.safe_dump(job, allow_unicode=True), encoding="utf-8")
    done = command("validate", str(path), **C_LOCALE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jöb ✓.yaml: valid" in done.stdout
    assert "dä ta.jsonl, 6 rows" in done.stdout


def test_an_interpreter_without_docstrings_is_refused_in_one_line(job_file: Path) -> None:
    done = command("run", str(job_file), PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -OO (PYTHONOPTIMIZE=2) removes docstrings, which transformers needs; use -O instead\n"


def test_an_interpreter_without_asserts_is_accepted(job_file: Path) -> None:
    done = command("validate", str(job_file), PYTHONOPTIMIZE="1")
    assert done.returncode == 0, done.stderr


def as_a_plain_user() -> tuple[str, ...]:
    """Return a command prefix that drops root's capabilities, as root reads everything."""
    if os.getuid():
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and there is no setpriv")
    return ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


def test_what_this_user_cannot_read_is_named_with_its_field(job_file: Path, models: Path) -> None:
    mine = job_file.parent / "mine"
    shutil.copytree(models / "policy", mine)
    (mine / "model.safetensors").chmod(0)
    (job_file.parent / "data.jsonl").chmod(0)
    done = command("validate", str(job_file), "--set", f"model.path={mine}", before=as_a_plain_user())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for field, file in (("model", mine / "model.safetensors"), ("dataset", job_file.parent / "data.jsonl")):
        assert f"spec.{field}.path: {file} cannot be read by this user" in done.stderr


def test_a_cache_that_cannot_be_made_is_named_with_what_to_set(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", "/dev/null/cache")
    last = invoke(job_file, "out", "model.path=tiny:sums", "model.drafter=null", code=1).output.splitlines()[-1]
    assert last == "/dev/null/cache/models: cannot be created: Not a directory (set RLHFSPEC_CACHE to another folder)"
    assert not (job_file.parent / "out").exists()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run with an unknown user id."""
    from rlhfspec.kernels.cpu import build

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("RLHFSPEC_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(StorageError, match="no home folder: set RLHFSPEC_CACHE"):
        cache_folder()
    with pytest.raises(build.BuildError, match="no home folder: set RLHFSPEC_CACHE"):
        build._cache_dir()
    monkeypatch.setenv("RLHFSPEC_CACHE", "/cache")
    assert (cache_folder(), build._cache_dir()) == (Path("/cache/models"), Path("/cache/kernels"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "Resource temporarily unavailable (too many processes or threads: raise ulimit -u or the pids limit)",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "out/job.yaml"),
            "out/job.yaml: Too many open files (limit on open files: raise ulimit -n)",
        ),
        (MemoryError(), "out of memory: raise ulimit -v or the container's limit"),
    ],
)
def test_a_limit_of_the_system_is_reported_in_one_line(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def refuse(self: Guardians) -> NoReturn:
        raise error

    here = job_file.parent / "here"
    (here / "thesis").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(Guardians, "start", refuse)
    result = CliRunner().invoke(app, ["run", "--processes", str(job_file), "--out", "out"])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == said
    assert [path.name for path in here.iterdir()] == ["thesis"]


def test_an_error_without_a_named_cause_keeps_its_traceback(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Guardians) -> NoReturn:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.chdir(job_file.parent)
    monkeypatch.setattr(Guardians, "start", fail)
    result = CliRunner().invoke(app, ["run", "--processes", str(job_file), "--out", "out"])
    assert isinstance(result.exception, OSError)


def test_a_model_is_not_blamed_for_a_limit_on_threads(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    from rlhfspec.huggingface.loading import load_model

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(OSError, match="can't start new thread") as refused:
        load_model(models / "policy")
    assert refused.value.errno == errno.EAGAIN


def test_ports_that_are_used_up_are_no_wrong_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> NoReturn:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr("rlhfspec.worker.worker.socket.socket.bind", refuse)
    with pytest.raises(TransportUnavailable, match=r"127\.0\.0\.1: no port is free"):
        host_told({})

"""`rlhfspec run --processes` with real servers and processes has the curve of one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from faults.processes import named, of_run
from places import TESTS
from runs import lines_of, train
from started import PATIENCE_SECONDS, TWO, Started, eventually, hold_rewards, stopping_at

from rlhfspec.messages.loop import STAGES


def test_one_generator_killed_and_one_by_hand_change_no_curve(job_file: Path, starting: Callable[..., Started]) -> None:
    """Two generators, two rewards. The first step waits until one generator is killed and a third joined."""
    hold = hold_rewards(job_file, "0 many")
    steps = "training.steps=6"
    whole = train(job_file, "one", steps, *TWO)
    run = starting("many", steps, *TWO, fresh=True)
    run.until("(8 of 8)")
    uid, connections = run.connections["uid"], run.folder / "processes" / "connections.json"
    assert len(named(uid, "launcher")) == 1
    os.kill(run.pid_of("generator", 1), signal.SIGKILL)
    assert "started again" in run.until("generator 1: killed by SIGKILL")
    command = [sys.executable, "-m", "rlhfspec.generator", "--connections", str(connections), "--worker", "7"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    by_hand = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        run.until("generator 7 joined")
        assert by_hand.pid in of_run(uid), "the guardian would end it too"
        hold.write_text("2 many")
        run.until("step 2/")
        by_hand.send_signal(signal.SIGTERM)
        output, _ = by_hand.communicate(timeout=PATIENCE_SECONDS)
        assert by_hand.returncode == 0, output
        hold.unlink()
    finally:
        by_hand.kill()
        by_hand.communicate()
    run.ends()
    run.check_alike(whole)
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["outcome"] == "completed"
    ones = dict.fromkeys(("prompts", "reference", "trainer", "rebalancer"), 1)
    assert manifest["processes"] == {"generator": 2, "reward": 2} | ones
    of_one = json.loads((job_file.parent / "one" / "manifest.json").read_text())
    assert manifest["models"].keys() == of_one["models"].keys()
    assert (run.folder / "plots" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not of_run(uid), "nobody is left"
    assert not (run.folder / "processes").exists()
    assert not Path(f"/dev/shm/rlhfspec-{uid}").exists()


def test_ppo_stopped_and_resumed_has_the_curve_of_one_process(job_file: Path, starting: Callable[..., Started]) -> None:
    hold = hold_rewards(job_file, "1 many")
    steps = ("algorithm={name: ppo, samplesPerPrompt: 2}", "training.steps=6", "checkpoint.everySteps=100")
    whole = train(job_file, "one", *steps)
    run = starting("many", *steps)
    run.until(" 1/6 ")
    run.process.send_signal(signal.SIGINT)
    run.until("stopping: ")
    hold.unlink()
    output = run.ends(130)
    assert "rlhfspec run --processes" in output, "says how to go on"
    assert 1 <= len(lines_of(job_file, "many")) < 6
    again = starting("many", *steps, resume=True)
    output = again.ends()
    assert "resuming after step" in output
    assert again.curve() == whole


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
@pytest.mark.parametrize("way", ["processes", "one process", "another job"])
def test_the_next_run_cleans_up_after_a_dead_one(job_file: Path, starting: Callable[..., Started], way: str) -> None:
    steps = "training.steps=5"
    hold = hold_rewards(job_file, "1 many")  # steps are left when it dies
    whole = train(job_file, "one", steps)
    run = starting("many", steps)
    run.until(" 1/5 ")
    uid, weights = run.connections["uid"], Path(run.connections["weights_folder"])
    run.kill_unguarded()
    eventually(lambda: not of_run(uid), "neither stage nor server goes on without a supervisor")
    assert weights.exists()
    assert (run.folder / "processes").exists()
    hold.unlink()
    if way == "processes":
        assert starting("many", steps, resume=True).ended()[0] == 0
    else:
        train(job_file, "many" if way == "one process" else "other", steps, resume=way == "one process")
    if way != "another job":
        assert run.curve() == whole
    assert not weights.exists()
    assert not (run.folder / "processes").exists()


DIE = """
import os, signal, sys
sys.path.insert(0, TESTS)
from faults.processes import named
from rlhfspec.stage.bus import Bus
open_bus = Bus.open
async def open_without_servers(transport, job, *, uid, **arguments):
    for server in ("nats", "redis"):
        os.kill(named(uid, server)[0], signal.SIGKILL)
    return await open_bus(transport, job, uid=uid, **arguments)
Bus.open = open_without_servers
"""


def test_servers_that_die_before_a_stage_starts_are_restarted(job_file: Path, starting: Callable[..., Started]) -> None:
    output = starting("many", "training.steps=2", before=f"exec({DIE!r}, {{'TESTS': {str(TESTS)!r}}})").ends()
    assert "nats-server: killed by SIGKILL; it is started again" in output
    assert "valkey-server: killed by SIGKILL; it is started again" in output


def test_servers_that_die_while_stages_start_are_restarted(job_file: Path, starting: Callable[..., Started]) -> None:
    run = starting("many", before=stopping_at("starting 5 processes"))
    run.until("starting 5 processes")
    for name in ("nats", "redis"):
        [pid] = named(run.connections["uid"], name)
        os.kill(pid, signal.SIGKILL)
    run.process.send_signal(signal.SIGCONT)
    output = run.ends()
    for name in ("nats-server", "valkey-server"):
        assert f"{name}: killed by SIGKILL; it is started again" in output


def test_a_stage_that_fails_says_why_in_one_line(job_file: Path, starting: Callable[..., Started]) -> None:
    (job_file.parent / "failing.py").write_text("def reward(completion):\n    raise ValueError('no digits')\n")
    run = starting("failing", "rewards.sources=[{type: function, function: 'failing:reward', retries: 0}]")
    [line] = [line for line in run.ends(1).splitlines() if "failed:" in line and "reward 0" in line]
    assert "letters/1/" in line
    assert "no digits" in line
    last = json.loads((run.folder / "logs" / "reward-0.jsonl").read_text().splitlines()[-1])
    assert (last["level"], last["exit_code"], last["stage"]) == ("error", 78, "reward")
    assert json.loads((run.folder / "manifest.json").read_text())["outcome"] == "failed"


def test_a_job_that_a_stage_refuses_leaves_no_folder(job_file: Path, starting: Callable[..., Started]) -> None:
    """Only the process that loads the weights sees that some are missing."""
    from safetensors.torch import load_file, save_file

    job = yaml.safe_load(job_file.read_text())
    broken = job_file.parent / "broken"
    shutil.copytree(job["spec"]["model"]["path"], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors[next(name for name in tensors if "mlp" in name)]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    run = starting("refused", f"model.path={broken}")
    assert "model.path: its checkpoint lacks 1 weight" in run.ends(2).splitlines()[-1], "whichever stage saw it first"
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("program", "mode", "code", "said"),
    [
        ("", 0o600, 2, "--processes: the server's file is not executable"),
        ("no program", 0o700, 1, "nats-server: ended with exit code 126: "),
    ],
)
def test_a_nats_server_that_cannot_run_is_reported_in_one_line(
    job_file: Path, program: str, mode: int, code: int, said: str
) -> None:
    beside = job_file.parent / "nats-server"
    beside.write_text(program)
    beside.chmod(mode)
    start = (
        "import sys; from pathlib import Path; from rlhfspec.messages.servers import find\n"
        f"find.nats_server = lambda: find._executable(Path({str(beside)!r}))\n"
        "from rlhfspec.cli.start import main; main()"
    )
    done = python("-c", start, "run", "--processes", str(job_file), "--out", str(job_file.parent / "out"))
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(said)
    assert "Traceback" not in done.stderr
    assert not (job_file.parent / "out" / "processes").exists()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_help_of_a_stage_imports_nothing_heavy(stage: str) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        f"import runpy; sys.argv = ['rlhfspec.{stage}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('rlhfspec.{stage}', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'grpc', 'nats', 'asyncio'} & set(sys.modules)\n"
        "    print(len(set(sys.modules) - before), ended.code, sorted(heavy))\n"
    )
    done = python("-c", code)
    assert "--connections FILE" in done.stdout
    num_modules, _, rest = done.stdout.splitlines()[-1].partition(" ")
    assert rest == "0 []", done.stdout + done.stderr
    assert int(num_modules) < 90, "it comes at once: argparse brings some 50 modules"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--connections, --worker"),
        (("--connections", "c.json", "--worker", "-1"), "must be a whole number, 0 or more"),
        (("--connections", "c.json", "--worker", "1", "--verbose"), "unrecognized arguments: --verbose"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], said: str) -> None:
    done = python("-m", "rlhfspec.generator", *arguments)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("not json", "is not a connections file"),
        ("{}", "is not a connections file: uid: Field required"),
        ('{"uid": "a", "job_file": "j", "base_folder": "b", "folder": "f", "nats_url": "n", "more": 1}', "more: Extra"),
    ],
)
def test_wrong_connections_are_refused_in_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "connections.json"
    if content is not None:
        path.write_text(content)
    done = python("-m", "rlhfspec.reward", "--connections", str(path), "--worker", "0")
    assert done.returncode == 78
    [line] = map(json.loads, done.stderr.splitlines())
    assert said in line["message"]
    assert (line["stage"], line["worker"], line["exit_code"]) == ("reward", 0, 78)


def test_an_absent_server_ends_a_stage_with_a_temporary_error(tmp_path: Path, job_file: Path) -> None:
    from rlhfspec.job.file import read_job

    (tmp_path / "resolved.json").write_text(read_job(job_file, []).model_dump_json(by_alias=True))
    connections = {
        "uid": "ab", "job_file": str(tmp_path / "resolved.json"), "base_folder": str(tmp_path),
        "folder": str(tmp_path), "nats_url": "nats://127.0.0.1:1", "weights_folder": str(tmp_path),
    }  # fmt: skip
    (tmp_path / "connections.json").write_text(json.dumps(connections))
    arguments = ["--connections", str(tmp_path / "connections.json"), "--worker", "0"]
    soon = (
        "import runpy; from rlhfspec.worker import worker; worker.OPENING_SECONDS = 0.5\n"
        "runpy.run_module('rlhfspec.reward', run_name='__main__')"
    )
    done = python("-c", soon, *arguments)
    assert done.returncode == 75, done.stderr
    assert "nats://127.0.0.1:1" in json.loads(done.stderr.splitlines()[-1])["message"]
    done = python("-m", "rlhfspec.critic", *arguments)
    assert done.returncode == 78
    assert "this job runs prompts, generator, reward, reference, trainer" in done.stderr

"""`rlhfspec run --processes --nats URL --redis URL`: whole runs on servers that were there before, and stay."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nats
import pytest
import redis
from faults.processes import named, of_run
from given_places import RedisServer, tls_config
from nats.aio.client import Client
from nats_servers import NatsServer
from runs import train
from started import Started, eventually, hold_rewards, stopping_at

from rlhfspec.messages.servers.credentials.certificates import create_credentials

SECRET = "correct-horse-battery"
# What docs/servers.md says that a run needs.
NATS_RIGHTS = '{publish: ["rlhf.>", "$JS.API.>", "$JS.ACK.>"], subscribe: ["rlhf.>", "latest.rlhf.>", "_INBOX.>"]}'
REDIS_RIGHTS = "~rlhfspec:* -@all +info +set +get +pttl +del"
STEPS = "training.steps=3"
READY, BEGUN = "(5 of 5)", "letters: grpo, 3 steps"


class Place:
    """A NATS with TLS and a Redis, both with a user who may do no more than a run needs; others use them, too."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "keys"
        create_credentials(keys, [])
        users = f'authorization {{ users: [{{user: rl, password: "{SECRET}", permissions: {NATS_RIGHTS}}}] }}'
        self.nats = NatsServer(folder / "nats", f"{users}\n{tls_config(keys, verify=False)}")
        self.redis = RedisServer(folder / "redis", f"requirepass {SECRET}\nuser rl on >{SECRET} {REDIS_RIGHTS}")
        self.authority = keys / "ca.pem"

    @property
    def options(self) -> list[str]:
        servers = ["--nats", f"tls://rl:${{THE_SECRET}}@127.0.0.1:{self.nats.port}"]
        servers += ["--redis", f"redis://rl:${{THE_SECRET}}@127.0.0.1:{self.redis.port}"]
        return [*servers, "--servers-ca", str(self.authority)]

    async def _connected(self) -> Client:
        tls = ssl.create_default_context(cafile=self.authority)
        return await nats.connect(f"tls://127.0.0.1:{self.nats.port}", user="rl", password=SECRET, tls=tls)

    def streams(self) -> set[str]:
        return asyncio.run(self._streams())

    async def _streams(self) -> set[str]:
        client = await self._connected()
        try:
            return {info.config.name or "" for info in await client.jetstream().streams_info()}
        finally:
            await client.close()

    async def _add_stream(self, name: str) -> None:
        client = await self._connected()
        await client.jetstream().add_stream(name=name, subjects=["others.>"])
        await client.close()

    async def remove_streams(self) -> None:
        client = await self._connected()
        for info in await client.jetstream().streams_info():
            await client.jetstream().delete_stream(info.config.name or "")
        await client.close()

    def live_keys(self) -> set[str]:
        with redis.Redis(port=self.redis.port, password=SECRET) as client:
            return {key.decode() for key in client.scan_iter()}

    def others_use_them(self) -> None:
        asyncio.run(self._add_stream("others"))
        with redis.Redis(port=self.redis.port, password=SECRET) as client:
            client.set("others", "kept")

    def has_nothing_of_a_run(self) -> bool:
        return self.streams() == {"others"} and self.live_keys() == {"others"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("THE_SECRET", SECRET)
    place = Place(tmp_path / "servers")
    with place.nats, place.redis:
        place.others_use_them()
        yield place


@pytest.fixture
def hold(job_file: Path) -> Path:
    return hold_rewards(job_file)


@pytest.fixture
def starting(job_file: Path, place: Place) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(
        out: str, *overrides: str, resume: bool = False, before: str = "", options: list[str] | None = None
    ) -> Started:
        given = place.options if options is None else options
        started.append(Started(job_file, out, *overrides, resume=resume, options=given, before=before))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


def files_with(secret: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def check_what_is_there(run: Started, place: Place) -> None:
    """While it runs."""
    uid = run.connections["uid"]
    assert any(name.startswith(f"rlhf_letters_{uid}_") for name in place.streams())
    eventually(lambda: f"rlhfspec:{uid}:live" in place.live_keys(), "it beats")
    assert not named(uid, "nats")
    assert not named(uid, "redis")
    assert not files_with(SECRET, run.folder)
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in of_run(uid)]
    assert arguments
    assert not any(SECRET.encode() in each for each in arguments)
    command = [sys.executable, "-m", "rlhfspec.cli.start", "top", str(run.folder)]
    environment = {name: value for name, value in os.environ.items() if name != "THE_SECRET"}
    top = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "trainer" in top.stdout, top.stderr


def test_two_runs_at_a_time_are_the_same_to_the_bit_as_on_their_own_and_leave_nothing_there(
    job_file: Path, hold: Path, place: Place, starting: Callable[..., Started]
) -> None:
    runs = [starting(out, STEPS) for out in ("first", "second")]
    for run in runs:
        run.until(READY)
    uids = [run.connections["uid"] for run in runs]
    for run in runs:
        check_what_is_there(run, place)
    names = place.streams() | place.live_keys()
    assert all(any(uid in name for uid in uids) for name in names - {"others"})
    hold.unlink()
    outputs = [run.ended() for run in runs]
    own = starting("own", STEPS, options=[])
    outputs.append(own.ended())
    for run, (code, output) in zip((*runs, own), outputs, strict=True):
        assert code == 0, output
        assert SECRET not in output
        assert run.curve() == own.curve()
        assert (run.folder / "samples.jsonl").read_bytes() == (own.folder / "samples.jsonl").read_bytes()
        assert not files_with(SECRET, run.folder)
    assert place.has_nothing_of_a_run()
    assert not any(Path(f"/dev/shm/rlhfspec-{uid}").exists() for uid in uids)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_nothing_there_and_says_how_to_go_on(
    hold: Path, place: Place, starting: Callable[..., Started], times: int
) -> None:
    run = starting("many", STEPS)
    run.until(BEGUN)
    run.process.send_signal(signal.SIGINT)
    run.until("stopping: ")
    if times == 2:
        run.process.send_signal(signal.SIGINT)
    else:
        hold.unlink()
    code, output = run.ended()
    assert code == 130, output
    if times == 1:
        assert place.has_nothing_of_a_run()
        [command] = [line for line in output.splitlines() if "go on " in line]
        assert "--nats 'tls://rl:${THE_SECRET}@127.0.0.1:" in command
        assert f"--servers-ca {place.authority}" in command
    eventually(place.has_nothing_of_a_run, "of a run that is left at once the guardian takes it away")


def test_ctrl_c_while_it_starts_leaves_nothing_there(place: Place, starting: Callable[..., Started]) -> None:
    run = starting("many", STEPS, before=stopping_at("starting 5 processes"))
    run.until("starting 5 processes")
    assert place.streams() != {"others"}
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGCONT)
    code, output = run.ended()
    assert code == 130, output
    assert not run.folder.exists()
    eventually(place.has_nothing_of_a_run, "the guardian takes it away, though the run's folder is gone")


def test_a_supervisor_that_is_killed_leaves_nothing_there_and_its_run_goes_on(
    job_file: Path, hold: Path, place: Place, starting: Callable[..., Started]
) -> None:
    run = starting("many", STEPS)
    run.until(READY)
    uid = run.connections["uid"]
    run.process.kill()
    again = starting("many", STEPS, resume=True)  # at once, while guardians are at it
    again.until(READY)
    assert again.connections["uid"] != uid
    assert not any(f"_{uid}_" in name for name in place.streams())
    hold.unlink()
    code, output = again.ended()
    assert code == 0, output
    assert again.curve() == train(job_file, "one", STEPS)
    assert place.has_nothing_of_a_run()


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_what_a_supervisor_left_that_died_with_its_guardians_goes_with_the_next_run(
    job_file: Path, hold: Path, place: Place, starting: Callable[..., Started], memory: str
) -> None:
    """Any run takes it away while its memory is there, also one of a test beside this. When the machine stopped it is
    lost; then the run that goes on in the folder does."""
    run = starting("many", STEPS)
    run.until(READY)
    uid = run.connections["uid"]
    assert any(f"_{uid}_" in name for name in place.streams())
    run.kill_unguarded()
    eventually(lambda: not of_run(uid), "no stage goes on without a supervisor")
    hold.unlink()
    if memory == "kept":
        train(job_file, "other", "training.steps=1")
    else:
        shutil.rmtree(f"/dev/shm/rlhfspec-{uid}", ignore_errors=True)
        assert starting("many", STEPS, resume=True).ended()[0] == 0
    assert place.has_nothing_of_a_run()
    assert not Path(f"/dev/shm/rlhfspec-{uid}").exists()


def test_servers_that_go_away_and_come_back_are_waited_for(
    job_file: Path, hold: Path, place: Place, starting: Callable[..., Started]
) -> None:
    run = starting("many", STEPS)
    run.until(BEGUN)
    place.nats.kill()
    place.redis.kill()
    assert "all workers wait for it, 180 s at most" in run.until("does not answer")
    hold.unlink()
    time.sleep(0.5)  # scores are ready, and have nowhere to go
    hold.touch()  # for a run that went on at once could end before it says that its servers are back
    place.redis.start()
    place.nats.start()
    run.until("is back")
    hold.unlink()
    code, output = run.ended()
    assert code == 0, output
    assert run.curve() == train(job_file, "one", STEPS)
    assert place.streams() == {"others"}
    assert not place.live_keys()


def test_a_nats_that_stays_away_ends_the_run_with_a_line(
    hold: Path, place: Place, starting: Callable[..., Started]
) -> None:
    run = starting("many", STEPS, before="from rlhfspec.supervisor import given_watch; given_watch._AWAY_SECONDS = 3.0")
    run.until(BEGUN)
    place.nats.kill()
    code, output = run.ended()
    assert code == 1, output
    url = f"tls://127.0.0.1:{place.nats.port}"
    assert f"--nats: {url}: no answer for 3 s" in output
    assert json.loads((run.folder / "manifest.json").read_text())["outcome"] == "failed"
    assert f"are still at {url}: " in output, "it says what it could not take away"


def test_streams_that_somebody_removes_end_the_run_with_a_line(
    hold: Path, place: Place, starting: Callable[..., Started]
) -> None:
    run = starting("many", STEPS)
    run.until(BEGUN)
    asyncio.run(place.remove_streams())
    code, output = run.ended()
    assert code == 1, output
    assert "subject: was not declared, or is gone (got 'rlhf.letters." in output, output


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("which", ["--nats", "--redis"])
def test_one_of_the_two_may_be_given(
    job_file: Path, hold: Path, place: Place, starting: Callable[..., Started], which: str
) -> None:
    at = place.options.index(which)
    options = place.options[at : at + 2] + (place.options[-2:] if which == "--nats" else [])
    run = starting("many", STEPS, options=options)
    run.until(READY)
    uid = run.connections["uid"]
    assert [bool(named(uid, name)) for name in ("nats", "redis")] == [which == "--redis", which == "--nats"]
    hold.unlink()
    code, output = run.ended()
    assert code == 0, output
    assert run.curve() == train(job_file, "one", STEPS)
    assert place.has_nothing_of_a_run()
    assert not of_run(uid)

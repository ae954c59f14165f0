"""`rlhfspec run --processes --nats URL --redis URL` that cannot work: one line each, before anything is started."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from given_places import Front, RedisServer, tls_config
from nats_servers import NatsServer
from runs import write_data, write_job
from shared_servers import free_port
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.messages.servers.credentials.certificates import ServerTls, create_credentials
from rlhfspec.messages.servers.credentials.derived import new_nkey

SECRET, WRONG = "correct-horse", "battery-staple"
ENVIRONMENT = {"GOOD": SECRET, "BAD": WRONG}
REFUSED = "must be a URL such as"

NATS = f"""
max_payload: 80000
accounts {{
  GOOD: {{ jetstream: enabled, users: [ {{user: rl, password: "{SECRET}"}}, {{nkey: NKEY}},
    {{user: narrow, password: "{SECRET}", permissions: {{publish: ["$JS.API.INFO"], subscribe: [">"]}}}} ] }}
  PLAIN: {{ users: [ {{user: plain, password: "{SECRET}"}} ] }}
  FEW: {{ jetstream: {{max_streams: 3}}, users: [ {{user: few, password: "{SECRET}"}} ] }}
  SMALL: {{ jetstream: {{max_file: 1M}}, users: [ {{user: small, password: "{SECRET}"}} ] }}
}}
"""
REDIS = f"""
user default on >{SECRET} ~* +@all
user rl on >{SECRET} ~rlhfspec:* +@all
user reader on >{SECRET} ~* +info +get
user elsewhere on >{SECRET} ~other:* +@all
"""


class Place:
    """Servers of a user's, and what stands in front of them. Their URLs have no user."""

    def __init__(self, folder: Path, ending: ExitStack) -> None:
        self.folder = folder
        self._ending = ending
        seed, public = new_nkey()
        (folder / "good.seed").write_text(seed)
        (folder / "bad.seed").write_text(new_nkey()[0])
        (folder / "no.seed").write_text("certainly")
        for name, text in (("good", SECRET), ("bad", WRONG), ("empty", "")):
            (folder / name).write_text(f"{text}\n")
        self.keys, others = folder / "keys", folder / "others"
        for keys in (self.keys, others):
            create_credentials(keys, ["reward"])
        self.nats = self._started(NatsServer(folder / "nats", NATS.replace("NKEY", public)))
        self.no_jetstream = self._started(NatsServer(folder / "no-jetstream", jetstream=False))
        self.open_nats = self._started(NatsServer(folder / "open"))
        self.redis = self._started(RedisServer(folder / "redis", REDIS))
        self.open_redis = self._started(RedisServer(folder / "open-redis"))
        self.cluster = self._started(RedisServer(folder / "cluster", "cluster-enabled yes"))
        self.old_nats = self._started(Front(self.open_nats.port, says={b'"version":"2.15.1"': b'"version":"2.10.1"'}))
        self.old_redis = self._started(
            Front(self.open_redis.port, says={b"redis_version:7": b"redis_version:6", b"valkey_v": b"redict_v"})
        )
        self.tls_nats = self._started(NatsServer(folder / "tls", tls_config(self.keys, verify=False)))
        self.strict_nats = self._started(NatsServer(folder / "strict", tls_config(self.keys, verify=True)))
        self.tls_redis = self._started(Front(self.open_redis.port, server_tls(self.keys, verify=False)))
        self.strict_redis = self._started(Front(self.open_redis.port, server_tls(self.keys, verify=True)))
        self.ports = {name: each.port for name, each in vars(self).items() if hasattr(each, "port")}
        self.ports["nobody"] = free_port()

    def _started(self, server: Any) -> Any:
        return self._ending.enter_context(server)


def server_tls(keys: Path, *, verify: bool) -> ssl.SSLContext:
    files = ServerTls.of(keys, "nats")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.authority)
    context.load_cert_chain(files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    return context


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ExitStack() as ending:
        yield Place(tmp_path_factory.mktemp("given"), ending)


@pytest.fixture(scope="module")
def refused(place: Place, models: Path) -> Callable[..., str]:
    """What the command says last; it ends with 2, shows no secret, and leaves nothing."""
    write_data(place.folder)
    job_file = write_job(place.folder, models)

    def refused(arguments: str, *overrides: str) -> str:
        words = arguments.replace("KEYS", str(place.folder)).split()
        for name, port in place.ports.items():
            words = [word.replace(f"@{name}@", f"127.0.0.1:{port}") for word in words]
        sets = [word for override in overrides for word in ("--set", override)]
        command = ["run", str(job_file), "--out", str(place.folder / "out"), *words, *sets]
        result = CliRunner().invoke(app, command, env=ENVIRONMENT)
        assert result.exit_code == 2, (result.output, result.exception)
        assert isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        assert SECRET not in result.output
        assert WRONG not in result.output
        assert not (place.folder / "out").exists()
        said = [line for line in result.output.splitlines() if not line.startswith(("looking at ", "starting "))]
        assert len(said) == 1, result.output
        return said[0]

    return refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nats nats://host", "--nats: only with --processes: a run in one process needs no server (got 'nats://host"),
        ("--redis redis://:correct-horse@host", "--redis: only with --processes: "),
        ("--servers-ca ca.pem", "--servers-ca: only with --processes: "),
        ("--processes --nats http://host:4222", f"--nats: {REFUSED} nats://host:4222"),
        ("--processes --nats host:4222", f"--nats: {REFUSED}"),
        ("--processes --nats nats://", f"--nats: {REFUSED}"),
        ("--processes --nats nats://me:correct-horse@ho$st", f"--nats: {REFUSED}"),
        ("--processes --nats nats://host:4222/0", f"--nats: {REFUSED}"),
        ("--processes --nats nats://host:99999", "--nats: its port must be from 1 to 65535"),
        ("--processes --nats nats://host:0", "--nats: its port must be from 1 to 65535"),
        ("--processes --redis nats://host", f"--redis: {REFUSED} redis://host:6379"),
        ("--processes --redis unix:///tmp/redis.sock", f"--redis: {REFUSED}"),
        ("--processes --redis redis://host/first", f"--redis: {REFUSED}"),
        ("--processes --nats nats://me:${MISSING}@host", "--nats: the environment variable MISSING is not set"),
        ("--processes --redis redis://:${MISSING}@host", "--redis: the environment variable MISSING is not set"),
        ("--processes --nats ${MISSING}", "--nats: the environment variable MISSING is not set"),
        ("--processes --redis redis://me:@host", "--redis: the password is empty"),
        ("--processes --nats-credentials a.creds", "--nats-credentials: only with --nats"),
        ("--processes --servers-ca ca.pem", "--servers-ca: only with --nats or --redis"),
        ("--processes --nats tls://host --servers-key a.key", "--servers-key: only with --servers-certificate"),
        ("--processes --redis-credentials a.txt", "--redis-credentials: only with --redis"),
        ("--processes --nats nats://me:${GOOD}@host --nats-credentials a.creds", "--nats-credentials FILE: not both"),
        (
            "--processes --redis redis://:${GOOD}@host --redis-credentials KEYS/bad",
            "--redis-credentials FILE: not both",
        ),
        (
            "--processes --redis redis://host --redis-credentials KEYS/none",
            "--redis-credentials: cannot be read: No suc",
        ),
        ("--processes --redis redis://host --redis-credentials KEYS/empty", "--redis-credentials: the file is empty"),
        ("--processes --nats nats://host --servers-ca KEYS/keys/ca.pem", "--servers-ca: is for TLS: tls:// or rediss:"),
        ("--processes --nats tls://host --servers-ca KEYS/no.pem", "--servers-ca: cannot be read: No such file"),
        ("--processes --nats tls://host --servers-ca KEYS/no.seed", "--servers-ca: holds no usable certificates: "),
        (
            "--processes --redis rediss://host --servers-certificate KEYS/keys/ca.pem",
            "--servers-certificate: holds no ",
        ),
    ],
)
def test_options_that_cannot_be_meant_so(refused: Callable[..., str], arguments: str, said: str) -> None:
    assert said in refused(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nats nats://@nobody@", "no server there (connection refused)"),
        ("--nats nats://nowhere.invalid", "no server there ("),
        ("--nats nats://@open_redis@", "no answer within 5 s"),  # a NATS speaks first
        ("--nats nats://rl:${BAD}@@nats@", "the server refuses this user and password"),
        ("--nats nats://rl:battery-staple@@nats@", "the server refuses this user and password"),
        ("--nats nats://unknown:${GOOD}@@nats@", "the server refuses this user and password"),
        ("--nats nats://${BAD}@@nats@", "the server refuses this token"),
        ("--nats nats://@nats@", "a connection without credentials: a user goes into the URL"),
        ("--nats nats://@nats@ --nats-credentials KEYS/bad.seed", "the server refuses the key in "),
        ("--nats nats://@nats@ --nats-credentials KEYS/no.seed", "--nats-credentials: is neither a .creds file nor "),
        ("--nats nats://rl@@nats@ --nats-credentials KEYS/bad", "the server refuses this user and password"),
        ("--nats nats://@nats@ --nats-credentials KEYS/none", "--nats-credentials: cannot be read: No such file"),
        ("--nats tls://@open_nats@", "the server speaks no TLS: write nats:// in place of tls://"),
        ("--nats nats://@tls_nats@", "the server speaks TLS only: write tls:// in place of nats://"),
        ("--nats tls://@tls_nats@", "certificate; --servers-ca FILE names its signer"),
        ("--nats tls://@tls_nats@ --servers-ca KEYS/others/ca.pem", "is not to be trusted: "),
        ("--nats tls://@strict_nats@ --servers-ca KEYS/keys/ca.pem", "name yours with --servers-certificate"),
        (
            "--nats tls://@strict_nats@ --servers-ca KEYS/keys/ca.pem --servers-certificate KEYS/others/reward.pem "
            "--servers-key KEYS/others/reward.key",
            "the server hangs up on the certificate of --servers-certificate",
        ),
        ("--nats nats://@no_jetstream@", "the server must run with JetStream (nats-server -js)"),
        ("--nats nats://plain:${GOOD}@@nats@", "account cannot be used: JetStream not enabled for account"),
        ("--nats nats://few:${GOOD}@@nats@", "account may have 3 streams and has 0; a run makes "),
        ("--nats nats://small:${GOOD}@@nats@", "account may store 1,000,000 bytes and stores 0; a run needs 8,388,608"),
        ("--nats nats://narrow:${GOOD}@@nats@", "this user may not publish there; docs/servers.md lists what"),
        ("--nats nats://@old_nats@", "must be 2.10.26 or newer (got '2.10.1')"),
    ],
)
def test_a_nats_that_is_not_fit(refused: Callable[..., str], arguments: str, said: str) -> None:
    line = refused(f"--processes {arguments}", "generation.maxTokens=8", "dataset.maxPromptTokens=8")
    assert line.startswith("--nats")
    assert said in line


def test_a_nats_that_takes_no_message_as_large_as_a_sample(refused: Callable[..., str]) -> None:
    line = refused("--processes --nats nats://rl:${GOOD}@@nats@")
    assert "takes messages of 80,000 bytes, and a sample of this job may have " in line


def test_servers_that_fit_are_looked_at_only(refused: Callable[..., str]) -> None:
    """What is refused here is the other one."""
    trusted = "--servers-ca KEYS/keys/ca.pem"
    own = f"{trusted} --servers-certificate KEYS/keys/reward.pem --servers-key KEYS/keys/reward.key"
    for good in (
        "--nats nats://@open_nats@",
        "--nats nats://rl@@nats@ --nats-credentials KEYS/good --set dataset.maxPromptTokens=8",
        "--nats nats://@nats@ --nats-credentials KEYS/good.seed --set dataset.maxPromptTokens=8",
        f"--nats tls://@tls_nats@ {trusted}",
        f"--nats tls://@strict_nats@ {own}",
    ):
        assert refused(f"--processes {good} --redis redis://@nobody@").startswith("--redis: no server there")
    narrow = "--nats nats://narrow:${GOOD}@@nats@ --set dataset.maxPromptTokens=8"  # seen last of all
    for good in ("rl@@redis@ --redis-credentials KEYS/good", "@redis@ --redis-credentials KEYS/good"):
        assert "this user may not" in refused(f"--processes {narrow} --redis redis://{good}")
    for good in ("redis://rl:${GOOD}@@redis@", f"rediss://@tls_redis@ {trusted}", f"rediss://@strict_redis@ {own}"):
        assert "this user may not" in refused(f"--processes {narrow} --redis {good}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--redis redis://@nobody@", "no server there (connection refused)"),
        ("--redis redis://nowhere.invalid", "no server there ("),
        ("--redis redis://@open_nats@", "is no Redis server"),
        ("--redis redis://@redis@", "the server asks for a password: redis://me:${REDIS_PASSWORD}@host:6379"),
        ("--redis redis://:${BAD}@@redis@", "the server refuses this password"),
        ("--redis redis://:battery-staple@@redis@", "the server refuses this password"),
        (
            "--redis redis://rl@@redis@ --redis-credentials KEYS/bad",
            "the server refuses the user rl with this password",
        ),
        ("--redis redis://rl:${BAD}@@redis@", "the server refuses the user rl with this password"),
        ("--redis redis://unknown:${GOOD}@@redis@", "the server refuses the user unknown with this password"),
        ("--redis redis://:${GOOD}@@open_redis@", "the server asks for no password: leave it out"),
        ("--redis redis://reader:${GOOD}@@redis@", "docs/servers.md lists what a run needs"),
        ("--redis redis://elsewhere:${GOOD}@@redis@", "docs/servers.md lists what a run needs"),
        ("--redis redis://@open_redis@/99", "DB index is out of range"),
        ("--redis redis://@cluster@", "is a cluster, which spreads keys over its servers"),
        ("--redis rediss://@open_redis@", "the server speaks no TLS: write redis:// in place of rediss://"),
        ("--redis redis://@tls_redis@", "the server speaks TLS only: write rediss:// in place of redis://"),
        ("--redis rediss://@tls_redis@", "is not to be trusted: self-signed certificate in certificate chain; "),
        ("--redis rediss://@tls_redis@ --servers-ca KEYS/others/ca.pem", "is not to be trusted: "),
        ("--redis rediss://@strict_redis@ --servers-ca KEYS/keys/ca.pem", "clients without a certificate: name yours"),
        (
            "--redis rediss://@strict_redis@ --servers-ca KEYS/keys/ca.pem "
            "--servers-certificate KEYS/others/reward.pem --servers-key KEYS/others/reward.key",
            "the server hangs up on the certificate of --servers-certificate",
        ),
        ("--redis redis://@old_redis@", "must be Redis 7.0 or newer, or Valkey (got '6."),
    ],
)
def test_a_redis_that_is_not_fit(refused: Callable[..., str], arguments: str, said: str) -> None:
    line = refused(f"--processes {arguments}")
    assert line.startswith("--redis: ")
    assert said in line

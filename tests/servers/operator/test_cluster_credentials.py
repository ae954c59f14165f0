"""Credentials of a cluster's roles are deterministic in their keys and grant no right of another role."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
import stage_rights
from cryptography import x509
from hypothesis import given, settings, strategies as st
from shared_servers import CREATED, SharedServers

from rlhfspec.cluster import names
from rlhfspec.errors import InvalidRequest, TransportUnavailable
from rlhfspec.messages import loop
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import BUS_ROLES, CONTROL, GUESTS, inbox_of
from rlhfspec.messages.records import Sample
from rlhfspec.messages.servers.credentials.certificates import client_tls, server_tls, servers_tls
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.operator.shared.credentials import Keys, credentials_of, install_secrets, new_keys, operator_creds
from rlhfspec.runs.live.redis_users import DASHBOARD

JOB, UID = stage_rights.JOB, stage_rights.UID
KEYS = new_keys()
PODS = [role for role in names.ROLES if role != names.PREPARE]
SHARED = {"ca.pem", "servers-ca.pem"}  # the same in every role's Secret of a job


def secret(role: str, keys: Keys = KEYS, **other: str) -> dict[str, bytes]:
    told = {"namespace": "rl", "job": JOB, "job_uid": "6f1c", "run": UID} | other
    return credentials_of(keys, role=role, created=CREATED, **told)


def _claims_of(token: str) -> dict[str, Any]:
    claims = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))


def secrets_of(data: dict[str, bytes]) -> dict[str, bytes]:
    found = {name: content for name, content in data.items() if name.endswith((".key", ".password"))}
    seeds = {
        name: re.findall(rb"\n(SU\w{56})\n", content)[0] for name, content in data.items() if name.endswith(".creds")
    }
    return found | seeds


# ---- as bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", names.ROLES)
def test_the_same_keys_make_the_same_secret(role: str) -> None:
    assert secret(role) == secret(role)
    assert secret(role) == secret(role, Keys.of(KEYS.data()))


def test_the_same_keys_make_the_same_install() -> None:
    told = {"namespace": "rlhf", "release": "rl", "created": CREATED}
    assert install_secrets(KEYS, **told) == install_secrets(Keys.of(KEYS.data()), **told)  # type: ignore[arg-type]
    assert operator_creds(KEYS) == operator_creds(KEYS)


@settings(max_examples=30, deadline=None)
@given(
    one=st.tuples(st.sampled_from(PODS), *[st.sampled_from(["a", "b", "a/b", '"'])] * 2),
    other=st.tuples(st.sampled_from(PODS), *[st.sampled_from(["a", "b", "a/b", '"'])] * 2),
)
def test_two_secrets_share_no_secret_value(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """Only the certificate is shared, among runs of one job. Redis users are named by run uid."""
    data = [secret(role, job_uid=job, run=_word(run)) for role, job, run in (one, other)]
    if one == other:
        assert data[0] == data[1]
        return
    first, second = map(secrets_of, data)
    allowed = {"redis.password"} if (one[0], one[2]) == (other[0], other[2]) else set()
    if one[:2] == other[:2]:
        allowed |= {f"{one[0]}.key"}
    same = {name for name, other_name in itertools.product(first, second) if first[name] == second[other_name]}
    assert same <= allowed
    for content in (*first.values(), *(content for name, content in data[0].items() if name not in SHARED)):
        assert all(content not in others for others in second.values()) or content in (first[name] for name in allowed)


def _word(run: str) -> str:
    return "".join(f"{ord(letter):x}" for letter in run)


def test_another_release_makes_other_secrets() -> None:
    others = new_keys()
    for role in PODS:
        mine, theirs = secrets_of(secret(role)), secrets_of(secret(role, others))
        assert not set(mine.values()) & set(theirs.values())


def test_a_secret_holds_what_its_role_needs_alone() -> None:
    for role in PODS:
        creds = {f"{acts_as}.creds" for acts_as in (role, *GUESTS.get(role, ()))}
        redis = {"redis.user", "redis.password"} if role == names.CONTROL else set[str]()
        ranks = {"ranks.secret"} if role == "trainer" else set[str]()
        clients = {"serve.token"} if role == "gateway" else set[str]()
        assert secret(role).keys() == {f"{role}.pem", f"{role}.key", *redis, *ranks, *clients, *SHARED, *creds}
    assert secret(names.PREPARE).keys() == SHARED
    with pytest.raises(InvalidRequest, match="role: must be one of prepare, control, prompts"):
        secret("rewrd")


def test_a_certificate_names_its_role_and_every_worker() -> None:
    certificate = x509.load_pem_x509_certificate(secret("reward")["reward.pem"])
    assert certificate.subject.rfc4514_string() == "CN=reward"
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.WORKER_HOST in hosts.get_values_for_type(x509.DNSName)
    assert certificate.not_valid_before_utc <= CREATED <= certificate.not_valid_after_utc - timedelta(days=1000)


def test_a_token_carries_the_rights_of_its_role_in_its_run() -> None:
    from rlhfspec.messages.access.rights import rights_of

    token = secret("reward")["reward.creds"].split(b"\n")[1].decode()
    claims, rights = _claims_of(token)["nats"], rights_of("reward", JOB, UID)
    assert (claims["pub"], claims["sub"]) == ({"allow": list(rights.publish)}, {"allow": list(rights.subscribe)})


def test_missing_or_short_keys_are_named() -> None:
    data = KEYS.data()
    del data["account.seed"]
    with pytest.raises(InvalidRequest, match=r"missing in the release's Secret \(got 'account.seed'\)"):
        Keys.of(data)
    with pytest.raises(InvalidRequest, match="master: must be 32 bytes or more"):
        Keys.of(KEYS.data() | {"master": b"short"})


# ---- on the servers -------------------------------------------------------------------------------------------------


def connections(servers: SharedServers, credentials: Path, uid: str = UID) -> Connections:
    place = servers.folder
    return Connections(
        uid=uid, job_file=place, base_folder=place, folder=place, nats_url=servers.nats_url,
        redis_url=servers.redis_url, credentials=credentials, weights="grpc",
    )  # fmt: skip


async def opened(servers: SharedServers, role: str, uid: str = UID, job_uid: str = "6f1c") -> NatsTransport:
    place = connections(servers, servers.credentials(role, run=uid, job_uid=job_uid), uid)
    return await connect(place, role, name=role, publish_timeout_seconds=20.0)


async def denied(servers: SharedServers, creds: Path, publish: list[str], subscribe: list[str]) -> set[str]:
    proof = {"user_credentials": str(creds), "tls": servers_tls(creds.parent, "nobody")}
    return await stage_rights.denied(servers.nats_url, publish, subscribe, **proof)


@pytest.mark.parametrize("role", [role for role in BUS_ROLES if role != "view"])
async def test_every_role_has_its_own_rights_and_no_other(servers: SharedServers, role: str) -> None:
    """As on the laptop (test_rights.py), by tokens, but no role makes streams or consumers."""
    attempts = list(stage_rights.may_publish()), list(stage_rights.may_subscribe())
    refused = await denied(servers, servers.credentials(role) / f"{role}.creds", *attempts)
    assert refused == stage_rights.denied_to(role, in_a_cluster=True)


@pytest.mark.parametrize(("job_uid", "run"), [("77aa", "9b9b"), ("6f1c", "9b9b")])
async def test_credentials_of_another_run_have_no_rights(servers: SharedServers, job_uid: str, run: str) -> None:
    """Denied are other jobs, later runs of the same job, and the inbox of the same role. Redis is tested below."""
    publish, subscribe = list(stage_rights.may_publish()), list(stage_rights.may_subscribe())
    for role in (CONTROL, "generator", "trainer"):
        creds = servers.credentials(role, job_uid=job_uid, run=run) / f"{role}.creds"
        assert await denied(servers, creds, publish, subscribe) == stage_rights.denied_to("nobody")


@pytest.mark.parametrize("role", BUS_ROLES)
async def test_no_role_of_a_run_can_make_a_stream_or_a_consumer(servers: SharedServers, role: str) -> None:
    """A worker's own stream or consumer could receive records of another run."""
    await servers.make_streams("a0a0")
    theirs = f"rlhf_{JOB}_a0a0_sample"
    attempts = []
    for record in loop.KINDS:
        mine = stage_rights.stream_name(stage_rights.subject(record))
        attempts += [f"$JS.API.STREAM.{verb}.{mine}" for verb in ("CREATE", "UPDATE", "RESTORE", "PURGE", "DELETE")]
        for stream, name in itertools.product((mine, theirs), (role, "trainer", "spy")):
            attempts += [f"$JS.API.CONSUMER.{verb}.{stream}.{name}" for verb in ("CREATE", "DURABLE.CREATE")]
            attempts += [f"$JS.API.CONSUMER.CREATE.{stream}.{name}.rlhf.>", f"$JS.API.CONSUMER.CREATE.{stream}"]
    theirs_alone = ("STREAM.MSG.GET", "STREAM.INFO", "DIRECT.GET", "CONSUMER.LIST", "CONSUMER.NAMES")
    attempts += [f"$JS.API.{call}.{theirs}" for call in theirs_alone]
    attempts += [f"$JS.API.CONSUMER.MSG.NEXT.{theirs}.trainer", f"$JS.ACK.{theirs}.trainer.1.1.1.1.0"]
    refused = await denied(servers, servers.credentials(role) / f"{role}.creds", attempts, [])
    assert refused == {f"publish {attempt}".lower() for attempt in attempts}


async def test_a_reply_of_the_server_cannot_make_or_delete_a_stream(servers: SharedServers) -> None:
    """A requester chooses the reply subject, which rights do not limit: here, one of JetStream's own."""
    await asyncio.gather(*(servers.make_streams(uid) for uid in ("b1b1", "b2b2")))
    generator, role = await opened(servers, "generator", "b1b1"), "reward"
    wanted = {"name": f"rlhf_{JOB}_b1b1_spy", "subjects": ["latest.>"]}
    await generator.publish(loop.subject(JOB, "b1b1", Sample), json.dumps(wanted).encode(), id="1")
    creds = servers.credentials(role, run="b1b1") / f"{role}.creds"
    client = await nats.connect(
        servers.nats_url, user_credentials=str(creds), tls=servers_tls(creds.parent, role), allow_reconnect=False,
        inbox_prefix=inbox_of(role, "b1b1").encode(),
    )  # fmt: skip
    mine, pull = f"rlhf_{JOB}_b1b1_sample", b'{"batch": 1, "expires": 5000000000}'
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{mine}.{role}", pull, f"$JS.API.STREAM.CREATE.{wanted['name']}")
    await client.publish(f"$JS.API.STREAM.INFO.{mine}", b"", f"$JS.API.STREAM.DELETE.rlhf_{JOB}_b2b2_sample")

    async def num_delivered() -> int:
        asked = f"$JS.API.CONSUMER.INFO.{mine}.{role}"
        return int(json.loads((await client.request(asked, timeout=20)).data)["delivered"]["consumer_seq"])

    while not await num_delivered():
        await asyncio.sleep(0.05)
    operator = await as_operator(servers)
    names = json.loads((await operator.request("$JS.API.STREAM.NAMES", b"{}", timeout=20)).data)["streams"]
    assert f"rlhf_{JOB}_b2b2_sample" in names
    assert wanted["name"] not in names
    await asyncio.gather(generator.close(), client.close(), operator.close())


async def as_operator(servers: SharedServers) -> nats.NATS:
    place = servers.folder / "seen"
    place.mkdir(exist_ok=True)
    (place / "operator.creds").write_bytes(operator_creds(servers.keys))
    (place / "servers-ca.pem").write_bytes(servers.keys.ca_pem)
    return await nats.connect(
        servers.nats_url, user_credentials=str(place / "operator.creds"), tls=servers_tls(place, "operator"),
        inbox_prefix=inbox_of("operator", "release").encode(), allow_reconnect=False,
    )  # fmt: skip


async def test_a_generator_may_act_as_a_guest_of_the_role_it_helps(servers: SharedServers) -> None:
    await servers.make_streams(UID)
    guest = await connect(connections(servers, servers.credentials("generator")), "reference", name="guest")
    await guest.subscribe(loop.subject(JOB, UID, Sample), loop.work_consumer(loop.BY_NAME["reference"]))
    await guest.close()


async def test_the_operator_deletes_streams_but_reads_no_records(servers: SharedServers) -> None:
    await servers.make_streams("0dd0")
    client = await as_operator(servers)

    async def asked(what: str) -> dict[str, Any]:
        return json.loads((await client.request(f"$JS.API.STREAM.{what}", b"{}", timeout=20)).data)

    mine = [name for name in (await asked("NAMES"))["streams"] if "_0dd0_" in name]
    assert len(mine) > 10
    for name in mine:
        assert "error" not in await asked(f"INFO.{name}")
        assert (await asked(f"DELETE.{name}"))["success"]
    assert not [name for name in (await asked("NAMES"))["streams"] or () if "_0dd0_" in name]
    await client.close()
    heard = await denied(
        servers, servers.folder / "seen" / "operator.creds", ["rlhf.sums.3f2a.sample"], [">", "rlhf.>"]
    )
    assert len(heard) == 3


async def test_the_dashboard_may_observe_every_run(servers: SharedServers) -> None:
    creds = servers.release_credentials(DASHBOARD) / "dashboard.creds"
    may = stage_rights.may_subscribe()
    publish = [to for to in stage_rights.may_publish() if "INFO." not in to and "MSG.GET" not in to]
    refused = await denied(servers, creds, publish, list(may))
    looks_on = {of for of in may if "view" in may[of] and not of.startswith("_INBOX")}
    wanted = {f"publish {to}".lower() for to in publish}
    wanted |= {f"subscription {of}".lower() for of in may if of not in looks_on}
    assert {each for each in refused if "consumer.info" not in each} == {
        each for each in wanted if "consumer.info" not in each
    }


async def test_clients_reconnect_to_a_killed_and_restarted_server(servers: SharedServers) -> None:
    uid = "ee11"
    control, trainer = await opened(servers, CONTROL, uid), await opened(servers, "trainer", uid)
    await servers.make_streams(uid)
    await asyncio.to_thread(servers.kill_nats)
    await asyncio.to_thread(servers.start_nats)
    info = loop.subject(JOB, uid, loop.DatasetInfo)
    prompts = await opened(servers, "prompts", uid)
    assert await prompts.publish(info, b"!", id="x")
    watching = await trainer.watch(info)
    assert [message.data for message in await watching.pull(1, 20.0)] == [b"!"]
    await asyncio.gather(*(each.close() for each in (control, trainer, prompts)))


async def test_refused_connections_raise_errors_of_one_line(servers: SharedServers, tmp_path: Path) -> None:
    with SharedServers(tmp_path / "stranger") as stranger:
        strange = stranger.credentials("reward")
    wrong_server = connections(servers, strange)
    with pytest.raises(InvalidRequest, match=r"certificate cannot be trusted: .*(verif|unable|self)"):
        await connect(wrong_server, "reward", name="x")
    (strange / "servers-ca.pem").write_bytes(servers.keys.ca_pem)
    with pytest.raises(InvalidRequest, match=r"the server refuses the token in .*reward\.creds"):
        await connect(wrong_server, "reward", name="x")
    (strange / "reward.creds").write_text("nothing")
    with pytest.raises(InvalidRequest, match="creds: is not a NATS credentials file"):
        await connect(wrong_server, "reward", name="x")
    gone = connections(servers, servers.credentials("reward")).model_copy(update={"nats_url": "tls://127.0.0.1:9"})
    with pytest.raises(TransportUnavailable, match=r"tls://127\.0\.0\.1:9: no server there"):
        await connect(gone, "reward", name="x")


# ---- between workers ------------------------------------------------------------------------------------------------


async def test_workers_verify_the_name_and_the_job_of_each_other(tmp_path: Path) -> None:
    from shared_servers import written

    mine, theirs = written(tmp_path / "mine", secret("generator")), written(tmp_path / "t", secret("trainer"))
    foreign = written(tmp_path / "foreign", secret("trainer", job_uid="77aa"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.2", 0, ssl=server_tls(mine, "generator"))
    port = server.sockets[0].getsockname()[1]

    async def call(folder: Path, name: str) -> None:
        tls = client_tls(folder, "trainer")
        _, writer = await asyncio.open_connection("127.0.0.2", port, ssl=tls, server_hostname=name)
        writer.transport.abort()

    await call(theirs, names.WORKER_HOST)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for '127\.0\.0\.2'"):
        await call(theirs, "127.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        await call(foreign, names.WORKER_HOST)
    server.close()

"""Weights over gRPC from nodes that fail, are late, lie or corrupt: right bits, or a reason."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from weight_nodes import LOOPBACK, Cluster, Node, cluster

from rlhfspec.errors import MalformedRecord, StorageError, WeightsVersionError
from rlhfspec.messages.records import Weights
from rlhfspec.messages.servers.credentials.certificates import create_credentials, server_credentials
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.weights import newest_kept
from rlhfspec.training.weights.base import weights_record
from rlhfspec.training.weights.grpc import channel_credentials
from rlhfspec.training.weights.grpc_fetch import MAX_WRONG
from rlhfspec.training.weights.grpc_messages import METHOD, PIECE_BYTES, SERVICE, WeightsAnswer, WeightsRequest, parse
from rlhfspec.training.weights.grpc_server import MAX_STREAMS
from rlhfspec.training.weights.packed import MAX_HEADER_BYTES, MAX_TENSORS, Buffers, WeightsHeader, pack


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with cluster() as nodes:
        yield nodes


def state(version: int, *, num_bytes: int = 8 * PIECE_BYTES) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(num_bytes // 8, generator=draw) for name in ("a", "b")}


def together(*gets: Callable[[], dict[str, torch.Tensor]]) -> list[str]:
    with ThreadPoolExecutor(len(gets)) as pool:
        return [digest(done.result()) for done in [pool.submit(get) for get in gets]]


class Peer:
    """A server of weights. `answers` maps a request to replies."""

    def __init__(self, leaving: ExitStack, answers: Callable[[WeightsRequest], Iterator[bytes]]) -> None:
        self.requests: list[WeightsRequest] = []

        def serve(content: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            self.requests.append(parse(WeightsRequest, content))
            yield from answers(self.requests[-1])

        pool = ThreadPoolExecutor(4)
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_stream_rpc_method_handler(serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
        server.start()
        leaving.callback(pool.shutdown)
        leaving.callback(lambda: server.stop(None).wait())


def said(**answer: Any) -> bytes:
    return WeightsAnswer(**answer).model_dump_json().encode()


def test_more_receivers_than_streams_all_get_it_from_the_trainer_and_keep_it(nodes: Cluster) -> None:
    record = nodes.trainer.store.put("sums", "policy", 1, state(1))
    receivers = [nodes.receiver() for _ in range(2 * MAX_STREAMS)]
    found = together(*(lambda node=node: node.store.get(record) for node in receivers))
    assert found == [record.digest] * len(receivers)
    assert nodes.trainer.store.sent["sums", "policy", 1] == len(receivers) * 8 * PIECE_BYTES
    nodes.trainer.close()
    assert [node.store.get(record)["a"].data_ptr() for node in receivers] == [
        node.store.get(record)["a"].data_ptr() for node in receivers
    ], "kept, not fetched again"


def test_weights_put_by_a_receiver_reach_the_others(nodes: Cluster) -> None:
    peers: list[str] = []
    first, *others = (nodes.receiver(peer_addresses=lambda: peers) for _ in range(4))
    peers += [node.address for node in (first, *others)]
    record = first.store.put("sums", "drafter", 512, state(1))
    assert together(*(lambda node=node: node.store.get(record) for node in others)) == [record.digest] * 3


def test_threads_that_want_the_same_version_share_one_fetch(nodes: Cluster) -> None:
    record = nodes.trainer.store.put("sums", "policy", 1, state(1))
    node = nodes.receiver()
    assert together(*[lambda: node.store.get(record)] * 4) == [record.digest] * 4
    assert sum(nodes.trainer.store.sent.values()) == 8 * PIECE_BYTES


def test_many_versions_and_receivers_at_once_never_mix(nodes: Cluster) -> None:
    receivers = [nodes.receiver() for _ in range(3)]
    stop = threading.Event()
    records: list[Weights] = []

    def follow(node: Node) -> int:
        num_loaded, newest = 0, 0
        while not (stop.is_set() and newest == records[-1].version):
            found = newest_kept(node.store, [record for record in list(records) if record.version > newest])
            if found is not None:
                newest, num_loaded = found[0].version, num_loaded + 1
                assert {float(tensor[0]) for tensor in found[1].values()} == {newest}
        return num_loaded

    with ThreadPoolExecutor(3) as pool:
        following = [pool.submit(follow, node) for node in receivers]
        for version in range(1, 21):
            tensors = {name: torch.full((PIECE_BYTES // 3,), float(version)) for name in "abc"}
            records.append(nodes.trainer.store.put("sums", "policy", version, tensors))
        stop.set()
        assert all(done.result() >= 1 for done in following)


def test_a_trainer_that_falls_silent_or_dies_in_mid_stream_is_asked_again(nodes: Cluster) -> None:
    packed = pack("sums", "policy", 1, state(1), Buffers())
    record = weights_record("sums", "policy", 1, uri="grpc:policy/1", digest=packed.header.digest)
    header, content = packed.header.model_dump_json().encode(), bytes(packed.memory)
    over = threading.Event()
    with ExitStack() as leaving:

        def fails_twice(request: WeightsRequest) -> Iterator[bytes]:
            for number, message in enumerate(whole(header, content)):
                if number == 3 and len(peer.requests) == 1:
                    raise ConnectionError("dead")
                if number == 3 and len(peer.requests) == 2:
                    over.wait()
                yield message

        peer = Peer(leaving, fails_twice)
        leaving.callback(over.set)
        node = nodes.node(trainer_address=lambda: peer.address, stall_seconds=0.5)
        assert digest(node.store.get(record)) == record.digest
        assert len(peer.requests) == 3


def test_a_busy_trainer_and_a_slow_stream_may_take_longer_than_a_trainer_that_is_away(nodes: Cluster) -> None:
    packed = pack("sums", "policy", 1, state(1), Buffers())
    record = weights_record("sums", "policy", 1, uri="grpc:policy/1", digest=packed.header.digest)
    with ExitStack() as leaving:

        def is_busy_then_slow(request: WeightsRequest) -> Iterator[bytes]:
            if len(peer.requests) < 10:
                yield said(kind="busy")
                return
            for message in whole(packed.header.model_dump_json().encode(), bytes(packed.memory)):
                yield message
                threading.Event().wait(0.1)

        peer = Peer(leaving, is_busy_then_slow)
        node = nodes.node(trainer_address=lambda: peer.address, fetch_seconds=0.5)
        assert digest(node.store.get(record)) == record.digest
        peer.requests.clear()
        with pytest.raises(WeightsVersionError, match="busy"):
            nodes.node(trainer_address=lambda: peer.address, fetch_seconds=0.02).store.get(record)


def test_changed_bytes_of_a_peer_are_thrown_away_and_the_next_one_is_asked(nodes: Cluster) -> None:
    packed = pack("sums", "policy", 1, state(1), Buffers())
    right = nodes.receiver()
    record = right.store.put("sums", "policy", 1, state(1))
    packed.buffer[12345] ^= 1
    with ExitStack() as leaving:
        peer = Peer(leaving, lambda request: whole(packed.header.model_dump_json().encode(), bytes(packed.memory)))
        node = nodes.receiver(peer_addresses=lambda: [peer.address, right.address])
        assert digest(node.store.get(record)) == record.digest
        assert len(peer.requests) == 1


def whole(header: bytes, content: bytes) -> Iterator[bytes]:
    yield said(kind="weights")
    yield header
    for at in range(0, len(content), PIECE_BYTES):
        yield content[at : at + PIECE_BYTES]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-1] + b"!", "the bytes are not those of digest"),
        (lambda content: content[:-1], "ended after 8388607 of 8388608 bytes"),
        (lambda content: content[: PIECE_BYTES // 2], "ended after 524288 of 8388608 bytes"),
        (lambda content: content + b"!", "more than the 8388608 bytes that were promised"),
    ],
)
def test_wrong_bytes_again_and_again_are_refused(nodes: Cluster, change: Callable[[bytes], bytes], reason: str) -> None:
    packed = pack("sums", "policy", 1, state(1), Buffers())
    record = weights_record("sums", "policy", 1, uri="grpc:policy/1", digest=packed.header.digest)
    with ExitStack() as leaving:
        content = change(bytes(packed.memory))
        peer = Peer(leaving, lambda request: whole(packed.header.model_dump_json().encode(), content))
        node = nodes.node(trainer_address=lambda: peer.address)
        with pytest.raises(StorageError, match=reason):
            node.store.get(record)
        assert len(peer.requests) == MAX_WRONG
        nodes.trainer.store.put("sums", "policy", 1, state(1))
        assert digest(nodes.receiver().store.get(record)) == record.digest


def test_a_trainer_that_is_restarted_is_waited_for(nodes: Cluster) -> None:
    packed = pack("sums", "policy", 1, state(1), Buffers())
    record = weights_record("sums", "policy", 1, uri="grpc:policy/1", digest=packed.header.digest)
    known: list[str] = []
    asked = threading.Event()

    def address() -> str | None:
        asked.set()
        return known[-1] if known else None

    node = nodes.node(trainer_address=address)
    nodes.trainer.close()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(node.store.get, record)
        for known_now in (nodes.trainer.address, nodes.node().address):  # gone; there, without the version
            asked.clear()
            known.append(known_now)
            assert asked.wait(60)
        again = nodes.node()
        again.store.put("sums", "policy", 1, state(1))
        known.append(again.address)
        assert digest(got.result()) == record.digest


def test_a_version_that_a_restarted_trainer_lacks_comes_from_a_peer(nodes: Cluster) -> None:
    record = nodes.trainer.store.put("sums", "policy", 6, state(6))
    ahead = nodes.receiver()
    ahead.store.get(record)
    nodes.trainer.close()
    nodes.trainer = nodes.node()
    nodes.trainer.store.put("sums", "policy", 3, state(3))
    restarted = nodes.receiver(peer_addresses=lambda: ["127.0.0.1:1", restarted.address, ahead.address])
    assert digest(restarted.store.get(record)) == record.digest


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (lambda: None, "could not be fetched: no trainer is known .wanted 2, have 0."),
        (lambda: "127.0.0.1:1", "could not be fetched: 127.0.0.1:1: unavailable: .* .wanted 2, have 0."),
        (None, "could not be fetched: 127.0.0.1:[0-9]+: missing .wanted 2, have 1."),
    ],
)
def test_a_late_version_is_refused(nodes: Cluster, address: Callable[[], str | None] | None, reason: str) -> None:
    nodes.trainer.store.put("sums", "policy", 1, state(1))
    record = weights_record("sums", "policy", 2, uri="grpc:policy/2", digest="ab")
    node = nodes.node(trainer_address=address or (lambda: nodes.trainer.address), fetch_seconds=0.5)
    with pytest.raises(WeightsVersionError, match=reason):
        node.store.get(record)


def test_closing_ends_a_get_that_waits(nodes: Cluster) -> None:
    asked = threading.Event()

    def address() -> None:
        asked.set()

    node = nodes.node(trainer_address=address, fetch_seconds=1000.0)
    record = weights_record("sums", "policy", 2, uri="grpc:policy/2", digest="ab")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(node.store.get, record)
        assert asked.wait(60)
        node.store.close()
        with pytest.raises(WeightsVersionError):
            got.result()


def header(**changes: Any) -> bytes:
    good = pack("sums", "policy", 1, {"a": torch.ones(4), "b": torch.zeros(2, 2)}, Buffers()).header.model_dump()
    return json.dumps({name: value for name, value in (good | changes).items() if value is not ...}).encode()


HOSTILE_HEADERS = {
    "not JSON": (b"\x80\x04pickle", "Invalid JSON"),
    "cut": (header()[:-5], "Invalid JSON"),
    "no object": (b"[1, 2]", "Input should be an object"),
    "deep": (b"[" * 100_000, "Invalid JSON: recursion limit exceeded"),
    "long": (b" " * (MAX_HEADER_BYTES + 1), "bytes, more than"),
    "future schema": (header(schema_version=2), "schema_version: Input should be 1"),
    "unknown field": (header(command="rm"), "command: Extra inputs are not permitted"),
    "field left out": (header(tensors=...), "tensors: Field required"),
    "role": (header(role="root"), "role: Input should be 'policy', 'critic' or 'drafter'"),
    "version": (header(version=-1), "version: Input should be greater than or equal to 0"),
    "version as text": (header(version="1"), "version: Input should be a valid integer"),
    "digest": (header(digest="../../etc"), "digest: String should match pattern"),
    "long name of the job": (header(job="j" * 300), "job: String should have at most 253 characters"),
    "type": (header(tensors=[["a", "object", [1]]]), "'a' is of type 'object', which is not known"),
    "negative size": (header(tensors=[["a", "int8", [-1, -1]]], num_bytes=1), "'a' has an impossible shape"),
    "huge size": (header(tensors=[["a", "int8", [1 << 63]]], num_bytes=1 << 63), "'a' has an impossible shape"),
    "fraction": (header(tensors=[["a", "int8", [1.5]]]), "tensors.0.2.0: Input should be a valid integer"),
    "many dimensions": (header(tensors=[["a", "int8", [1] * 17]]), "'a' has an impossible shape"),
    "bomb": (header(tensors=[["a", "int8", [1 << 40]]], num_bytes=1 << 40), "more than the 1000 that are allowed"),
    "bomb of shapes": (header(tensors=[["a", "int8", [1 << 62] * 16]], num_bytes=64), "its tensors take [0-9]* bytes"),
    "too few bytes": (header(num_bytes=1), "its tensors take 80 bytes, not 1"),
    "twice": (header(tensors=[["a", "int8", [1]]] * 2), "names must be sorted and unique"),
    "no order": (header(tensors=[["b", "int8", [1]], ["a", "int8", [1]]]), "names must be sorted and unique"),
    "tied to nothing": (header(same_as={"z": "y"}), "'z' cannot be the same as 'y'"),
    "tied to itself": (header(same_as={"a": "a"}), "'a' cannot be the same as 'a'"),
    "tied to what comes later": (header(same_as={"A": "b"}), "'A' cannot be the same as 'b'"),
    "many tensors": (header(same_as={f"z{i}": "a" for i in range(MAX_TENSORS)}), "tensors, more than"),
}


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
def test_a_hostile_header_is_refused_with_a_reason(name: str) -> None:
    content, reason = HOSTILE_HEADERS[name]
    with pytest.raises(MalformedRecord, match=f"header of weights: .*{reason}"):
        WeightsHeader.parse(content, max_bytes=1000)
    WeightsHeader.parse(header(), max_bytes=1000)


def test_a_hostile_trainer_is_refused_before_any_allocation(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack("sums", "policy", 1, state(1), Buffers())
    record = weights_record("sums", "policy", 1, uri="grpc:policy/1", digest=packed.header.digest)
    other = packed.header.model_copy(update={"version": 2}).model_dump_json().encode()
    bomb = header(tensors=[["a", "int8", [1 << 50]]], num_bytes=1 << 50, digest=record.digest)
    wrong_digest = packed.header.model_copy(update={"digest": "0" * 64}).model_dump_json().encode()
    cases = [
        ([b"nonsense"], "Invalid JSON"),
        ([said(kind="weights"), b"{}"], "job: Field required"),
        ([said(kind="weights")], "Invalid JSON: EOF"),
        ([], "Invalid JSON: EOF"),
        ([said(kind="weights"), bomb], "bytes of weights, more than the"),
        ([said(kind="weights"), other], "these are sums/policy/2"),
        ([said(kind="weights"), wrong_digest], "holds weights of digest 0000"),
        ([b'{"kind": "ask", "peer": "unix:/tmp/socket"}'], "kind: Input should be"),
    ]

    def refuse(self: Buffers, num_bytes: int) -> torch.Tensor:
        raise AssertionError(f"{num_bytes} bytes were allocated")

    monkeypatch.setattr(Buffers, "take", refuse)
    with ExitStack() as leaving:
        for messages, reason in cases:
            peer = Peer(leaving, lambda request, messages=messages: iter(messages))
            with pytest.raises(StorageError, match=reason):
                nodes.node(trainer_address=lambda peer=peer: peer.address).store.get(record)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95",
        b"{" * 70_000,
        b'{"job": "sums", "role": "policy"}',
        b'{"job": "sums", "role": "policy", "version": 1, "path": "/etc/passwd"}',
        b'{"job": "sums", "role": "policy", "version": -1}',
        b'{"job": "sums", "role": "policy", "version": "1"}',
    ],
)
def test_a_hostile_request_is_refused_with_a_reason_and_counted(nodes: Cluster, content: bytes) -> None:
    with grpc.insecure_channel(nodes.trainer.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.unary_stream(f"/{SERVICE}/{METHOD}")(content))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "malformed record: " in refused.value.details()
    assert nodes.trainer.store.refused == {"malformed": 1}


def test_tls_knows_who_may_read_and_nobody_else_gets_a_byte(tmp_path: Path) -> None:
    for run in ("run", "other"):
        create_credentials(tmp_path / run, ["trainer", "generator", "reward"])
    ours, serves = tmp_path / "run", {}
    for role in ("trainer", "generator"):
        serves[role] = {"server_credentials": server_credentials(ours, role), "readers": {"generator", "critic"}}
    with cluster(fetch_seconds=0.5) as nodes:
        nodes.trainer = nodes.node(**serves["trainer"])
        record = nodes.trainer.store.put("sums", "policy", 1, state(1))
        reading = {"credentials": channel_credentials(ours, "generator"), "fetch_seconds": 20.0, **serves["generator"]}
        readers = [nodes.receiver(**reading) for _ in range(3)]
        assert together(*(lambda node=node: node.store.get(record) for node in readers)) == [record.digest] * 3
        sent = sum(nodes.trainer.store.sent.values())
        assert sent == 3 * 8 * PIECE_BYTES
        for credentials, reason in (
            (channel_credentials(ours, "reward"), "permission_denied: reward may not read weights"),
            (channel_credentials(tmp_path / "other", "generator"), "unavailable"),
            (grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes()), "unavailable"),
            (None, "unavailable"),
        ):
            with pytest.raises(WeightsVersionError, match=f"could not be fetched: .*{reason}"):
                nodes.receiver(credentials=credentials).store.get(record)
        assert sum(nodes.trainer.store.sent.values()) == sent
        assert nodes.trainer.store.refused["role"] >= 1
        plain = nodes.node()
        plain.store.put("sums", "policy", 1, state(1))
        with pytest.raises(WeightsVersionError, match="unavailable"):
            nodes.node(
                trainer_address=lambda: plain.address, credentials=channel_credentials(ours, "generator")
            ).store.get(record)


def test_memory_is_used_again_unless_somebody_still_looks_at_it(nodes: Cluster) -> None:
    node = nodes.receiver()
    held, places = {}, []
    for version in range(1, 9):
        tensors = node.store.get(nodes.trainer.store.put("sums", "policy", version, state(version)))
        places.append(tensors["a"].data_ptr())
        if version == 4:
            held = {"b": tensors["b"]}
        del tensors
    assert torch.equal(held["b"], state(4)["b"]), "whoever holds one tensor holds its bytes"
    assert places[3] not in places[4:]
    assert len(set(places)) == 3, "two that are kept, and the one that is held"

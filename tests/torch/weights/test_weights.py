"""Weights in memory, files and over gRPC: what was put is got, the newest stay, invalid ones are refused."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from weight_groups import eventually, group_of, record_of, weights
from weight_nodes import FromTheTrainer, cluster

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.messages.servers.credentials import certificates
from rlhfspec.testing.weight_store import WeightStoreContract, state
from rlhfspec.training.modeling import digest as digest_module
from rlhfspec.training.modeling.digest import checksum, digest, hash_of
from rlhfspec.training.modeling.tensor_files import read_noted, write_tensors
from rlhfspec.training.weights import FileWeightStore, MemoryWeightStore, WeightStore, file, newest_kept, packed
from rlhfspec.training.weights.file import HASHES
from rlhfspec.training.weights.group import channel, messages, receiver, sender, shares
from rlhfspec.training.weights.group.channel import TwoBuffers
from rlhfspec.training.weights.group.plan import buckets, described, fill
from rlhfspec.training.weights.group.receiver import GroupReceiver
from rlhfspec.training.weights.group.sender import GroupSender, SendingRanks, hold_up_seconds
from rlhfspec.training.weights.group.shares import Shares, Told
from rlhfspec.training.weights.group.ways import Ways
from rlhfspec.training.weights.grpc import GrpcWeightStore
from rlhfspec.training.weights.grpc_messages import MAX_MESSAGE_BYTES


class TestStores(WeightStoreContract):
    @pytest.fixture(params=["memory", "file", "grpc"], autouse=True)
    def _kind(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        with cluster() as nodes:
            kinds: dict[str, Callable[[int], WeightStore]] = {
                "memory": lambda keep: MemoryWeightStore(keep=keep),
                "file": lambda keep: FileWeightStore(tmp_path / "weights", keep=keep),
                "grpc": lambda keep: FromTheTrainer(nodes, keep),
            }
            self._make = kinds[request.param]
            yield

    def make(self, keep: int) -> WeightStore:
        return self._make(keep)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileWeightStore(tmp_path, keep=2)
    first = store.put("sums", "policy", 1, state(1))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlhfspec.training.modeling.tensor_files.sync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        store.put("sums", "policy", 2, state(2))
    assert digest(store.get(first)) == first.digest
    assert len(list(tmp_path.iterdir())) == 1


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    weight = torch.zeros(100_000)
    write_tensors(tmp_path / "tied", {"a": weight, "b": weight})
    assert (tmp_path / "tied").stat().st_size < 410_000
    read, _ = read_noted(tmp_path / "tied")
    assert read["a"] is read["b"]


def test_newest_kept_skips_versions_that_were_replaced() -> None:
    store = MemoryWeightStore(keep=2)
    records = [store.put("sums", "policy", version, {"w": torch.tensor([float(version)])}) for version in range(6)]
    assert newest_kept(store, []) is None
    assert newest_kept(store, records[:3]) is None, "a newer record is on its way"
    found = newest_kept(store, records)
    assert (found[0].version, float(found[1]["w"][0])) == (5, 5.0)
    with pytest.raises(WeightsVersionError):
        newest_kept(MemoryWeightStore(keep=2), records[:3])


def test_a_file_is_hashed_once_by_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = FileWeightStore(tmp_path, keep=2).put("sums", "policy", 1, state(1))
    path = Path(record.uri.removeprefix("file:"))
    write_tensors(path, state(1))  # says nothing of its digest
    store, hashed = FileWeightStore(tmp_path, keep=2), []
    monkeypatch.setattr("rlhfspec.training.weights.file.digest", lambda t: hashed.append(t) or digest(t))
    for _ in range(3):
        store.get(record)
    assert len(hashed) == 1
    write_tensors(path, state(2))
    with pytest.raises(StorageError, match="holds weights of digest"):
        store.get(record)


def test_a_file_that_says_its_digest_is_checked_once_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = FileWeightStore(tmp_path, keep=2).put("sums", "policy", 1, state(1))
    store, checked, hashed = FileWeightStore(tmp_path, keep=2), [], []
    monkeypatch.setattr("rlhfspec.training.weights.file.checksum", lambda t: checked.append(1) or checksum(t))
    monkeypatch.setattr("rlhfspec.training.weights.file.digest", lambda tensors: hashed.append(1) or digest(tensors))
    for _ in range(3):
        assert digest(store.get(record)) == record.digest
    assert (len(checked), len(hashed)) == (1, 0)


@pytest.mark.parametrize("others", ["digest", "checksum"])
def test_a_forged_digest_in_a_file_is_detected(tmp_path: Path, others: str) -> None:
    """The file has other weights, with the announced digest or with the whole announced note."""
    record = FileWeightStore(tmp_path, keep=1).put("sums", "policy", 1, state(1))
    _, notes = read_noted(path := Path(record.uri.removeprefix("file:")))
    assert notes[HASHES] == f"{digest(state(1))} {checksum(state(1))}"
    wrong = {"digest": notes[HASHES], "checksum": f"{digest(state(2))} {checksum(state(2))}"}[others]
    write_tensors(path, state(2), notes={HASHES: wrong})
    with pytest.raises(StorageError, match=f"holds weights of digest {digest(state(2))}, not {record.digest}"):
        FileWeightStore(tmp_path, keep=1).get(record)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_changed_byte_of_a_file_comes_to_be_used(tmp_path: Path, where: float, flip: int) -> None:
    store = FileWeightStore(tmp_path, keep=1)
    record = store.put("sums", "policy", 1, state(1))
    path = Path(record.uri.removeprefix("file:"))
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= flip
    path.write_bytes(content)
    try:
        got = FileWeightStore(tmp_path, keep=1).get(record)
    except StorageError:
        return
    assert digest(got) == record.digest, "only what is neither a name nor a value may change unnoticed"


def test_a_file_stays_whole_for_those_who_map_it_and_they_cannot_change_it(tmp_path: Path) -> None:
    store = FileWeightStore(tmp_path, keep=1)
    records = [store.put("sums", "policy", 1, state(1))]
    got, other = store.get(records[0]), store.get(records[0])
    records.append(store.put("sums", "policy", 2, state(2)))
    assert [path.name for path in tmp_path.iterdir()] == ["sums-policy-2.safetensors"]
    assert digest(got) == records[0].digest
    got["embedding"].zero_()
    assert digest(other) == records[0].digest


def test_a_file_left_by_a_killed_writer_is_removed_with_the_next_version(tmp_path: Path) -> None:
    left = tmp_path / "sums-policy-7.1234.writing"
    others = tmp_path / "sums-policy-policy-7.1234.writing"
    for path in (left, others):
        path.touch()
    FileWeightStore(tmp_path, keep=1).put("sums", "policy", 8, state(8))
    assert not left.exists()
    assert others.exists(), "of another job"


Make = Callable[[Path], WeightStore]


def slow_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the digest by definition: names, types, shapes and the hash of each tensor's bytes, in order."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0".encode())
        total.update(hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).tolist())).digest())
    return total.hexdigest()


@pytest.mark.parametrize("make", [lambda folder: FileWeightStore(folder, keep=2), lambda _: GrpcWeightStore(keep=2)])
def test_a_put_hashes_in_threads_as_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """No tensor is hashed twice, whether tied or copied."""
    hashed: list[tuple[str, int]] = []

    def heard(new: Any, data: Any) -> bytes:
        if new is digest_module.SHA256:
            hashed.append((threading.current_thread().name, len(data)))
        return hash_of(new, data)

    for module in (file, packed):
        monkeypatch.setattr(module, "hash_of", heard)
    assert make(tmp_path).put("sums", "policy", 1, state(1)).digest == digest(state(1)) == slow_digest(state(1))
    assert all(name.startswith("hashing") for name, _ in hashed)
    assert sum(size for _, size in hashed) == sum(t.nbytes for name, t in state(1).items() if name != "head")


@pytest.mark.parametrize("make", [lambda folder: FileWeightStore(folder, keep=2), lambda _: GrpcWeightStore(keep=2)])
def test_weights_on_a_device_are_copied_to_the_host_once(tmp_path: Path, second: ModuleType, make: Make) -> None:
    weights = {name: tensor.to("second:0") for name, tensor in state(1).items() if name != "head"}
    store = make(tmp_path)
    with second.counted() as seen:
        record = store.put("sums", "policy", 1, weights)
    assert seen.d2h_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert record.digest == digest({name: tensor.cpu() for name, tensor in weights.items()})


def every_kind() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    found = {f"layers.{layer}": torch.randn(100, 57, generator=draw) for layer in range(5)}
    found["bfloat"] = torch.randn(7, 3, generator=draw).bfloat16()
    found["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    found["whole"] = torch.arange(9)
    found["flag"] = torch.tensor(True)
    found["large"] = torch.randn(3, 1 << 15, generator=draw)
    found["column"] = torch.randn(40, 30, generator=draw).T
    found["empty"] = torch.zeros(0, 4)
    found["tied"] = found["layers.2"]
    return found


def test_successive_versions_reach_all_members_bit_for_bit() -> None:
    with group_of(2) as group:
        epochs = set()
        for version in (1, 2, 3):
            state = every_kind() | {"step": torch.tensor(version)}
            assert group.sent(version, state) == ""
            for node in group.nodes:
                assert node.has(version, state)
                assert not node.has(version - 1, state), "the one before has gone"
                found = node.receiver.take(record_of(version, state))
                assert found["tied"].data_ptr() == found["layers.2"].data_ptr(), "sent once, and tied again"
            epochs.add(group.sender._epoch)
        assert len(epochs) == 1, "one group for as long as the same are in"


def test_a_model_of_thousands_of_tensors_is_sent_by_group() -> None:
    """The names and shapes exceed the limit of other messages."""
    state = {f"model.layers.{number // 40}.experts.{number % 40}.weight": torch.ones(2) for number in range(2000)}
    with group_of(1) as group:
        assert len(described("sums", "policy", 1, state).model_dump_json()) > MAX_MESSAGE_BYTES
        assert group.sent(1, state) == ""
        assert group.nodes[0].has(1, state)


def test_weights_are_sent_in_the_type_that_generators_keep_them_in() -> None:
    state = {"kept": torch.randn(40, 3), "weight": torch.randn(40, 300), "index": torch.arange(4)}
    with group_of(2, dtype="bfloat16") as group:
        types = {"bfloat16": torch.bfloat16}
        ranks = SendingRanks(kept_as=lambda dtype: lambda name: types[dtype] if name == "weight" else None)
        assert group.sent(1, state, ranks) == ""
        found = group.nodes[1].receiver.take(record_of(1, state))
        assert digest(found) == digest(state | {"weight": state["weight"].to(torch.bfloat16)})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_each_rank_sends_its_rows_and_all_of_them_are_the_version(num_ranks: int) -> None:
    state = every_kind()
    with group_of(2) as group:
        ranks = [Shares() for _ in range(num_ranks)]
        sent: list[list[int]] = [[] for _ in ranks]

        def send(told: Told) -> list[list[str]]:
            for rank in range(num_ranks):
                sent[rank] = [bucket.num_bytes for bucket in buckets(told.header, rank, num_ranks, told.bucket_bytes)]
            with ThreadPoolExecutor(num_ranks) as pool:
                return list(pool.map(lambda rank: ranks[rank].send(told, state, rank), range(num_ranks)))

        for version in (1, 2):
            assert group.sent(version, state, SendingRanks(num_senders=num_ranks, send=send)) == ""
            assert all(node.has(version, state) for node in group.nodes)
        total = described("sums", "policy", 1, state).num_bytes
        assert sum(map(sum, sent)) < total + 64 * len(state) * num_ranks, "nobody sends another's"
        for rank in ranks:
            rank.close()


def test_a_plan_names_every_byte_once_and_no_bucket_is_larger_than_it_may_be() -> None:
    header = described("sums", "policy", 1, every_kind())
    for num_ranks in (1, 2, 3, 7):
        for most in (64, 4096, 1 << 20):
            found = [bucket for rank in range(num_ranks) for bucket in buckets(header, rank, num_ranks, most)]
            assert max(bucket.num_bytes for bucket in found) <= most
            spans = sorted((piece.begin, piece.begin + piece.num_bytes) for each in found for piece in each.pieces)
            assert all(first[1] <= second[0] for first, second in pairwise(spans))
            assert sum(end - begin for begin, end in spans) == sum(place.end - place.begin for place in header.places())


def test_a_sender_takes_two_buckets_of_memory_beside_its_share() -> None:
    state = weights(1)
    plan = buckets(described("sums", "policy", 1, state), 0, 1, 1 << 16)
    spare = TwoBuffers(plan, "cpu")
    for number, bucket in enumerate(plan):
        fill(bucket, spare[number], state, 0, 1)
    assert len(plan) > 10
    assert sum(buffer.numel() for buffer in spare._made.values()) <= 2 * (1 << 16)


def test_a_bucket_that_is_altered_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = shares.bucket_digest

    def altering(content: Tensor, what: str) -> str:
        found = hashed(content, what)
        content[100] ^= what.endswith("/3")
        return found

    monkeypatch.setattr(shares, "bucket_digest", altering)
    with group_of(2) as group:
        assert "bucket 3 of rank 0 is not what was sent" in group.sent(1, weights(1))
        assert not any(node.has(1, weights(1)) for node in group.nodes)


def test_a_layer_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = shares.buckets
    monkeypatch.setattr(shares, "buckets", lambda *arguments: planned(*arguments)[:-1])
    monkeypatch.setattr(receiver, "COMMIT_SECONDS", 0.2)
    with group_of(2) as group:
        assert "not all of it came" in group.sent(1, weights(1))
        assert not any(node.has(1, weights(1)) for node in group.nodes)


def test_a_version_that_is_mixed_with_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, tuple[Tensor, str]] = {}
    hashed = shares.bucket_digest

    def mixing(content: Tensor, what: str) -> str:
        number = int(what.rpartition("/")[2])
        if number not in kept:
            kept[number] = content.clone(), hashed(content, what)
        elif number % 2:
            content.copy_(kept[number][0])
            return kept[number][1]
        return hashed(content, what)

    with group_of(2) as group:
        monkeypatch.setattr(shares, "bucket_digest", mixing)
        assert group.sent(1, weights(1)) == ""
        assert "bucket 1 of rank 0 is not what was sent" in group.sent(2, weights(2))
        assert not any(node.has(2, weights(2)) for node in group.nodes)
        assert all(node.has(1, weights(1)) for node in group.nodes), "that one was right"


def test_a_commit_for_an_unknown_transfer_makes_no_version() -> None:
    with group_of(1) as group:
        commit = messages.GroupCommit(transfer="0" * 16, digest="ab" * 32, digests=[[]])
        order = messages.GroupOrder(order="0" * 16, commit=commit)
        with pytest.raises(RuntimeError, match="not under way here"):
            group.sender.tell_all({group.nodes[0].address: order}, 5.0)
        assert not group.nodes[0].has(1, weights(1))


def test_weights_of_another_digest_are_not_taken() -> None:
    """The trainer may have resumed a checkpoint and trained on differently."""
    with group_of(1) as group:
        assert group.sent(1, weights(1)) == ""
        assert group.nodes[0].receiver.take(record_of(1, weights(2))) is None


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    event, received = threading.Event(), receiver._Arriving._received
    event.set()

    def hang(self: Any, rank: int) -> list[str]:
        while event.is_set():
            time.sleep(0.01)
        return received(self, rank)

    monkeypatch.setattr(receiver._Arriving, "_received", hang)
    monkeypatch.setattr(channel, "FORM_SECONDS", 0.5)
    return event


def test_a_hanging_member_delays_a_version_for_a_bounded_time(hanging: threading.Event) -> None:
    state = weights(1)
    with group_of(2) as group:
        began = time.monotonic()
        assert group.sent(1, state)
        assert time.monotonic() - began < hold_up_seconds(1 << 20)
        assert not any(node.has(1, state) for node in group.nodes), "nor half of it"
        hanging.clear()
        group.until_members(2)
        assert group.sent(2, weights(2)) == ""
        assert all(node.has(2, weights(2)) for node in group.nodes)


def test_repeated_failures_make_more_and_more_versions_skip_the_group(hanging: threading.Event) -> None:
    with group_of(1) as group:
        went = []
        for version in range(1, 8):
            group.until_members(1)
            sending = group.sender.begin("policy", version, weights(version))
            went.append(sending is not None)
            if sending is not None:
                assert sending.end("ab" * 32)
        assert went == [True, True, False, True, False, False, False]
        hanging.clear()


def test_members_that_fall_silent_or_join_change_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(2) as group:
        assert group.sent(1, weights(1)) == ""
        group.nodes[1].trainer = lambda: None
        with monkeypatch.context() as patched:
            patched.setattr(sender, "_ORDER_SECONDS", 0.5)
            assert "has not answered" in group.sent(2, weights(2)), "one of its members is not there"
        group.until_members(1)
        assert group.sent(3, weights(3)) == ""
        other = group.joined()
        group.until_members(2)
        assert group.sent(4, weights(4)) == ""
        assert group.nodes[0].has(4, weights(4))
        assert other.has(4, weights(4))


def test_a_member_that_left_is_not_waited_for() -> None:
    with group_of(2) as group:
        group.nodes[1].close()
        assert group.sender.members == {group.nodes[0].address}
        assert group.sent(1, weights(1)) == ""
        assert group.nodes[0].has(1, weights(1))


def test_a_generator_for_which_the_store_is_faster_leaves_the_group() -> None:
    with group_of(2) as group:
        ways = group.nodes[1].receiver._ways = Ways("auto")
        for _ in range(3):
            ways.took("group", 0.3)
            ways.took("store", 0.1)
        group.until_members(1)
        assert group.sent(1, weights(1)) == ""
        assert [node.has(1, weights(1)) for node in group.nodes] == [True, False]


def test_only_generators_of_the_run_may_take_part(tmp_path: Path) -> None:
    certificates.create_credentials(tmp_path, ("trainer", "critic", "generator"))
    server = grpc.server(ThreadPoolExecutor(4))
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', certificates.server_credentials(tmp_path, 'trainer'))}"
    trainer = GroupSender("sums", host="127.0.0.1", askers=("generator",))
    trainer.add_to(server)
    server.start()
    with grpc.secure_channel(address, certificates.channel_credentials(tmp_path, "critic")) as channel:
        ask = messages.GroupAsk(member="127.0.0.1:1", wish=messages.Wish(wants=True)).model_dump_json().encode()
        with pytest.raises(grpc.RpcError, match="critic may not join the group"):
            channel.unary_unary(f"/{messages.GROUP_SERVICE}/{messages.GROUP_METHOD}")(ask, timeout=5.0)
    assert not trainer.members
    node = GroupReceiver(
        messages.Wish(wants=True), Ways("group"), address="127.0.0.1:2", trainer_address=lambda: address,
        credentials=certificates.channel_credentials(tmp_path, "generator"),
    )  # fmt: skip
    eventually(lambda: trainer.members == {"127.0.0.1:2"})
    node.close()
    assert not trainer.members, "it has left"
    trainer.close()
    server.stop(None).wait()

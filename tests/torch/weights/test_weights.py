"""Weights in memory, files and over gRPC: what was put is got, the newest stay, invalid ones are refused."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_nodes import FromTheTrainer, cluster

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.testing.weight_store import WeightStoreContract, state
from rlhfspec.training.modeling import digest as digest_module
from rlhfspec.training.modeling.digest import checksum, digest, hash_of
from rlhfspec.training.modeling.tensor_files import read_noted, read_tensors, write_tensors
from rlhfspec.training.weights import FileWeightStore, MemoryWeightStore, WeightStore, newest_kept
from rlhfspec.training.weights import file as file_module
from rlhfspec.training.weights import packed as packed_module
from rlhfspec.training.weights.file import HASHES
from rlhfspec.training.weights.grpc import GrpcWeightStore


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


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    record = FileWeightStore(tmp_path, keep=1).put("sums", "policy", 1, state(1))
    path = Path(record.uri.removeprefix("file:"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="holds weights of digest"):
        FileWeightStore(tmp_path, keep=1).get(record)
    path.write_bytes(content[:-5])
    with pytest.raises(StorageError, match="cannot be read"):
        FileWeightStore(tmp_path, keep=1).get(record)


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
    read = read_tensors(tmp_path / "tied")
    assert read["a"] is read["b"]


def test_versions_that_were_replaced_while_nobody_looked_are_skipped() -> None:
    store = MemoryWeightStore(keep=2)
    records = [store.put("sums", "policy", version, {"w": torch.tensor([float(version)])}) for version in range(6)]
    assert newest_kept(store, []) is None
    assert newest_kept(store, records[:3]) is None, "a newer record is on its way"
    found = newest_kept(store, records)
    assert found is not None
    assert (found[0].version, float(found[1]["w"][0])) == (5, 5.0)
    with pytest.raises(WeightsVersionError):
        newest_kept(MemoryWeightStore(keep=2), records[:3])


def test_a_file_is_hashed_once_by_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = FileWeightStore(tmp_path, keep=2).put("sums", "policy", 1, state(1))
    path = Path(record.uri.removeprefix("file:"))
    write_tensors(path, state(1))  # says nothing of its digest
    store, hashed = FileWeightStore(tmp_path, keep=2), []
    monkeypatch.setattr(
        "rlhfspec.training.weights.file.digest", lambda tensors: hashed.append(tensors) or digest(tensors)
    )
    for _ in range(3):
        store.get(record)
    assert len(hashed) == 1
    write_tensors(path, state(2))
    with pytest.raises(StorageError, match="holds weights of digest"):
        store.get(record)


def test_a_file_that_says_its_digest_is_checked_once_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = FileWeightStore(tmp_path, keep=2).put("sums", "policy", 1, state(1))
    store, checked, hashed = FileWeightStore(tmp_path, keep=2), [], []
    monkeypatch.setattr(
        "rlhfspec.training.weights.file.checksum", lambda tensors: checked.append(1) or checksum(tensors)
    )
    monkeypatch.setattr("rlhfspec.training.weights.file.digest", lambda tensors: hashed.append(1) or digest(tensors))
    for _ in range(3):
        assert digest(store.get(record)) == record.digest
    assert (len(checked), len(hashed)) == (1, 0)


@pytest.mark.parametrize("others", ["digest", "checksum"])
def test_what_a_file_says_of_itself_replaces_no_check(tmp_path: Path, others: str) -> None:
    """The file has other weights, with the announced digest or with the whole announced note."""
    record = FileWeightStore(tmp_path, keep=1).put("sums", "policy", 1, state(1))
    path = Path(record.uri.removeprefix("file:"))
    _, notes = read_noted(path)
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


def test_what_a_killed_writer_left_goes_with_the_next_version(tmp_path: Path) -> None:
    left = tmp_path / "sums-policy-7.1234.writing"
    others = tmp_path / "sums-policy-policy-7.1234.writing"
    for path in (left, others):
        path.touch()
    FileWeightStore(tmp_path, keep=1).put("sums", "policy", 8, state(8))
    assert not left.exists()
    assert others.exists(), "of another job"


def slow_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the digest by definition: names, types, shapes and the hash of each tensor's bytes, in order."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0".encode())
        total.update(hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).tolist())).digest())
    return total.hexdigest()


@pytest.mark.parametrize("make", [lambda folder: FileWeightStore(folder, keep=2), lambda _: GrpcWeightStore(keep=2)])
def test_a_put_hashes_in_threads_what_one_thread_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], WeightStore]
) -> None:
    """No tensor is hashed twice, whether tied or copied."""
    hashed: list[tuple[str, int]] = []

    def heard(new: Any, data: Any) -> bytes:
        if new is digest_module.SHA256:
            hashed.append((threading.current_thread().name, len(data)))
        return hash_of(new, data)

    for module in (file_module, packed_module):
        monkeypatch.setattr(module, "hash_of", heard)
    store = make(tmp_path)
    record = store.put("sums", "policy", 1, state(1))
    assert record.digest == digest(state(1)) == slow_digest(state(1))
    assert all(name.startswith("hashing") for name, _ in hashed)
    assert sum(size for _, size in hashed) == sum(t.nbytes for name, t in state(1).items() if name != "head")


@pytest.mark.parametrize("make", [lambda folder: FileWeightStore(folder, keep=2), lambda _: GrpcWeightStore(keep=2)])
def test_a_devices_weights_come_down_once(
    tmp_path: Path, second: ModuleType, make: Callable[[Path], WeightStore]
) -> None:
    weights = {name: tensor.to("second:0") for name, tensor in state(1).items() if name != "head"}
    store = make(tmp_path)
    with second.counted() as seen:
        record = store.put("sums", "policy", 1, weights)
    assert seen.d2h_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert record.digest == digest({name: tensor.cpu() for name, tensor in weights.items()})

"""Weights in memory, in files and over gRPC: what was put is got, the newest stay, and what is not right is refused."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_nodes import FromTheTrainer, cluster

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.training.modeling.digest import checksum, digest, digest_and_checksum
from rlhfspec.training.modeling.tensor_files import read_noted, read_tensors, write_tensors
from rlhfspec.training.weights import FileWeightStore, MemoryWeightStore, WeightStore, newest_kept
from rlhfspec.training.weights.file import HASHES
from rlhfspec.training.weights.packed import DTYPES

Make = Callable[[int], WeightStore]


@pytest.fixture(params=["memory", "file", "grpc"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    with cluster() as nodes:
        stores: dict[str, Make] = {
            "memory": lambda keep: MemoryWeightStore(keep=keep),
            "file": lambda keep: FileWeightStore(tmp_path / "weights", keep=keep),
            "grpc": lambda keep: FromTheTrainer(nodes, keep),
        }
        yield stores[request.param]


def state(version: int) -> dict[str, torch.Tensor]:
    """Tied, transposed, half precision, empty and without shape: all that models have."""
    weight = torch.arange(6.0).reshape(2, 3) + version
    return {
        "embedding": weight,
        "head": weight,
        "transposed": weight.T,
        "row": weight[1],
        "half": torch.full((3,), 1 / 3 + version, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(version),
    }


def test_what_was_put_is_what_is_got(make: Make) -> None:
    store = make(2)
    given = state(1)
    record = store.put("sums", "policy", 1, given)
    assert (record.id, record.version, record.role) == ("sums/weights/policy/1", 1, "policy")
    assert record.digest == digest(given)
    got = store.get(record)
    assert got.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(got[name], tensor)
        assert got[name].dtype == tensor.dtype
    assert got["head"].data_ptr() == got["embedding"].data_ptr()


def test_training_on_in_place_changes_nothing_that_was_put(make: Make) -> None:
    store = make(2)
    weight = torch.nn.Parameter(torch.zeros(3))
    record = store.put("sums", "policy", 1, {"weight": weight})
    with torch.no_grad():
        weight.add_(1.0)
    got = store.get(record)["weight"]
    assert torch.equal(got, torch.zeros(3))
    assert not got.requires_grad


def test_the_newest_stay_a_role_of_a_job_each(make: Make) -> None:
    store = make(2)
    critic = store.put("sums", "critic", 1, state(1))
    other = store.put("sums-policy", "policy", 1, state(1))
    records = [store.put("sums", "policy", version, state(version)) for version in range(1, 5)]
    for record in (critic, other, *records[2:]):
        assert digest(store.get(record)) == record.digest
    for record in records[:2]:
        with pytest.raises(WeightsVersionError, match=rf"is not kept \(wanted {record.version}, have 4\)"):
            store.get(record)


def test_a_trainer_that_goes_back_takes_nothing_from_those_ahead_of_it(make: Make) -> None:
    store = make(2)
    newest = [store.put("sums", "policy", version, state(version)) for version in (5, 6)]
    again = [store.put("sums", "policy", version, state(version)) for version in (3, 4, 5, 6)]
    assert [record.digest for record in again[2:]] == [record.digest for record in newest]
    for record in newest:
        assert digest(store.get(record)) == record.digest


def test_other_weights_than_announced_are_refused(make: Make) -> None:
    store = make(2)
    record = store.put("sums", "policy", 1, state(1))
    with pytest.raises(StorageError, match=f"holds weights of digest {record.digest}, not 0000"):
        store.get(replace(record, digest="0000"))


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


VERSIONS = itertools.count(1)  # a folder that examples share keeps the newest
SHAPES = st.lists(st.integers(0, 5), max_size=3)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=6), st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=TENSORS, ties=st.lists(st.tuples(st.text(max_size=3), st.integers(0, 5)), max_size=3), seed=st.integers(0)
)
def test_any_tensors_are_got_as_put_bit_for_bit(
    make: Make, tensors: dict[str, tuple[str, list[int]]], ties: list[tuple[str, int]], seed: int
) -> None:
    draw = random.Random(seed)
    put = {name: random_bits(DTYPES[dtype], shape, draw) for name, (dtype, shape) in tensors.items()}
    for alias, index in ties:
        if tensors:
            put[f"tied {alias}"] = list(put.values())[index % len(tensors)]
    store, version = make(2), next(VERSIONS)
    record = store.put("sums", "policy", version, put)
    got = store.get(record)
    assert record.digest == digest(put) == digest(got)
    assert got.keys() == put.keys()
    for name, tensor in put.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(got[name]), bits(tensor))


def random_bits(dtype: torch.dtype, shape: list[int], draw: random.Random) -> torch.Tensor:
    """NaNs of every kind, infinities, numbers too small to be normal."""
    size = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor([draw.random() < 0.5 for _ in range(size)], dtype=dtype).reshape(shape)
    content = bytearray(draw.randbytes(size * dtype.itemsize))
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return tensor.reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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
    """Other weights, under the digest of those that were announced or with their whole note."""
    record = FileWeightStore(tmp_path, keep=1).put("sums", "policy", 1, state(1))
    path = Path(record.uri.removeprefix("file:"))
    _, notes = read_noted(path)
    assert notes[HASHES] == " ".join(digest_and_checksum(state(1)))
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

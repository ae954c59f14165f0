"""Contract of weight stores (`training.weights.base.WeightStore`): get returns the put weights or raises."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.weights.base import WeightStore
from rlhfspec.training.weights.packed import DTYPES

VERSIONS = itertools.count(1)  # examples may share a folder, which keeps the newest
SHAPES = st.lists(st.integers(0, 5), max_size=3)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=6), st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6
)


def state(version: int) -> dict[str, torch.Tensor]:
    """Return a version's tied, transposed, half precision, empty and zero-dimensional tensors."""
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


def random_bits(dtype: torch.dtype, shape: list[int], draw: random.Random) -> torch.Tensor:
    size = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor([draw.random() < 0.5 for _ in range(size)], dtype=dtype).reshape(shape)
    content = bytearray(draw.randbytes(size * dtype.itemsize))
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return tensor.reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class WeightStoreContract:
    def make(self, keep: int) -> WeightStore:
        """Return a new store that keeps `keep` versions per role."""
        raise NotImplementedError

    def test_what_was_put_is_what_is_got(self) -> None:
        store = self.make(2)
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

    def test_training_on_in_place_changes_nothing_that_was_put(self) -> None:
        store = self.make(2)
        weight = torch.nn.Parameter(torch.zeros(3))
        record = store.put("sums", "policy", 1, {"weight": weight})
        with torch.no_grad():
            weight.add_(1.0)
        got = store.get(record)["weight"]
        assert torch.equal(got, torch.zeros(3))
        assert not got.requires_grad

    def test_the_newest_stay_a_role_of_a_job_each(self) -> None:
        store = self.make(2)
        critic = store.put("sums", "critic", 1, state(1))
        other = store.put("sums-policy", "policy", 1, state(1))
        records = [store.put("sums", "policy", version, state(version)) for version in range(1, 5)]
        for record in (critic, other, *records[2:]):
            assert digest(store.get(record)) == record.digest
        for record in records[:2]:
            with pytest.raises(WeightsVersionError, match=rf"is not kept \(wanted {record.version}, have 4\)"):
                store.get(record)

    def test_a_trainer_that_goes_back_takes_nothing_from_those_ahead_of_it(self) -> None:
        store = self.make(2)
        newest = [store.put("sums", "policy", version, state(version)) for version in (5, 6)]
        again = [store.put("sums", "policy", version, state(version)) for version in (3, 4, 5, 6)]
        assert [record.digest for record in again[2:]] == [record.digest for record in newest]
        for record in newest:
            assert digest(store.get(record)) == record.digest

    def test_other_weights_than_announced_are_refused(self) -> None:
        store = self.make(2)
        record = store.put("sums", "policy", 1, state(1))
        with pytest.raises(StorageError, match=f"holds weights of digest {record.digest}, not 0000"):
            store.get(replace(record, digest="0000"))

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        tensors=TENSORS,
        ties=st.lists(st.tuples(st.text(max_size=3), st.integers(0, 5)), max_size=3),
        seed=st.integers(0),
    )
    def test_any_tensors_are_got_as_put_bit_for_bit(
        self, tensors: dict[str, tuple[str, list[int]]], ties: list[tuple[str, int]], seed: int
    ) -> None:
        draw = random.Random(seed)
        put = {name: random_bits(DTYPES[dtype], shape, draw) for name, (dtype, shape) in tensors.items()}
        for alias, index in ties:
            if tensors:
                put[f"tied {alias}"] = list(put.values())[index % len(tensors)]
        store, version = self.make(2), next(VERSIONS)
        record = store.put("sums", "policy", version, put)
        got = store.get(record)
        assert record.digest == digest(put) == digest(got)
        assert got.keys() == put.keys()
        for name, tensor in put.items():
            assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(bits(got[name]), bits(tensor))

"""KV packing restores every bit and touches nothing else."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlhfspec.kernels import kv_pack

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def random_kv(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits, including NaN payloads, infinities and subnormals."""
    bits = np.random.default_rng(seed).integers(0, 256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(WORDS[tensor.dtype])


kv_shapes = st.tuples(
    st.integers(1, 5),
    st.integers(1, 3),
    st.just(2),
    st.sampled_from([1, 2, 16]),
    st.integers(1, 3),
    st.sampled_from([1, 5, 8]),
)
dtypes = st.sampled_from(list(WORDS))


@st.composite
def some_of(draw: st.DrawFn, count: int) -> torch.Tensor:
    return torch.tensor(draw(st.lists(st.integers(0, count - 1), unique=True, max_size=12)), dtype=torch.int32)


@settings(max_examples=60)
@given(data=st.data(), shape=kv_shapes, dtype=dtypes)
def test_packing_keeps_the_bits_of_the_cache(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_slots = shape[0] * shape[3]
    slots = data.draw(some_of(num_slots))
    source, target = random_kv(shape, dtype, 1), random_kv(shape, dtype, 2)
    packed = kv_pack.pack_slots(source, slots)
    assert packed.is_contiguous()
    assert torch.equal(bits(packed), bits(kv_pack.pack_slots_reference(source, slots)))
    assert packed.shape == (len(slots), shape[1], 2, shape[4], shape[5])
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(bits(packed[i]), bits(source[slot // shape[3], :, :, slot % shape[3]]))
    check_arrival(packed, target, data.draw(st.permutations(range(num_slots)))[: len(slots)])


def check_arrival(packed: torch.Tensor, target: torch.Tensor, places: list[int]) -> None:
    before, twin, block_size = bits(target).clone(), target.clone(), target.shape[3]
    for unpack, kv in ((kv_pack.unpack_slots, target), (kv_pack.unpack_slots_reference, twin)):
        unpack(packed, kv, torch.tensor(places, dtype=torch.int32))
    assert torch.equal(bits(target), bits(twin))
    for slot in range(target.shape[0] * block_size):
        here = bits(target)[slot // block_size, :, :, slot % block_size]
        there = before[slot // block_size, :, :, slot % block_size]
        assert torch.equal(here, bits(packed[places.index(slot)]) if slot in places else there)


@settings(max_examples=60)
@given(data=st.data(), shape=kv_shapes, dtype=dtypes, skew=st.integers(0, 3))
def test_packing_into_foreign_memory_keeps_the_bits(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, skew: int
) -> None:
    """The memory may begin anywhere, and a source may be read-only."""
    slots = data.draw(some_of(shape[0] * shape[3]))
    source, target = random_kv(shape, dtype, 1), random_kv(shape, dtype, 2)
    reference, expected = kv_pack.pack_slots_reference(source, slots), target.clone()
    size = source.nbytes // (shape[0] * shape[3])
    memory = np.zeros(len(slots) * size + skew, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        if not data.draw(st.booleans()):  # a machine without a compiler
            patch.setattr(kv_pack, "_kernel", lambda: None)
        kv_pack.pack_into(source, slots.numpy(), memory[skew:].reshape(len(slots), size))
        assert memory[skew:].tobytes() == reference.reshape(-1).view(torch.uint8).numpy().tobytes()
        memory.flags.writeable = False
        kv_pack.unpack_from(memory[skew:].reshape(len(slots), size), target, slots.numpy())
    kv_pack.unpack_slots_reference(reference, expected, slots)
    assert torch.equal(bits(target), bits(expected))


@pytest.mark.parametrize(
    ("name", "slots", "packed"),
    [
        ("slots", [3, 3], (2, 384)),
        ("slots", [64, 1], (2, 384)),
        ("slots", [-1, 1], (2, 384)),
        ("packed", [3, 0], (2, 383)),
        ("packed", [3, 0], (3, 384)),
    ],
)
def test_memory_that_does_not_fit_is_refused_by_name(name: str, slots: list[int], packed: tuple[int, int]) -> None:
    kv = torch.zeros(4, 3, 2, 16, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^{name}: "):
        kv_pack.unpack_from(np.zeros(packed, np.uint8), kv, np.array(slots, np.int32))
    assert not kv.any()


def test_packing_waits_for_the_device_once_and_unpacking_never(second: Any) -> None:
    """Slots are checked on the host, where they come from."""
    kv = torch.randn(6, 2, 2, 16, 2, 8)
    there = kv.to("second:0")
    slots, others = np.array([3, 90, 17, 40], np.int32), np.array([5, 6, 7, 8], np.int32)
    out = np.empty((4, 2 * 2 * 2 * 8 * 4), np.uint8)
    with second.counted() as reading:
        kv_pack.pack_into(there, slots, out)
    with second.counted() as writing:
        kv_pack.unpack_from(out, there, others)
    with second.counted() as copying:
        kv_pack.copy_slots(there, slots, others[::-1].copy())
    found = [(each.h2d, each.d2h, each.waits) for each in (reading, writing, copying)]
    assert found == [(1, 1, 1), (2, 0, 0), (2, 0, 0)]
    packed = kv_pack.pack_slots_reference(kv, torch.from_numpy(slots))
    assert out.tobytes() == packed.numpy().tobytes()
    assert torch.equal(kv_pack.pack_slots_reference(there.cpu(), torch.from_numpy(others)), packed.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 2, 2, 4, 3, 5), (3, 1, 2, 16, 1, 8), (2, 3, 2, 1, 2, 700)])
def test_triton_copies_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from rlhfspec.kernels import kv_pack_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU runs Triton's interpreter
    num_slots = shape[0] * shape[3]
    slots = torch.tensor([num_slots - 1, 0, num_slots // 2], dtype=torch.int32)[:num_slots].unique().flip(0)
    source, target = random_kv(shape, dtype, 1).to(device), random_kv(shape, dtype, 2).to(device)

    packed = kv_pack_triton.pack_slots(source, slots.to(device))
    assert torch.equal(bits(packed.cpu()), bits(kv_pack.pack_slots(source.cpu(), slots)))
    expected = target.cpu()
    kv_pack.unpack_slots(packed.cpu(), expected, slots)
    kv_pack_triton.unpack_slots(packed, target, slots.to(device))
    assert torch.equal(bits(target.cpu()), bits(expected))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("slots", {"slots": torch.tensor([64, 1], dtype=torch.int32)}),
        ("slots", {"slots": torch.tensor([-1, 1], dtype=torch.int32)}),
        ("slots", {"slots": torch.tensor([1, 1], dtype=torch.int32)}),
        ("slots", {"slots": torch.tensor([0, 1])}),
        ("packed", {"packed": torch.zeros(2, 3, 2, 2, 9)}),
        ("packed", {"packed": torch.zeros(2, 3, 2, 2, 8, dtype=torch.bfloat16)}),
        ("kv", {"kv": torch.zeros(8, 3, 2, 16, 2, 8)[::2]}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    good = {"packed": torch.zeros(2, 3, 2, 2, 8), "kv": torch.zeros(4, 3, 2, 16, 2, 8)}
    good["slots"] = torch.tensor([3, 0], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name}: "):
        kv_pack.unpack_slots(**(good | changes))

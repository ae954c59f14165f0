import json
import logging
import mmap
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import check, state
from hypothesis import given, settings, strategies as st
from peaks import peak_above
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer
from rlhfspec.training.checkpoint import CheckpointStore, export_hf
from rlhfspec.training.checkpoint.states import pack, unpack
from rlhfspec.training.modeling.tensor_files import read_noted, sync, write_tensors

NUM_WRITES = 400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.builds(lambda n, v: torch.full((n,), v), st.integers(0, 3), st.floats(width=32))
)  # fmt: skip
keys = st.text(st.sampled_from("ab.$#"), max_size=3) | st.integers(0, 9)
states = st.recursive(
    leaves,
    lambda inner: (lists := st.lists(inner, max_size=3)) | lists.map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # nan is nan, and 0.0 is not -0.0


@given(states)
@settings(max_examples=150)
def test_any_state_unpacks_as_it_was_packed(value: Any) -> None:
    document, tensors = pack(value)
    assert same(unpack(json.loads(json.dumps(document, allow_nan=False)), tensors), value)


@pytest.mark.parametrize("value", [{1, 2}, object(), {"a": {(1, 2): 3}}, {True: 1}], ids=lambda it: type(it).__name__)
def test_a_value_that_cannot_be_kept_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        pack({"run": [value]})
    assert error.value.field.startswith("run.0")


def test_an_optimizer_goes_on_as_if_nothing_had_happened(folder: Path) -> None:
    def make() -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        return weight, torch.optim.AdamW([weight], lr=0.1)

    def train(weight: torch.nn.Parameter, optimizer: torch.optim.AdamW, num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            (weight**4).sum().backward()
            optimizer.step()

    weight, optimizer = make()
    train(weight, optimizer, 3)
    with CheckpointStore(folder, keep=1) as store:
        store.save(3, {"weight": weight, "optimizer": optimizer.state_dict(), "random": random.getstate()})
        loaded = store.load(3)
    train(weight, optimizer, 2)
    again, resumed = make()
    again.data = loaded["weight"]
    resumed.load_state_dict(loaded["optimizer"])
    train(again, resumed, 2)
    assert torch.equal(again, weight)
    assert loaded["random"] == random.getstate()


def test_a_checkpoint_has_one_readable_file_for_each_part(folder: Path) -> None:
    with CheckpointStore(folder, keep=1) as store:
        path = store.save(12, state(12))
    assert path == folder / "step-00000012"
    names = ["manifest.json", "optimizer.safetensors", "policy.safetensors", "state.json"]
    assert sorted(file.name for file in path.iterdir()) == names
    assert load_file(path / "policy.safetensors")["policy.weight"].shape == (64, 64)
    with CheckpointStore(folder, keep=1) as store, pytest.raises(InvalidRequest, match="letters, digits, underscores"):
        store.save(13, {"../elsewhere": 1})


def test_the_best_checkpoint_stays_until_another_is_better(folder: Path) -> None:
    with CheckpointStore(folder, keep=2) as store:
        assert store.latest() is None
        for step, best in ((1, None), (2, 1), (3, 1), (4, 1), (5, 4), (6, 4), (7, 4)):
            store.save(step, state(step), best=best)
            if step == 4:
                assert store.steps() == [1, 3, 4]
        assert store.steps() == [4, 6, 7]
        assert store.latest() == 7
        for step in (10, 12):
            store.save(step, state(step))
        assert store.steps() == [10, 12], "without a best one the newest alone"


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


damage_byte = rewritten("policy.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]))
OTHER_MANIFESTS = (
    b"", b"null", b"[]", b"\xff\xfe", b"{}", b'{"schema": 1}', b'{"schema": 1, "files": ["state.json"]}',
    b'{"schema": 1, "files": {}}', b'{"schema": 1, "files": {"state.json": null}}',
)  # fmt: skip
DAMAGES = {
    "byte": damage_byte,
    "length": rewritten("policy.safetensors", lambda content: b""),
    "lost file": lambda path: (path / "state.json").unlink(),
    "lost manifest": lambda path: (path / "manifest.json").unlink(),
    "torn manifest": rewritten("manifest.json", lambda content: content[: len(content) // 2]),
} | {str(other): rewritten("manifest.json", lambda _, other=other: other) for other in OTHER_MANIFESTS}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_named(folder: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointStore(folder, keep=3) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        damage(folder / "step-00000003")
        with caplog.at_level(logging.WARNING):
            assert store.latest() == 2
        assert "step-00000003" in caplog.text
        check(store.load(2), 2)
        with pytest.raises(StorageError, match="step-00000003"):
            store.load(3)


def test_if_all_checkpoints_are_damaged_the_start_fails(folder: Path) -> None:
    with CheckpointStore(folder, keep=2) as store:
        store.save(1, state(1))
        damage_byte(folder / "step-00000001")
        with pytest.raises(StorageError, match="all 1 checkpoints are damaged"):
            store.latest()


def test_a_checkpoint_of_another_schema_is_refused(folder: Path) -> None:
    with CheckpointStore(folder, keep=2) as store:
        path = store.save(1, state(1)) / "manifest.json"
        path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
        with pytest.raises(InvalidRequest, match="was written in another schema; this version reads 1"):
            store.latest()


TENSOR_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:20],
    "cut in a tensor": lambda content: content[:-4],
    "other bytes": lambda content: b"\xff" * len(content),
    "same_as that is no JSON": lambda content: content.replace(b'"{', b'"['),
    "same as one that is not there": lambda content: content.replace(rb"\"embedding\"}", rb"\"embeddinG\"}"),
}


@pytest.mark.parametrize("damage", TENSOR_DAMAGES.values(), ids=TENSOR_DAMAGES)
def test_a_damaged_tensor_file_is_one_line(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    weight = torch.ones(4)
    write_tensors(tmp_path / "w.safetensors", {"embedding": weight, "head": weight})
    content = (tmp_path / "w.safetensors").read_bytes()
    assert damage(content) != content
    (tmp_path / "w.safetensors").write_bytes(damage(content))
    with pytest.raises(StorageError, match=r"w\.safetensors: cannot be read"):
        read_noted(tmp_path / "w.safetensors")


@pytest.mark.parametrize("damage", ["length", "lost file", "lost manifest", str(b'{"schema": 1}')])
def test_a_damaged_checkpoint_does_not_displace_a_sound_one(folder: Path, damage: str) -> None:
    with CheckpointStore(folder, keep=2) as store:
        for step in (1, 2):
            store.save(step, state(step))
        DAMAGES[damage](folder / "step-00000002")
        store.save(3, state(3))
        assert store.steps() == [1, 2, 3]
        store.save(4, state(4))
        assert store.steps() == [3, 4]


def test_a_step_that_was_damaged_is_written_anew(folder: Path) -> None:
    with CheckpointStore(folder, keep=2) as store:
        store.save(1, state(1))
        store.save(2, state(2))
        damage_byte(folder / "step-00000002")
        assert store.latest() == 1
        assert store.discard_after(1) == [2]
        store.save(2, state(2))
        store.save(2, state(2))
        assert store.latest() == 2
        check(store.load(2), 2)


def test_two_runs_cannot_write_to_one_checkpoint_folder(folder: Path) -> None:
    with (
        CheckpointStore(folder, keep=1),
        pytest.raises(StorageError, match=rf"another run is writing here \(process {os.getpid()}\)"),
    ):
        CheckpointStore(folder, keep=1)
    CheckpointStore(folder, keep=1).close()


def test_a_path_that_cannot_hold_checkpoints_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot keep checkpoints here"):
        CheckpointStore(tmp_path / "file" / "checkpoints", keep=1)


class Full:
    def __init__(self, num_good: int) -> None:
        self.left = num_good
        self.failed = False

    def of(self, real: Any) -> Any:
        def operation(*arguments: Any, **named: Any) -> Any:
            if self.left == 0 and not self.failed:
                self.failed = True
                if named.get("ignore_errors"):
                    return None
                raise OSError(28, "No space left on device")
            self.left = max(0, self.left - 1)
            return real(*arguments, **named)

        return operation


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
def test_a_failure_of_any_operation_loses_nothing(tmp_path: Path, replacing: bool) -> None:
    for num_good in range(NUM_WRITES):
        folder = tmp_path / str(num_good)
        full = Full(num_good)
        with CheckpointStore(folder, keep=2) as store:
            for step in (1, 2):
                store.save(step, state(step))
            step = 2 if replacing else 3
            with pytest.MonkeyPatch.context() as patch:
                operations = [(Path, "mkdir"), (Path, "rename"), (Path, "open"), (os, "fsync"), (shutil, "rmtree")]
                for owner, name in operations:
                    patch.setattr(owner, name, full.of(getattr(owner, name)))
                for module in ("training.checkpoint.shares.write_tensors", "training.checkpoint.store.sync"):
                    real = {"write_tensors": write_tensors, "sync": sync}[module.rpartition(".")[2]]
                    patch.setattr(f"rlhfspec.{module}", full.of(real))
                with suppress(StorageError):  # any other error ends the test
                    store.save(step, state(step))
            assert store.latest() in ({2} if replacing else {2, 3})
            check(store.load(2), 2)
        with CheckpointStore(folder, keep=2) as store:
            check(store.load(store.latest() or 0), store.latest() or 0)
            assert all(not path.name.startswith((".writing", ".replaced", ".removing")) for path in folder.iterdir())
        if not full.failed:
            return
    raise AssertionError("a save never got through")


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt-neox", "qwen3"])
def test_an_export_gives_the_logits_of_the_policy(tmp_path: Path, kind: str) -> None:
    model = random_model(kind, seed=0, vocab_size=260)
    tokens = torch.randint(260, (1, 9))
    export_hf(tmp_path / "export", random_model(kind, seed=1, vocab_size=260).state_dict(), model.config)
    export_hf(tmp_path / "export", model.state_dict(), model.config, tokenizer=hugging_face_tokenizer())
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values())
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("2+2=")["input_ids"][1:] == list(b"2+2=")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_of_other_weights_is_refused(tmp_path: Path) -> None:
    model = random_model("llama", seed=0)
    weights = model.state_dict()
    weights["extra"] = weights.pop("model.norm.weight")
    with pytest.raises(InvalidRequest, match=r"missing \['model.norm.weight'\], unknown \['extra'\]"):
        export_hf(tmp_path / "export", weights, model.config)
    assert list(tmp_path.iterdir()) == []


def take_96_mib() -> None:
    with mmap.mmap(-1, 96 << 20) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process its peak")
def test_writing_tensors_takes_no_memory_of_their_size(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((2 << 20,), float(number)) for number in range(12)}  # 96 MiB
    assert peak_above(lambda: write_tensors(tmp_path / "w", tensors)) < 8 << 20
    assert peak_above(take_96_mib) > 64 << 20, "it measures"


def test_a_file_is_to_the_byte_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "long": torch.arange(5), "float": torch.arange(6.0).view(3, 2), "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2), "one": torch.tensor(3.0), 'ü"\n': torch.tensor([True]),
        "turned": torch.arange(12.0).view(3, 4).T,
    }  # fmt: skip
    write_tensors(tmp_path / "ours", tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "theirs", metadata={"same_as": "{}"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()

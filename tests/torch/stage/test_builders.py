from importlib import import_module
from typing import Any

import pytest
import torch
from small_job import a_job

from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.devices import device_of
from rlhfspec.messages.loop import STAGES
from rlhfspec.training.modeling.packed import pack_sequences

BUILDERS = [f"rlhfspec.{stage.name}.build" for stage in STAGES]


def test_every_stage_has_a_builder() -> None:
    assert all(callable(import_module(name).build) for name in BUILDERS)


@pytest.mark.parametrize(
    ("spec", "has_gpu", "device"),
    [
        ({}, False, "cpu"),
        ({}, True, "cuda"),
        ({"training": {"exactOnPolicy": True}}, True, "cpu"),
        ({"device": "cpu"}, True, "cpu"),
        ({"device": "cuda:1"}, True, "cuda:1"),
    ],
)
def test_the_job_and_a_visible_gpu_decide_the_device(
    spec: dict[str, Any], has_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    job = a_job(training=spec.get("training", {}))
    assert device_of(job.spec.model_copy(update={"device": spec.get("device", "auto")})) == device


@pytest.mark.parametrize(
    ("device", "count", "rank", "found"),
    [
        ("auto", 8, 3, "cuda:3"),
        ("cuda", 8, 0, "cuda:0"),
        ("auto", 1, 3, "cuda:0"),  # the only one that it can see
        ("cpu", 8, 3, "cpu"),
        ("cuda:1", 8, 3, "names one GPU for several ranks"),
        ("auto", 2, 3, "there are only 2 GPUs"),
    ],
)
def test_each_rank_has_its_gpu(device: str, count: int, rank: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    told |= {"RLHFSPEC_RANKS_SECRET": "of this run"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    wanted = a_job().spec.model_copy(update={"device": device})
    if found.startswith(("cuda", "cpu")):
        assert device_of(wanted) == found
    else:
        with pytest.raises(InvalidRequest, match=found):
            device_of(wanted)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match=r"spec\.device: there is no CUDA GPU on this machine"):
        device_of(a_job().spec.model_copy(update={"device": "cuda"}))


def test_a_batch_goes_to_its_device_whole() -> None:
    batch = pack_sequences([(5, 6)], [(7, 8, 9)]).to(torch.device("meta"))
    tensors = [value for name in batch.__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)]
    assert len(tensors) >= 4
    assert {tensor.device.type for tensor in tensors} == {"meta"}

"""Messages between ranks survive encoding, and unknown commands run nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import policy, rollouts

from rlhfspec.common.ranks import codec
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.huggingface.proof.check import report_of
from rlhfspec.huggingface.structure.causal_lm import Anatomy, anatomy_of
from rlhfspec.messages.records.models import ModelReport
from rlhfspec.training.leading import _restored, _told
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling.stored import Piece, StoredTensor


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    sent: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, group: Any, group_src: int) -> None:
        if group == "sending":
            sent.append(tensor.clone())
        else:
            tensor.copy_(sent.pop(0))

    monkeypatch.setattr(codec.dist, "broadcast", broadcast)
    return Ranks(rank=1, num_ranks=2)


def through(value: Any) -> Any:
    codec.send(value, "sending", 0)
    return codec.receive("receiving", 0)


def test_values_decode_as_they_were_encoded(looped: Ranks) -> None:
    large = torch.arange(1 << 19, dtype=torch.int64)
    numbers = [0.1, 1e-310, float("inf"), -0.0, 1 << 70, True, None, "ä$", ()]
    types = {name: torch.ones(2, 3).to(dtype) for name, dtype in codec._TENSOR_DTYPES.items()}
    value = {"numbers": numbers, "large": large, "types": types}
    value |= {"none": torch.zeros(0, 4, dtype=torch.int32).as_strided((0,), (0,)), "single": torch.tensor(3.5)}
    found = through(value)
    assert repr(found["numbers"]) == repr(numbers)
    flat = value["types"] | {name: value[name] for name in ("large", "none", "single")}
    others = found["types"] | {name: found[name] for name in ("large", "none", "single")}
    for name, tensor in flat.items():
        assert (others[name].dtype, others[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(codec._bytes_of(others[name]), codec._bytes_of(tensor)), name


def test_rollouts_states_and_models_round_trip(looped: Ranks) -> None:
    step = rollouts(0)
    told = Rollouts(**through(step.fields()))
    for name, value in step.fields().items():
        other = getattr(told, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else type(value) is type(other), name
    assert told.prompt_token_ids == step.prompt_token_ids
    stored = StoredTensor(name="a", shape=(4, 2), pieces=(Piece(path=Path("x"), start=(0, 0), shape=(4, 2)),))
    state = {"version": 3, "policy": {"a": stored}, "param_groups": [{"betas": (0.9, 0.99)}]}
    assert _restored(through(_told(state))) == state
    model = policy()
    assert Anatomy.of(through(anatomy_of(model).fields())) == anatomy_of(model)
    assert ModelReport(**through(asdict(report_of(model)))) == report_of(model)


def test_a_command_that_is_not_in_the_table_runs_nothing(looped: Ranks) -> None:
    ran: list[str] = []
    codec.send(["learn", {}], "sending", 0)
    codec.send(["__class__", {}], "sending", 0)
    with pytest.raises(KeyError, match="__class__"):
        looped.obey({"learn": lambda: ran.append("learn")}, stage="trainer")
    assert ran == ["learn"]

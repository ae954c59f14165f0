"""Parts of a model by rank, and what cannot be cut. Results of ranks: tests/processes/learning."""

from pathlib import Path

import pytest
import torch

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import random_model
from rlhfspec.training.modeling.stored import Piece, StoredTensor
from rlhfspec.training.modeling.tensor_parallel import cut, shares_of

SECOND = Ranks(rank=1, num_ranks=2)


def test_a_part_is_of_heads_and_rows_and_tied_weights_stay_so() -> None:
    model, whole = random_model("llama-tied", seed=0), random_model("llama-tied", seed=0).state_dict()
    cut(model, SECOND, field="model")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    shares = shares_of(model)
    for name, tensor in model.state_dict().items():
        share = shares.get(name)
        if share is not None:
            whole[name] = whole[name].narrow(share.dim, share.start, share.stop - share.start)
        assert torch.equal(tensor, whole[name]), name
    assert {name.rpartition("layers.0.")[2] for name in whole.keys() - shares.keys() if "layers.1" not in name} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "num_ranks", "said"),
    [
        ("phi3", 2, "cannot be cut over 2 processes: Phi3ForCausalLM wants"),
        ("llama", 4, "cannot be cut over 4 processes: num_key_value_heads is 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name_and_left_whole(kind: str, num_ranks: int, said: str) -> None:
    model = random_model(kind, seed=0)
    with pytest.raises(InvalidRequest, match=said):
        cut(model, Ranks(rank=1, num_ranks=num_ranks), field="spec.model.path")
    assert not shares_of(model)
    assert sum(map(torch.numel, model.parameters())) == sum(map(torch.numel, random_model(kind, seed=0).parameters()))


def test_a_place_that_no_rank_wrote_is_found(tmp_path: Path) -> None:
    quarters = [Piece(path=tmp_path, start=(row, column), shape=(2, 3)) for row in (0, 2) for column in (0, 3)]
    for missing, place in enumerate(((0, 0), (0, 3), (2, 0), (2, 3))):
        kept = tuple(piece for number, piece in enumerate(quarters) if number != missing)
        assert StoredTensor(name="weight", shape=(4, 6), pieces=kept).missing() == place
    assert StoredTensor(name="weight", shape=(4, 6), pieces=tuple(quarters)).missing() is None

import copy

import numpy as np
import pytest
import torch
from on_device import LOG_PROB_TOLERANCE, call_again

from rlhfspec.engine import SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward.graphs import EXTRA_BUCKETS, ROW_BUCKETS, Forward, GraphedForward
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.kernels.tree_attention import AttentionMeta
from rlhfspec.tiny import perturbed, random_model


def planned_anew(runner: ModelRunner) -> Forward:
    """Return a forward planned anew: CPU kernels plan once per meta, GPU kernels read buffers at every replay."""

    def forward(tokens: torch.Tensor, positions: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        fields = (meta.slots, meta.table_rows, meta.context_lens, meta.extra, meta.slot_table)
        return runner._run_layers(tokens, positions, AttentionMeta(*fields))

    return forward


@pytest.mark.parametrize("depth", [2, 6])
def test_padded_replays_give_the_same_bits(depth: int) -> None:
    model = random_model("qwen3", seed=4)
    tree = DraftPlan(drafter="model", depth=depth, width=2, branch=2)
    config = EngineConfig(max_sequences=5, max_context=96, num_threads=1, profile=False, speculation=tree)
    engines = [make_engine(copy.deepcopy(model), config, draft=perturbed(model, 0.1)) for _ in range(2)]
    runners = [space.runner for space in engines[1].state.spaces]
    for runner in runners:
        runner.native = None
        runner._graphs = GraphedForward(planned_anew(runner), runner.config.device, capture=call_again)
    prompts = [[3, 4, 5], [9] * 21, [7, 7], [1, 2], [6] * 40]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain, graphed = (engine.generate(prompts, params, seeds=[1, 2, 3, 4, 5]) for engine in engines)
    assert [done.token_ids for done in graphed] == [done.token_ids for done in plain]
    for found, expected in zip(graphed, plain, strict=True):
        assert found.log_probs == pytest.approx(expected.log_probs, abs=LOG_PROB_TOLERANCE, rel=0)
    shapes = {key[:2] for key in runners[0]._graphs._captured}
    assert len(shapes) > 1
    assert all(rows in ROW_BUCKETS and extra in EXTRA_BUCKETS for rows, extra in shapes)


def test_shapes_beyond_the_buckets_are_left_to_the_caller() -> None:
    graphed = GraphedForward(lambda *_: torch.zeros(1), torch.device("cpu"), capture=call_again)
    many = np.zeros(ROW_BUCKETS[-1] + 1, np.int32)
    meta = AttentionMeta(many, many, many, np.empty((len(many), 0), np.int32), np.zeros((1, 8), np.int32))
    assert graphed(many, many, meta) is None

"""`exact: on` off the CPU: a token's bits do not depend on the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from on_device import call_again

from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.forward import constant_shape, graphs
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.errors import InvalidRequest, SequenceStateError, UnsupportedModel
from rlhfspec.huggingface.proof.check import BITS_BY_COMPANY, OWN_BITS
from rlhfspec.sweep.flips import check_device, count_flips
from rlhfspec.tiny import random_model

pytestmark = [pytest.mark.turns(parts=2), pytest.mark.proves_anew]
PROMPTS = [[5, 6, 7] * count for count in (1, 2, 20, 3, 30, 1)]  # one longer than a forward of constant shape
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


def engine_on(device: str, kind: str = "llama", **options: Any) -> Engine:
    settings = {"max_sequences": 8, "max_context": 160, "profile": False, "speculation": "off", "num_threads": 1}
    return make_engine(random_model(kind, seed=0), EngineConfig(device=device, **(settings | options)))


def generated(engine: Engine, *, together: bool) -> list[Any]:
    groups = [range(len(PROMPTS))] if together else [[place] for place in range(len(PROMPTS))]
    done = [engine.generate([PROMPTS[place] for place in group], PARAMS, seeds=list(group)) for group in groups]
    return [(each.token_ids, each.log_probs) for group in done for each in group]


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16")])
def test_an_exact_engine_gives_a_row_its_own_bits(second: Any, kind: str, dtype: str) -> None:
    plain = engine_on("second:0", kind, exact="on", dtype=dtype)
    drafting = engine_on("second:0", kind, exact="on", dtype=dtype, speculation="suffix", prefill_chunk=100)
    assert plain.reports["model"].bits == OWN_BITS
    assert generated(plain, together=False) == generated(drafting, together=True)


@pytest.mark.parametrize("exact", ["off", "auto"])
def test_a_fast_engine_reports_that_bits_depend_on_other_rows(second: Any, exact: str) -> None:
    plain = engine_on("second:0", exact=exact)
    assert plain.reports["model"].bits == BITS_BY_COMPANY
    assert generated(plain, together=False) != generated(plain, together=True)


def test_bits_that_depend_on_other_rows_are_refused_at_load(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may depend on the number of rows; only a fixed shape gives fixed bits."""
    genuine = ModelRunner._run_layers

    def by_company(self: ModelRunner, token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        return genuine(self, token_ids, *others) * (1 + 2.0**-20 * token_ids.shape[1])

    monkeypatch.setattr(ModelRunner, "_run_layers", by_company)
    assert engine_on("second:0", exact="on").reports["model"].bits == OWN_BITS
    monkeypatch.setattr(constant_shape, "_filled", lambda numbers, value, num_rows: np.asarray(numbers))
    with pytest.raises(UnsupportedModel, match="a row's bits depend on the rows beside it"):
        engine_on("second:0", exact="on")


def test_graphs_of_an_exact_engine_have_one_shape(second: Any) -> None:
    engine = engine_on("second:0", exact="on", speculation="suffix")
    runner = engine.state.target.runner
    runner._graphs = graphs.GraphedForward(runner._run_layers, torch.device("second:0"), call_again)
    assert generated(engine, together=True) == generated(engine_on("second:0", exact="on"), together=False)
    assert {rows for rows, *_ in runner._graphs._captured} == {constant_shape.ROWS}


def test_sequences_move_between_exact_engines_alone(second: Any) -> None:
    here, there, fast = (engine_on("second:0", exact=exact) for exact in ("on", "on", "off"))
    request = Request(id="r", prompt_token_ids=(5, 6, 7), params=PARAMS, seed=1)
    here.submit(request)
    for _ in range(5):
        here.step()
    state = here.export_sequence("r")
    with pytest.raises(SequenceStateError, match="architecture"):
        fast.import_sequence(state)
    there.import_sequence(state)


def test_a_cpu_engine_is_exact_for_every_setting() -> None:
    reports = [engine_on("cpu", exact=exact).reports["model"] for exact in ("auto", "on", "off")]
    assert {report.bits for report in reports} == {OWN_BITS}
    with pytest.raises(InvalidRequest, match="exact"):
        EngineConfig(exact="maybe")


def test_flips_are_counted_against_the_oracle(second: Any) -> None:
    def make() -> Any:
        return random_model("llama", seed=0)

    exact = count_flips(make, "second:0", dtype="float32", exact="on", max_context=160, max_tokens=12)
    assert (exact.num_tokens, exact.num_flips, exact.num_parted) == (48, 0, 0)


def test_count_flips_detects_another_model(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([random_model("llama", seed=1), random_model("llama", seed=1), random_model("llama", seed=0)])
    found = count_flips(lambda: next(made), "second:0", dtype="bfloat16", exact="off", max_context=160, max_tokens=12)
    assert found.num_flips > 24
    assert found.lead > 0.1


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--device"):
        check_device("xpu")

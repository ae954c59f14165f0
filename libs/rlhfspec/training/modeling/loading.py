"""Loading of a job's models, verified to give plain Hugging Face results on packed rows."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rlhfspec import job
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.fused.casting import Precision, cast, narrow, precision_of
from rlhfspec.huggingface.fused.widened import one_layer_wide, widen
from rlhfspec.huggingface.loading import load_stored
from rlhfspec.huggingface.proof import kept
from rlhfspec.huggingface.proof.check import BITS_BY_COMPANY, keep_report, report_of
from rlhfspec.huggingface.proof.reference import TOLERANCES, FollowedChoices, ProbeResult, Reference, Rounding, ask
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.causal_lm import Anatomy, CausalLM, anatomy_of, keep_anatomy, within_positions
from rlhfspec.huggingface.structure.trace import refusing
from rlhfspec.messages.records.models import ModelReport
from rlhfspec.training.modeling.lean import keep_less
from rlhfspec.training.modeling.packed import attend, hidden_states, use_packed_attention
from rlhfspec.training.modeling.probed import answers, every_row, probes_of, random_keys

_DEFAULT_CONTEXT = 1024


def load_policy(
    model: job.Model, *, seed: int = 0, max_context: int = _DEFAULT_CONTEXT, stored: bool = False,
    ranks: Ranks | None = None,
) -> Any:  # fmt: skip
    """Load the initial policy with seeded LoRA adapters, if any. stored, ranks: as in `load_causal_lm`."""
    policy = load_causal_lm(
        model.path, field="spec.model.path", dtype=model.dtype, max_context=max_context,
        stored=stored and model.lora is None, ranks=ranks,
    )  # fmt: skip
    if model.lora is not None:
        from rlhfspec.training.modeling.lora import add_lora

        add_lora(policy, model.lora, seed=seed)
    return policy


def load_reference(model: job.Model, *, max_context: int = _DEFAULT_CONTEXT, stored: bool = False) -> Any:
    """Load the frozen reference model of the KL, without LoRA. stored: as in `prepared`."""
    path, field = (
        (model.path, "spec.model.path") if model.reference is None else (model.reference, "spec.model.reference")
    )
    reference = load_causal_lm(path, field=field, dtype=model.dtype, max_context=max_context, stored=stored)
    return reference.requires_grad_(False)


def load_causal_lm(
    path: str | Path, *, field: str, dtype: str, max_context: int = _DEFAULT_CONTEXT, only_trunk: bool = False,
    stored: bool = False, ranks: Ranks | None = None,
) -> Any:  # fmt: skip
    """Load the model of a folder or hub id, verified on rank 0. All ranks must call this.

    field: name of `path` in errors. stored: as in `prepared`.
    """
    model = load_stored(path, field=field, only_trunk=only_trunk)
    options: dict[str, Any] = {"dtype": dtype, "max_context": max_context, "name": field, "stored": stored}
    if ranks is None or ranks.num_ranks == 1:
        return prepared(model, **options)
    if ranks.rank > 0:
        found, refusal = ranks.broadcast()
        if found is None:
            raise InvalidRequest(*refusal)
        anatomy, report = found
        return _made_ready(_in_its_type(model, dtype, stored), Anatomy.of(anatomy), ModelReport(**report))
    found, refusal = None, (field, str(path), "rank 0 failed before it could check the model")
    try:
        model = prepared(model, **options)
        found = anatomy_of(model).fields(), asdict(report_of(model))
        return model
    except InvalidRequest as error:
        refusal = error.field, str(error.value), error.problem
        raise
    finally:
        ranks.broadcast((found, refusal))


def prepared(
    model: Any, *, dtype: str = "float32", max_context: int = _DEFAULT_CONTEXT, name: str = "model",
    stored: bool = False,
) -> Any:  # fmt: skip
    """Prepare a causal LM for packed rows in place, verified against plain Hugging Face in float32.

    max_context: longest sequence in tokens. stored: bfloat16 weights become float32 only on their layer's device.
    """
    began = time.perf_counter()
    dtype, kept_as = _types(dtype)
    max_context = within_positions(model, max_context)
    if kept_as == torch.float32 and not stored:
        widen(model.parameters())
    anatomy = examine(model.eval(), name=name, max_context=max_context)
    narrow(model, precision_of(model, kept_as))
    rounding = Rounding(Precision(torch.float32), arithmetic="fma", activations=kept_as)
    probes = probes_of(model, max_context)
    key = kept.key_of(model, probes, torch.device("cpu"), "trainer", kept_as, stored)
    verdict = kept.find(key)
    if verdict is not None:
        report = replace(verdict.report, seconds=time.perf_counter() - began)
        return _made_ready(_in_its_type(model, dtype, stored), anatomy, report)
    reference = ask(model, anatomy, probes, name=name, rounding=rounding)
    _pack(_in_its_type(model, dtype, stored))
    with nullcontext() if kept_as == torch.bfloat16 else one_layer_wide(model):
        found = _packed_answers(model, reference)
    difference = reference.check(found, TOLERANCES[kept_as], whose="the trainer's")
    report = ModelReport(
        model=type(model).__name__,
        path="packed",
        dtype=dtype,
        attentions=anatomy.kinds_of_attention,
        guarded=(),
        probes=tuple(str(probe) for probe in reference.probes),
        difference=difference,
        noise=reference.noise,
        bits=BITS_BY_COMPANY,
        attention_split=None,
        seconds=time.perf_counter() - began,
    )
    kept.keep(key, kept.Proved(report))
    return _made_ready(model, anatomy, report)


def _pack(model: Any) -> None:
    use_packed_attention(model)
    keep_less(model)


def _types(dtype: str) -> tuple[str, torch.dtype]:
    name = "float32" if dtype == "auto" else dtype
    return name, getattr(torch, name)


def _in_its_type(model: Any, dtype: str, stored: bool) -> Any:
    kept_as = _types(dtype)[1]
    if kept_as == torch.bfloat16:
        cast(model, precision_of(model, kept_as))
    elif not stored:
        widen(model.parameters())
    return model.eval()


def _made_ready(model: Any, anatomy: Anatomy, report: ModelReport) -> Any:
    keep_anatomy(model, anatomy)
    _pack(model)
    keep_report(model, report)
    return model.requires_grad_(True)


@torch.no_grad()
def _packed_answers(model: Any, reference: Reference) -> list[ProbeResult]:
    parts, batch = CausalLM(model), every_row(reference.probes)
    kept_as = str(next(model.parameters()).dtype).removeprefix("torch.")
    refuses = refusing(reference.name, reference.kind, f"fails on packed rows in {kept_as}")
    with refuses, random_keys(model, reference.probes, attend), FollowedChoices(reference.choices):
        return answers(parts.logits(hidden_states(parts.trunk, batch)), batch)

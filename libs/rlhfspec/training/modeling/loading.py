"""From a job's model block to models that take packed rows.

Policy, reference and critic are Hugging Face causal LMs in evaluation mode, so dropout is off and log-probs of one
policy are one number. What packed attention would get wrong is refused by name: a packed row of several sequences must
give what plain Hugging Face gives one by one.

Example:
    >>> from rlhfspec.tiny import random_model
    >>> prepared(random_model("qwen2", seed=0)).config._attn_implementation
    'rlhfspec_packed'
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rlhfspec import job
from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused.casting import Precision, cast, precision_of, round_parameters
from rlhfspec.huggingface.loading import load_model
from rlhfspec.huggingface.proof.check import BITS_BY_COMPANY, keep_report
from rlhfspec.huggingface.proof.reference import TOLERANCES, FollowedChoices, ProbeResult, Reference, Rounding, ask
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.causal_lm import CausalLM, within_positions
from rlhfspec.huggingface.structure.trace import FORWARD_ERRORS, first_line
from rlhfspec.messages.records.models import ModelReport
from rlhfspec.training.modeling.packed import attend, hidden_states, use_packed_attention
from rlhfspec.training.modeling.probed import answers, every_row, probes_of, random_keys

_DEFAULT_CONTEXT = 1024


def load_policy(model: job.Model, *, seed: int = 0, max_context: int = _DEFAULT_CONTEXT) -> Any:
    """The policy as it begins; with a LoRA block, its update is drawn from the seed and only it takes gradients."""
    policy = load_causal_lm(model.path, field="spec.model.path", dtype=model.dtype, max_context=max_context)
    if model.lora is not None:
        from rlhfspec.training.modeling.lora import add_lora

        add_lora(policy, model.lora, seed=seed)
    return policy


def load_reference(model: job.Model, *, max_context: int = _DEFAULT_CONTEXT) -> Any:
    """The model that the KL is measured against: never trained, so without LoRA."""
    path, field = (
        (model.path, "spec.model.path") if model.reference is None else (model.reference, "spec.model.reference")
    )
    return load_causal_lm(path, field=field, dtype=model.dtype, max_context=max_context).requires_grad_(False)


def load_causal_lm(
    path: str | Path, *, field: str, dtype: str, max_context: int = _DEFAULT_CONTEXT, only_trunk: bool = False
) -> Any:
    """The model at `path`, a folder or a hub id; `field` is what messages call it."""
    model = load_model(path, field=field, only_trunk=only_trunk)
    return prepared(model, dtype=dtype, max_context=max_context, name=field)


def prepared(model: Any, *, dtype: str = "float32", max_context: int = _DEFAULT_CONTEXT, name: str = "model") -> Any:
    """A causal LM in memory made ready for packed rows, in place; `check.report_of` says what was found.

    What is proved is the model as it will run, in its dtype: against plain Hugging Face in float32 that has the same
    weights. dtype: as in a job's model block. max_context: tokens of its longest sequence.
    """
    dtype = "float32" if dtype == "auto" else dtype
    began = time.perf_counter()
    model.eval()
    max_context = within_positions(model, max_context)
    anatomy = examine(model, name=name, max_context=max_context)
    kept_as: torch.dtype = getattr(torch, dtype)
    precision = precision_of(model, kept_as)
    round_parameters(model, precision)
    rounding = Rounding(model, Precision(torch.float32), arithmetic="fma", activations=kept_as)
    reference = ask(model, anatomy, probes_of(model, max_context), name=name, rounding=rounding)
    cast(model, precision)
    use_packed_attention(model)
    difference = reference.check(_packed_answers(model, reference), TOLERANCES[kept_as], whose="the trainer's")
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
    keep_report(model, report)
    return model.requires_grad_(True)


@torch.no_grad()
def _packed_answers(model: Any, reference: Reference) -> list[ProbeResult]:
    parts, batch = CausalLM(model), every_row(reference.probes)
    try:
        with random_keys(model, reference.probes, attend), FollowedChoices(reference.choices):
            return answers(parts.logits(hidden_states(parts.trunk, batch)), batch)
    except FORWARD_ERRORS as error:
        if isinstance(error, UnsupportedModel):
            raise
        kept_as = str(next(model.parameters()).dtype).removeprefix("torch.")
        problem = f"fails on packed rows in {kept_as}: {first_line(error)}"
        raise UnsupportedModel(reference.name, reference.kind, problem) from error

"""Construction of the engine state: models, tokenizer, memory."""

from __future__ import annotations

import copy
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.distilling.eagle_student import EagleStudent
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward import constant_shape
from rlhfspec.engine.forward.eagle_forward import EagleForward, PolicyHead, taps_of
from rlhfspec.engine.forward.few_bits import FewBits, bytes_on_a_device
from rlhfspec.engine.forward.led import Others, follow
from rlhfspec.engine.forward.memory import least, sized, spare_bytes
from rlhfspec.engine.forward.runner import ModelRunner, RunnerConfig, Taps
from rlhfspec.engine.kv.space import KVSpace, SharedSpace
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.huggingface.cutting import cut_of
from rlhfspec.huggingface.heads.eagle import EagleHead, is_eagle, load_head
from rlhfspec.huggingface.heads.mtp import MtpHead, load_mtp
from rlhfspec.huggingface.loading import load_stored
from rlhfspec.huggingface.structure.causal_lm import max_positions, text_config
from rlhfspec.job.choices.drafters import AUTO, DRAFTERS, MADE_OF_THE_POLICY, MTP, NONE, OFF, ONLY_HEADS_LEARN, SELF
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.linear import arithmetic_for
from rlhfspec.kernels.malloc import tune_malloc

log = logging.getLogger(__name__)


def load_state(path: str | Path, *, drafter: str | Path | None, options: dict[str, Any]) -> EngineState:
    config = _config(options)
    model = load_stored(path)
    drafter = None if drafter == NONE else drafter
    draft = drafter if drafter in (None, *MADE_OF_THE_POLICY) else load_drafter(drafter, model, field="drafter")
    return make_state(model, config, draft=draft, tokenizer=_tokenizer(path))


def load_drafter(path: str | Path, policy: Any, *, field: str) -> Any:
    """Load a draft model or an EAGLE-3 head from a folder or hub id."""
    if is_eagle(path):
        return load_head(path, target_width=text_config(policy).hidden_size, field=field)
    return load_stored(path, field=field)


def make_state(
    model: Any, config: EngineConfig, *, draft: Any = None, tokenizer: Any = None, group: Ranks | None = None
) -> EngineState:
    """Build the engine state of Hugging Face models, modified in place; `draft`: a model, a head, or a word.

    `group`: ranks that share the target, of which this is rank 0; only rank 0 holds the draft.
    """
    eos = eos_token_ids(model)
    own = draft if draft in (AUTO, SELF) else None
    draft = load_mtp(model) if draft == MTP else draft
    head = draft if isinstance(draft, EagleHead | MtpHead) else None
    draft = draft if own is None and head is None else None
    is_optional = own == AUTO and not _needs_a_draft_model(config.speculation)
    if own is not None and (problem := _why_not_of_the_policy(config, group)):
        if not is_optional:
            raise InvalidRequest("drafter", own, problem)
        own = None
    if config.learning != OFF and (draft is not None or isinstance(head, MtpHead)):
        raise InvalidRequest("learning", config.learning, ONLY_HEADS_LEARN)
    student: EagleStudent | None = None
    taps: Taps | None = None
    if head is not None:  # before the KV takes what is free
        taps = _taps(head, model, group)
        if config.learning != OFF and isinstance(head, EagleHead):
            student = EagleStudent(copy.deepcopy(head), model, config.device)
        head = head.to(config.device)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    config, (target, *others) = make_runners(
        model, config, draft, group, taps, has_few_bits=own is not None and not is_optional
    )  # fmt: skip
    if own is not None and is_optional:
        num_bytes = num_weights if config.device.startswith("cpu") else bytes_on_a_device(model)
        if num_bytes > spare_bytes(config, target):
            log.info("self-drafting is off: the policy's quantised copy does not fit into the memory")
            own = None
    cut = cut_of(model)
    if group is not None and cut is not None:
        target.others = Others(group, cut)
    space = KVSpace(target, config)
    few_bits = None if own is None else FewBits(target, is_optional=is_optional)
    shared = SharedSpace(space, few_bits.runner) if few_bits is not None else None
    state = EngineState(
        config=config,
        target=space,
        draft=KVSpace(others[0], config) if others else shared,
        few_bits=few_bits,
        student=student,
        tokenizer=tokenizer,
        eos_token_ids=eos,
    )
    if head is not None:
        state.eagle = EagleForward(head, space, state.rows)
    return state


def _needs_a_draft_model(speculation: str | DraftPlan) -> bool:
    mode = (speculation if isinstance(speculation, str) else speculation.name).partition("-")[0]
    return mode in DRAFTERS and DRAFTERS[mode].runs_draft_model


def _why_not_of_the_policy(config: EngineConfig, group: Ranks | None) -> str:
    if group is not None:
        return "is not possible with a model that is split over several processes"
    if config.device.startswith("cpu") and _runner_config(config, "model").arithmetic == "torch":
        return "needs the CPU kernels on a CPU"
    return ""


def _taps(head: PolicyHead, policy: Any, group: Ranks | None) -> Taps:
    if group is not None:
        raise InvalidRequest("drafter", head.name, "is not possible with a model that is split over several processes")
    told, ours = head.config.vocab_size, text_config(policy).vocab_size
    if told != ours:
        raise InvalidRequest("drafter", told, f"vocabulary size must equal the policy's {ours}")
    if not hasattr(policy.base_model, "layers"):
        raise InvalidRequest("drafter", head.name, f"cannot read the layers of a {type(policy).__name__}")
    return taps_of(head, text_config(policy).num_hidden_layers)


def follow_engine(model: Any, config: EngineConfig, group: Ranks) -> None:
    """Run rank 0's commands on this rank's part of the model until its engine closes."""
    _, [runner] = make_runners(model, config, None, group)
    follow(runner, group)


def make_runners(
    model: Any,
    config: EngineConfig,
    draft: Any,
    group: Ranks | None,
    taps: Taps | None = None,
    *,
    has_few_bits: bool = False,
) -> tuple[EngineConfig, list[ModelRunner]]:
    _check_positions(model, draft, config.max_context)
    if config.device.startswith("cpu"):
        tune_malloc()
        build.set_num_threads(config.num_threads or torch.get_num_threads())
    wanted, config = config, least(config)
    target = ModelRunner(model, replace(_runner_config(config, "model"), taps=taps))
    draft_runner = None if draft is None else ModelRunner(draft, _runner_config(config, "drafter"))
    if draft_runner is not None and draft_runner.vocab_size != target.vocab_size:
        problem = f"vocabulary size must equal the target's {target.vocab_size}"
        raise InvalidRequest("drafter", draft_runner.vocab_size, problem)
    runners = [target] if draft_runner is None else [target, draft_runner]
    return sized(wanted, runners, group, bytes_on_a_device(model) if has_few_bits else 0), runners


def _check_positions(model: Any, draft: Any, max_context: int) -> None:
    limit = max_positions(model)
    if limit is not None and max_context > limit:
        raise InvalidRequest("max_context", max_context, f"must be <= the model's {limit} positions")
    limit = None if draft is None else max_positions(draft)
    if limit is not None and max_context > limit:
        raise InvalidRequest("drafter", limit, f"has fewer positions than max_context ({max_context})")


def _config(options: dict[str, Any]) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise InvalidRequest(name, options[name], f"unknown option{did_you_mean(name, known)}")
    if isinstance(options.get("dtype"), torch.dtype):
        options = {**options, "dtype": str(options["dtype"]).removeprefix("torch.")}
    return EngineConfig(**options)


def _runner_config(config: EngineConfig, name: str) -> RunnerConfig:
    dtype: torch.dtype = getattr(torch, config.dtype)
    arithmetic = "torch" if dtype == torch.float64 else arithmetic_for(dtype, config.arithmetic, config.device)
    is_exact = name == "model" and config.exact == "on" and not config.device.startswith("cpu")
    return RunnerConfig(
        name=name,
        dtype=dtype,
        arithmetic=arithmetic,
        device=torch.device(config.device),
        max_context=config.max_context,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        attention_split=config.attention_split,
        gpu_memory_fraction=config.gpu_memory_fraction,
        exact_rows=constant_shape.ROWS if is_exact else 0,
    )


def _tokenizer(path: str | Path) -> Any:
    """Return the tokenizer, or None; transformers raises various errors if it is missing."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        log.info("no tokenizer at %s (%s): the engine takes and returns token ids only", path, type(error).__name__)
        return None


def eos_token_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)

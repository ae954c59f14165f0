"""Drafters for `generation.speculation.mode`, besides off and adaptive.

`make` names an `engine.drafting.base.Drafter`. If it needs `model.drafter`, it receives a `DraftEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhfspec.job.choices.registry import Entry, Registry

OFF, ADAPTIVE = "off", "adaptive"
AUTO = "auto"  # as drafter: the policy itself where that pays; as its learning: while that pays
SELF = "self"  # as drafter: the policy with quantised weights
NONE = "none"  # as drafter: null
MTP = "mtp"  # as drafter: the layer of the policy's checkpoint that predicts further tokens
MADE_OF_THE_POLICY = (AUTO, SELF, MTP)
EAGLE3 = "LlamaForCausalLMEagle3"
ONLY_HEADS_LEARN = "only EAGLE-3 drafters learn: make one with rlhfspec drafter train, or set learning to off"
_DRAFT_MODEL = "model.drafter"


class DraftShape(NamedTuple):
    """Draft shape: fields of `rlhfspec.engine.drafting.base.DraftPlan`, without its drafter."""

    depth: int
    width: int = 1
    branch: int = 1
    max_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterEntry(Entry):
    shapes: tuple[DraftShape, ...]  # candidates of the adaptive selector: few and deep, because it prunes
    fixed: tuple[DraftShape, ...] = ()  # static strategies that benchmarks compare with the selector

    @property
    def runs_draft_model(self) -> bool:
        """Return whether drafts need forward passes of the draft model."""
        return _DRAFT_MODEL in self.needs


DRAFTERS = Registry(
    "generation.speculation.mode",
    DrafterEntry(
        name="suffix",
        about="what followed the same tokens before, in the text so far and in earlier answers to the prompt",
        make="rlhfspec.engine.drafting.suffix:SuffixDrafter",
        shapes=(DraftShape(12, 1, 2),),
        fixed=(DraftShape(4), DraftShape(8)),
    ),
    DrafterEntry(
        name="model",
        about="a smaller model with the same vocabulary, one tree level at a time, with the target's sampling noise",
        make="rlhfspec.engine.drafting.model:ModelDrafter",
        needs=(_DRAFT_MODEL,),
        shapes=(DraftShape(24, 1, 2), DraftShape(8, 4, 3)),  # a chain, and a bush for drafts that are often wrong
        fixed=(
            *map(DraftShape, (1, 2, 3, 4, 6, 8)),
            DraftShape(2, 1, 2), DraftShape(4, 1, 2), DraftShape(4, 2, 2), DraftShape(6, 2, 3), DraftShape(8, 4, 3),
            DraftShape(6, 1, 2, 4), DraftShape(8, 1, 2, 8),
        ),
    ),
    beside=(ADAPTIVE,),
)  # fmt: skip
SPECULATION_MODES = (OFF, *DRAFTERS.names, ADAPTIVE)


def may_run_draft_model(mode: str) -> bool:
    """Return whether a generator in this mode may load `model.drafter`."""
    return mode == ADAPTIVE or (mode != OFF and DRAFTERS[mode].runs_draft_model)


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an EAGLE-3 drafter's. Early ones call themselves a LlamaForCausalLM."""
    return EAGLE3 in (config.get("architectures") or ()) or "draft_vocab_size" in config

"""Causal LM in two parts, as engine and trainers run it: trunk and head."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.huggingface.structure.positions import positions_in

_ANATOMY_ATTRIBUTE = "rlhfspec_anatomy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    trunk: str  # path of the module
    trunk_output: type  # what the trunk returns
    attentions: tuple[AttentionSpec, ...]  # in execution order
    width: int  # of a hidden state
    vocab_size: int
    called: frozenset[str]  # paths of the modules that run; others only lend their weights

    @property
    def kinds_of_attention(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(spec) for spec in self.attentions))

    def fields(self) -> dict[str, Any]:
        attentions = [asdict(spec) for spec in self.attentions]
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {
            "trunk_output": _name_of(self.trunk_output), "attentions": attentions, "called": sorted(self.called),
        }  # fmt: skip

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Anatomy:
        """Rebuild an anatomy from its `fields()`. The class of the trunk's output must have been imported."""
        kinds: list[type[Any]] = [tuple, *_subclasses(ModelOutput)]
        outputs = {_name_of(each): each for each in kinds}
        attentions = tuple(AttentionSpec(**spec) for spec in told["attentions"])
        own = {"trunk_output": outputs[told["trunk_output"]], "attentions": attentions}
        return cls(**{**told, **own, "called": frozenset(told["called"])})


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def anatomy_of(model: Any) -> Anatomy:
    return getattr(model, _ANATOMY_ATTRIBUTE)  # type: ignore[no-any-return]


def keep_anatomy(model: Any, anatomy: Anatomy) -> None:
    object.__setattr__(model, _ANATOMY_ATTRIBUTE, anatomy)


class CausalLM:
    """Trunk and head of a model, both run by the model's own code."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.anatomy = anatomy_of(model)
        self.trunk = model.get_submodule(self.anatomy.trunk)
        self.width = self.anatomy.width
        self._head_guard: AbstractContextManager[object] = nullcontext()
        self._given = _Given(self.anatomy.trunk_output)
        self._behind = _with_submodule(model, self.anatomy.trunk, self._given)

    def hidden(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [1, N, hidden] of tokens and positions [1, N]."""
        return run_trunk(self.trunk, token_ids, position_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocab] of hidden [n, width], by the model's code after its trunk."""
        self._given.hidden = hidden[None]
        nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            with self._head_guard:
                output = type(self.model).forward(self._behind, input_ids=nothing, use_cache=False)
        finally:
            self._given.hidden = None
        return output.logits[0].float()  # type: ignore[no-any-return]

    def guard_head(self, guard: AbstractContextManager[object]) -> None:
        self._head_guard = guard


def run_trunk(trunk: Any, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    return hidden_of(trunk(input_ids=token_ids, position_ids=position_ids, use_cache=False))


def hidden_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.last_hidden_state  # type: ignore[no-any-return]


class _Given(nn.Module):
    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.hidden,) if self.output is tuple else self.output(last_hidden_state=self.hidden)


def _with_submodule(model: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """Return a copy of the model with one module exchanged and all else shared."""
    name, _, rest = path.partition(".")
    view = copy.copy(model)
    view._modules = dict(model._modules)
    inner = view._modules[name]
    assert inner is not None, path
    view._modules[name] = _with_submodule(inner, rest, replacement) if rest else replacement
    return view


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def max_positions(model: Any) -> int | None:
    return positions_in(model.config)


def within_positions(model: Any, num_tokens: int) -> int:
    return min(num_tokens, max_positions(model) or num_tokens)

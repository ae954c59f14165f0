"""Tensor parallelism of a causal LM, cut by its class's plan in transformers.

    embedding      rows of the vocabulary   -> looked up on their rank, added up
    colwise        outputs of a matrix      -> heads and hidden units of one process
    rowwise        inputs of a matrix       -> added up
    head           rows of the vocabulary   -> joined to all logits

Parts are added in rank order, so a row keeps its own bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.fused.audit import not_audited
from rlhfspec.huggingface.loading import LOAD_ERRORS, load_stored

_CUT_ATTRIBUTE = "rlhfspec_cut"
BY_COLUMNS, BY_ROWS, JOINED, LOOKED_UP = "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"
HEADS_APART = "replicated_with_grad_allreduce"  # a norm of heads
_STYLES = (BY_COLUMNS, BY_ROWS, JOINED, LOOKED_UP, "replicate", HEADS_APART)


@dataclass(frozen=True, slots=True)
class Cut:
    group: Ranks
    shapes: Mapping[str, torch.Size]  # of every weight of the whole model
    axes: Mapping[str, int | None]  # cut dimension of each weight; None: rank 0 has the weight, others zeros

    def part(self, name: str, weight: Tensor) -> Tensor:
        if name not in self.axes:
            return weight
        axis = self.axes[name]
        if axis is None:
            return weight if self.group.rank == 0 else torch.zeros_like(weight)
        first, count = share(weight.shape[axis], self.group.rank, self.group.num_ranks)
        return weight.narrow(axis, first, count).contiguous()


def added(part: Tensor, group: Ranks) -> Tensor:
    """Return the sum of `part` over all ranks, on CPUs in rank order, so that a row keeps its bits."""
    if not part.is_cpu:
        dist.all_reduce(part, group=group.device)
        return part
    with not_audited():
        first, *others = _of_all(part, group)
        for other in others:
            first = first + other
    return first


def joined(part: Tensor, width: int, group: Ranks) -> Tensor:
    """Concatenate the parts [..., part width] of all ranks to [..., width]."""
    most, _ = share(width, 1, group.num_ranks)
    with not_audited():
        parts = _of_all(functional.pad(part, (0, most - part.shape[-1])), group)
        return torch.cat(parts, -1)[..., :width].contiguous()


def _of_all(part: Tensor, group: Ranks) -> list[Tensor]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.num_ranks)]
    dist.all_gather(parts, part.contiguous(), group=group.host if part.is_cpu else group.device)
    return parts


def cut_of(model: Any) -> Cut | None:
    """Return the tensor parallel layout that `load_part` stored on the model, or None for a whole model."""
    return getattr(model, _CUT_ATTRIBUTE, None)


def share(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the start and size of a rank's part; the last ones may be smaller.

    >>> [share(97, rank, 2) for rank in (0, 1)]
    [(0, 49), (49, 48)]
    """
    most = -(-size // num_ranks)
    first = min(rank * most, size)
    return first, min(most, size - first)


def load_part(path: str | Path, group: Ranks, *, field: str = "path") -> Any:
    """Load this rank's part of a model. All ranks must call this. Raise InvalidRequest if it cannot be cut."""
    whole = _without_weights(path, field)
    styles = planned(whole, path, group.num_ranks, field)
    with _on_its_only_device():
        model = load_stored(path, field=field, num_ranks=group.num_ranks)
    parameters = {name: parameter.shape for name, parameter in whole.state_dict().items()}
    cut = Cut(group, parameters, dict(_axes(model, styles)))
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for name, style in styles.items():
        _make_plain(model, name, cut, made)
        _hook(model, name, style, cut)
    del model.config.distributed_config
    object.__setattr__(model, _CUT_ATTRIBUTE, cut)
    return model.to("cpu")


def _without_weights(path: str | Path, field: str) -> Any:
    loader: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return loader.from_config(config, dtype=torch.float32)
    except LOAD_ERRORS:
        return load_stored(path, field=field)  # raises with the reason


def planned(model: Any, path: str | Path, num_ranks: int, field: str) -> dict[str, str]:
    """Return the cut style (such as colwise) by module path, or raise InvalidRequest if a cut is impossible."""

    def refuse(problem: str) -> InvalidRequest:
        return InvalidRequest(field, str(path), f"cannot be cut over {num_ranks} processes: {problem}")

    plan = dict(getattr(model, "tp_plan", None) or {})
    if len(plan) < 2:  # many classes have a plan for the head alone
        raise refuse(f"transformers has no plan for {type(model).__name__}")
    others = sorted({f"{style} of {name}" for name, style in plan.items() if style not in _STYLES})
    if others:
        raise refuse(f"{type(model).__name__} needs {', '.join(others)}, which is not supported")
    config = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None) or num_ranks
        if count % num_ranks:
            raise refuse(f"{name} is {count}")
    styles = {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        styles[name] = style
        size = {BY_COLUMNS: "out_features", BY_ROWS: "in_features", JOINED: "out_features"}.get(style)
        width = getattr(module, size or "num_embeddings", num_ranks)
        is_even = style in (JOINED, LOOKED_UP)
        if (width % num_ranks and not is_even) or share(width, num_ranks - 1, num_ranks)[1] < 1:
            raise refuse(f"{name} is {width} wide")
    return styles


def _axes(model: Any, styles: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    for path, style in styles.items():
        for leaf in model.get_submodule(path)._parameters:
            name = f"{path}.{leaf}"
            if style in (BY_COLUMNS, JOINED, LOOKED_UP):
                yield name, 0
            elif style == BY_ROWS:
                yield name, 1 if leaf == "weight" else None


def _make_plain(model: Any, path: str, cut: Cut, made: dict[int, nn.Parameter]) -> None:
    module = model.get_submodule(path)
    module.__dict__.pop("forward", None)
    for leaf, parameter in module._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in made:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            is_elsewhere = cut.axes.get(f"{path}.{leaf}", 0) is None and cut.group.rank > 0
            local = torch.zeros_like(local) if is_elsewhere else local
            made[id(parameter)] = nn.Parameter(local.detach(), requires_grad=False)
        module._parameters[leaf] = made[id(parameter)]
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def _hook(model: Any, path: str, style: str, cut: Cut) -> None:
    module = model.get_submodule(path)
    if style == BY_ROWS:
        module.register_forward_hook(lambda module, args, output: added(output, cut.group))
    elif style == JOINED:
        width = cut.shapes[f"{path}.weight"][0]
        module.register_forward_hook(lambda module, args, output: joined(output, width, cut.group))
    elif style == LOOKED_UP:
        module.padding_idx = None  # it only affects gradients
        module.forward = looked_up(module, module.forward, cut.group)


def looked_up(
    module: Any, plain: Callable[[Tensor], Tensor], group: Ranks, add: Callable[[Tensor, Ranks], Tensor] = added
) -> Callable[[Tensor], Tensor]:
    """Return the forward of an embedding sharded by rows. `plain` looks up this rank's rows, `add` sums over ranks."""
    first, count = share(module.num_embeddings, group.rank, group.num_ranks)

    def forward(token_ids: Tensor) -> Tensor:
        places = token_ids - first
        is_here = (places >= 0) & (places < count)
        rows = plain(places.masked_fill(~is_here, 0))
        return add(rows.masked_fill(~is_here[..., None], 0.0), group)

    return forward


@contextmanager
def _on_its_only_device() -> Iterator[None]:
    """Select the only visible GPU, because transformers would select that of LOCAL_RANK."""
    told = os.environ.get("LOCAL_RANK")
    if torch.cuda.device_count() != 1 or told is None:
        yield
        return
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = told

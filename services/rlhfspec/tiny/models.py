"""Tiny models, made once and cached: `ensure()` returns folders that `from_pretrained` opens.

    target   4 x 256, 3.3M parameters; draft: 1 x 128, .3M
    wide     the target widened to 77M, with the memory traffic of a larger model
    library, library-draft, library-wide  the same for the text of Python's standard library
    sums     2 x 128, .5M, the start of the demo's training; sums-draft: 1 x 64. Both are shipped.

Folders are built elsewhere and renamed, so that they are always complete.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

from rlhfspec.common.folder_lock import locked
from rlhfspec.tiny.recipe import LIBRARY, RECIPES, TARGET_RECIPE, Recipe, cache_folder, make_in_cache
from rlhfspec.tiny.shipped import weights_of
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer
from rlhfspec.tiny.train import build, train

Report = Callable[[str], None]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModels:
    target: Path
    draft: Path
    wide: Path
    library: Path
    library_draft: Path
    library_wide: Path
    sums: Path
    sums_draft: Path


def ensure(*names: str, report: Report = print) -> TinyModels:
    """Make the missing models of `names` (default: all) and return the folders of all models."""
    for name in names or tuple(RECIPES):
        ensure_recipe(RECIPES[name], report)
    folders = {name.replace("-", "_"): cache_folder() / recipe.folder_name for name, recipe in RECIPES.items()}
    return TinyModels(**folders)


def ensure_recipe(recipe: Recipe, report: Report = print) -> Path:
    folder = cache_folder() / recipe.folder_name
    if folder.exists():
        return folder
    make_in_cache(folder.parent)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():  # another process may have made it meanwhile
            _make(recipe, folder, report)
    return folder


def widened(model: LlamaForCausalLM, intermediate_size: int, *, seed: int) -> LlamaForCausalLM:
    """Return a model of the same function with wider FFNs: random gate and up columns, zero down columns.

    Logits differ only by summation order, and are equal if columns are summed in ascending order.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = copy.deepcopy(model)
    wide.config.intermediate_size = intermediate_size
    for layer in wide.model.layers:
        mlp = layer.mlp
        extra = intermediate_size - mlp.intermediate_size
        mlp.intermediate_size = intermediate_size
        for linear in (mlp.gate_proj, mlp.up_proj):  # weight [intermediate, hidden]
            noise = torch.randn(extra, linear.in_features, generator=generator) * linear.weight.detach().std()
            linear.weight = nn.Parameter(torch.cat([linear.weight.detach(), noise.to(linear.weight.dtype)]))
            linear.out_features = intermediate_size
        down = mlp.down_proj  # weight [hidden, intermediate]
        zeros = down.weight.new_zeros(down.out_features, extra)
        down.weight = nn.Parameter(torch.cat([down.weight.detach(), zeros], dim=1))
        down.in_features = intermediate_size
    return wide


def perturbed(model: AnyModule, scale: float, *, seed: int = 0) -> AnyModule:
    """Return a copy with noise on weight matrices, `scale` times the standard deviation of each matrix."""
    generator = torch.Generator().manual_seed(seed)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((scale * parameter.std() * noise).to(parameter.dtype))
    return changed


def _make(recipe: Recipe, folder: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model = _model(recipe, report)
        made = Path(scratch) / folder.name
        model.to(torch.bfloat16).save_pretrained(made)  # type: ignore[arg-type]
        hugging_face_tokenizer().save_pretrained(made)
        shutil.move(made, folder)
    report(f"{recipe.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters in {folder}")


def _model(recipe: Recipe, report: Report) -> LlamaForCausalLM:
    if (weights := weights_of(recipe)) is not None:
        model = build(recipe, seed=recipe.seed)
        model.load_state_dict(load_file(weights))
        return model
    if recipe.widened_from_intermediate is None:
        return train(recipe, report)
    narrow_recipe = LIBRARY if recipe.task == "library" else TARGET_RECIPE
    narrow_recipe = replace(narrow_recipe, intermediate_size=recipe.widened_from_intermediate)
    narrow = build(narrow_recipe, seed=0)
    narrow_folder = ensure_recipe(narrow_recipe, report)
    trained = LlamaForCausalLM.from_pretrained(narrow_folder, dtype=torch.float32)
    narrow.load_state_dict(trained.state_dict())
    return widened(narrow, recipe.intermediate_size, seed=recipe.seed)

"""Trained weights in the package, equal on every machine. `python -m rlhfspec.tiny.shipped` retrains them."""

from __future__ import annotations

from pathlib import Path

from rlhfspec.tiny.recipe import RECIPES, Recipe

NAMES = ("sums", "sums-draft")
_FOLDER = Path(__file__).parent / "weights"


def weights_of(recipe: Recipe) -> Path | None:
    """Return the file with the recipe's bfloat16 weights, or None if it is not shipped."""
    file = _FOLDER / f"{recipe.folder_name}.safetensors"
    return file if file.exists() else None


def _train() -> None:
    import torch
    from safetensors.torch import save_file

    from rlhfspec.tiny.train import train

    _FOLDER.mkdir(exist_ok=True)
    for recipe in (RECIPES[name] for name in NAMES):
        state = {name: tensor.to(torch.bfloat16) for name, tensor in train(recipe, print).state_dict().items()}
        save_file(state, _FOLDER / f"{recipe.folder_name}.safetensors")


if __name__ == "__main__":
    _train()

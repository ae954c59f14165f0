"""Models for the benchmark's own tests."""

from pathlib import Path

from rlhfspec.tiny import models as tiny_models


def untrained_pair_in(folder: Path) -> tiny_models.TinyModels:
    from rlhfspec.tiny.recipe import Recipe
    from rlhfspec.tiny.tokenizer import hugging_face_tokenizer
    from rlhfspec.tiny.train import build

    for name, num_layers in (("target", 2), ("draft", 1)):
        recipe = Recipe(
            name=name, num_layers=num_layers, hidden_size=64, intermediate_size=96, num_heads=2, num_steps=0
        )
        build(recipe, seed=1).save_pretrained(folder / name)
        hugging_face_tokenizer().save_pretrained(folder / name)
    target, draft = folder / "target", folder / "draft"
    names = ("target", "wide", "library", "library_wide", "sums")
    folders = dict.fromkeys(names, target) | dict.fromkeys(("draft", "library_draft", "sums_draft"), draft)
    return tiny_models.TinyModels(**folders)

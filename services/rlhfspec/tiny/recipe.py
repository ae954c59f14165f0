"""Torch-free recipes of tiny models. A recipe's hash names its cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rlhfspec.errors import StorageError
from rlhfspec.tiny import corpus, library, sums
from rlhfspec.tiny.tokenizer import VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Byte-level Llama and its training.

    `batch_shapes`: (sequences, tokens per sequence), used in turn. `widened_from_intermediate`: FFN width before
    widening.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_steps: int
    batch_shapes: tuple[tuple[int, int], ...] = ((16, 128), (16, 128), (16, 128), (2, 1024))
    learning_rate: float = 6e-3
    corpus_tokens: int = 1_500_000
    seed: int = 1
    vocab_size: int = VOCAB_SIZE
    widened_from_intermediate: int | None = None
    task: Literal["english", "library", "sums"] = "english"

    @property
    def folder_name(self) -> str:
        """Return the cache folder's name, which changes with any field and the corpus."""
        fields = asdict(self)
        fields.pop("task")  # implied by its text
        text_of = {"english": corpus.documents, "library": library.documents, "sums": sums.lesson_texts}
        texts = text_of[self.task](64, seed=self.seed)
        content = json.dumps([fields, texts])
        return f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


TARGET_RECIPE = Recipe(name="target", num_layers=4, hidden_size=256, intermediate_size=704, num_heads=4, num_steps=280)
DRAFT = Recipe(
    name="draft", num_layers=1, hidden_size=128, intermediate_size=384, num_heads=2, num_steps=260, learning_rate=1e-2
)
WIDE = replace(
    TARGET_RECIPE, name="wide", intermediate_size=24576, widened_from_intermediate=TARGET_RECIPE.intermediate_size
)
LIBRARY = replace(TARGET_RECIPE, name="library", num_steps=400, task="library")
LIBRARY_DRAFT = replace(DRAFT, name="library-draft", num_steps=180, task="library")
LIBRARY_WIDE = replace(WIDE, name="library-wide", num_steps=LIBRARY.num_steps, task="library")
SUMS = Recipe(
    name="sums", num_layers=2, hidden_size=128, intermediate_size=384, num_heads=4, num_steps=560, learning_rate=1e-2,
    task="sums",
)  # fmt: skip
SUMS_DRAFT = Recipe(
    name="sums-draft", num_layers=1, hidden_size=64, intermediate_size=160, num_heads=2, num_steps=300,
    learning_rate=1.5e-2, task="sums",
)  # fmt: skip
RECIPES = {
    recipe.name: recipe
    for recipe in (TARGET_RECIPE, DRAFT, WIDE, LIBRARY, LIBRARY_DRAFT, LIBRARY_WIDE, SUMS, SUMS_DRAFT)
}


def cache_folder() -> Path:
    """Return `$RLHFSPEC_CACHE/models`, by default `~/.cache/rlhfspec/models`."""
    try:
        return Path(os.environ.get("RLHFSPEC_CACHE", "~/.cache/rlhfspec")).expanduser() / "models"
    except RuntimeError:  # neither HOME nor an entry of this user
        raise StorageError("~/.cache/rlhfspec", "this user has no home folder: set RLHFSPEC_CACHE") from None


def make_in_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be created: {error.strerror} (set RLHFSPEC_CACHE to another folder)"
        raise StorageError(folder, problem) from error

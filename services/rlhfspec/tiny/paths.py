"""Models and data that a job names and this machine makes. Torch is imported only to make a model.

    tiny:sums, tiny:sums-draft, tiny:target, ...   folders of models
    tiny:sums.jsonl, tiny:held-out-sums.jsonl      disjoint data, with the columns prompt and answer
    smollm2                                        a pretrained model (`rlhfspec.tiny.smollm2`)
    reasoning-gym:chain_sum, ...                   tasks as data (`rlhfspec.tiny.reasoning`)

Files are written elsewhere and renamed, so that they are always complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import reasoning, smollm2, sums
from rlhfspec.tiny.recipe import RECIPES, cache_folder, make_in_cache

TINY_PREFIX = "tiny:"
TRAINING, HELD_OUT = "sums.jsonl", "held-out-sums.jsonl"
DATA = {TRAINING: (2000, 11), HELD_OUT: (64, 12)}  # rows and seed


def check(path: str) -> None:
    """Raise InvalidRequest if no model or data has that name."""
    if path == smollm2.SMOLLM2:
        return smollm2.check()
    if path.startswith(reasoning.PREFIX):
        return reasoning.check(path)
    known = sorted([*RECIPES, *DATA])
    if path.removeprefix(TINY_PREFIX) not in known or not path.startswith(TINY_PREFIX):
        raise InvalidRequest("path", path, f"must be {TINY_PREFIX} followed by one of {', '.join(known)}")


def resolve(path: str, report: Callable[[str], None] = print) -> str:
    """Return the path of the model or data, made first if missing."""
    if path == smollm2.SMOLLM2:
        return str(smollm2.ensure(report))
    if path.startswith(reasoning.PREFIX):
        return str(reasoning.ensure(path))
    check(path)
    name = path.removeprefix(TINY_PREFIX)
    return str(_data(name) if name in DATA else _model(name, report))


def model_folder(path: str) -> Path | None:
    if path == smollm2.SMOLLM2:
        return smollm2.folder()
    recipe = RECIPES.get(path.removeprefix(TINY_PREFIX)) if path.startswith(TINY_PREFIX) else None
    return None if recipe is None else cache_folder() / recipe.folder_name


def _model(name: str, report: Callable[[str], None]) -> Path:
    folder = cache_folder() / RECIPES[name].folder_name
    if not folder.exists():
        from rlhfspec.tiny.models import ensure_recipe

        ensure_recipe(RECIPES[name], report)
    return folder


def _data(name: str) -> Path:
    count, seed = DATA[name]
    file = cache_folder().parent / "data" / name
    make_in_cache(file.parent)
    scratch = file.with_suffix(f".{secrets.token_hex(8)}")  # not the pid, which is equal in containers
    without = sums.rows(*DATA[TRAINING]) if name == HELD_OUT else ()
    scratch.write_text(sums.jsonl(count, seed, without=without))
    scratch.replace(file)
    return file

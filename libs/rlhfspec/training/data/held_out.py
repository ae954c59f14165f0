"""Rows that are never trained on, for evaluations.

Example:
    >>> rows = Rows(source="sums", records=[{"prompt": f"{number}+1="} for number in range(9)])
    >>> training, held_out = split(rows, 3, seed=11)
    >>> len(training), len(held_out)
    (6, 3)
    >>> {row["prompt"] for row in training.records} & {row["prompt"] for row in held_out.records}
    set()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Spec
from rlhfspec.training.data.order import permutation
from rlhfspec.training.data.rows import Rows, load_rows


def held_out_of(rows: Rows, spec: Spec, base_folder: Path) -> tuple[Rows, Rows]:
    """What is trained on, and what is not."""
    assert spec.evaluation is not None
    if spec.evaluation.path is not None:
        return rows, load_rows(spec.dataset.model_copy(update={"path": spec.evaluation.path}), base_folder)
    count = spec.evaluation.num_prompts
    if count >= len(rows):
        problem = f"must be < {len(rows)}, the rows of the dataset that they are taken out of; or give evaluation.path"
        raise InvalidRequest("spec.evaluation.numPrompts", count, problem)
    return split(rows, count, spec.training.seed)


def split(rows: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """So many rows, drawn by the seed, are taken out; both parts stay in the order of the data."""
    taken = set(permutation(seed, "held-out", len(rows))[:count].tolist())
    kept = [index for index in range(len(rows)) if index not in taken]
    return _some(rows, kept), _some(rows, sorted(taken))


def _some(rows: Rows, indices: Sequence[int]) -> Rows:
    return Rows(
        source=rows.source,
        records=[rows.records[index] for index in indices],
        lines=[rows.lines[index] for index in indices] if rows.lines else (),
    )

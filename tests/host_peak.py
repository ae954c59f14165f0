"""Script of test_host_peak.py: loads a model as a role does and prints peak memory. argv: role, folder."""

import sys
from pathlib import Path
from typing import Any

from peaks import peak_above

from rlhfspec import job
from rlhfspec.engine import Engine
from rlhfspec.training.modeling.loading import load_policy, load_reference


def load(role: str, folder: Path) -> Any:
    path, options = str(folder), {"max_context": 128}
    if role == "engine":
        return Engine.from_pretrained(folder, dtype="bfloat16", speculation="off", profile=False, max_context=128)
    if role == "policy":
        return load_policy(job.Model(path=path, dtype="bfloat16"), **options)
    if role == "policy of a GPU":
        return load_policy(job.Model(path=path), stored=True, **options)
    return load_reference(job.Model(path=path), stored=True, **options)


if __name__ == "__main__":
    kept: list[Any] = []
    print(peak_above(lambda: kept.append(load(sys.argv[1], Path(sys.argv[2])))))

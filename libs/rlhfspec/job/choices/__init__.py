"""Tables of a job's choices by name, with the import paths of their implementations."""

from __future__ import annotations

from typing import Any

from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.choices.drafters import DRAFTERS
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.choices.links import LINKS
from rlhfspec.job.choices.registry import Registry

CHOICES: tuple[Registry[Any], ...] = (ALGORITHMS, DRAFTERS, ENGINES, LINKS)

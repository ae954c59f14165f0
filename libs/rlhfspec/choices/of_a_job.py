"""All tables that a job chooses from."""

from __future__ import annotations

from typing import Any

from rlhfspec.choices.algorithms import ALGORITHMS
from rlhfspec.choices.drafters import DRAFTERS
from rlhfspec.choices.engines import ENGINES
from rlhfspec.choices.links import LINKS
from rlhfspec.choices.registry import Registry

CHOICES: tuple[Registry[Any], ...] = (ALGORITHMS, DRAFTERS, ENGINES, LINKS)

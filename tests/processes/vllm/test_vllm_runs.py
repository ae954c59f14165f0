"""Small runs with the engine `vllm`: the samples are those of our own engine, in one process and in several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_job import a_job_file

"""Reading, checking and writing of job files. The schema is `rlhfspec.job`."""

from rlhfspec.job.file.paths import resolve
from rlhfspec.job.file.reading import read_job

__all__ = ["read_job", "resolve"]

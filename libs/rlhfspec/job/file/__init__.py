"""Job files: reading, checking and writing them. The schema itself is `rlhfspec.job`.

Example:
    >>> from rlhfspec.job.file import read_job, resolve
    >>> read_job.__name__, resolve.__name__
    ('read_job', 'resolve')
"""

from rlhfspec.job.file.paths import resolve
from rlhfspec.job.file.reading import read_job

__all__ = ["read_job", "resolve"]

"""When a worker counts as silent: the same for the view, `rlhfspec top`, the dashboard, and control's report.

A worker that has nothing to do beats every two seconds (`rlhfspec.stage.pace`), so silence is no accident: its event
loop is dead, it is stopped, or the server between is away.

Example:
    >>> is_silent(15.0), is_silent(15.1)
    (False, True)
"""

from __future__ import annotations

SILENT_SECONDS = 15.0


def is_silent(seconds: float) -> bool:
    """Return whether a worker that was last heard so many seconds ago is silent."""
    return seconds > SILENT_SECONDS

"""Rules on contradictions within a job, written once for `rlhfspec` and for an API server."""

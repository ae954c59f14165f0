"""Decisions about a job, as pure functions."""

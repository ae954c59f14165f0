"""Watches, cache, work queue and reconciles of jobs."""

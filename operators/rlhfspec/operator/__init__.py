"""Operator: turns RLHFJobs into pods, and their events into conditions."""

"""Estimate of a job's GPU memory from its models' configurations, before a weight is read."""

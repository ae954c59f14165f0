"""Estimate of a job's GPU memory from model configurations alone."""

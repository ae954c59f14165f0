"""Checks a job and makes its run folder, before anything else of it starts in a cluster."""

"""Preparation of a run in a cluster: checks the job and makes its run folder."""

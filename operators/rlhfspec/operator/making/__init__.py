"""Manifests of a job's pods, mounted objects, and scheduler objects."""

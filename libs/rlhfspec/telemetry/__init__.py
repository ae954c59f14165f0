"""Tracing and metrics of a run, written to its folder and exported by OTLP."""

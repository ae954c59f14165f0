"""Tracing and metrics: one trace per sample over all processes, written to the run folder and exported by OTLP."""

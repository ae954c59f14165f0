"""The generating stage: samples every prompt on the engine."""

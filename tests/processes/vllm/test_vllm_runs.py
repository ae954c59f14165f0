"""Small runs with the engine `vllm`: the samples are those of our own engine, in one process and in several."""

from __future__ import annotations

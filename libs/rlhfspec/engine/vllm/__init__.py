"""vLLM engine in a child process with its own interpreter (docs/generation.md#engine-vllm)."""

import struct

LENGTHS = struct.Struct("<II")  # header of an answer: the byte lengths of its JSON and arrays

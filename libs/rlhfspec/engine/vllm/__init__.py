"""vLLM under the law, in a child process with its own interpreter (docs/generation.md#engine-vllm)."""

import struct

LENGTHS = struct.Struct("<II")  # an answer begins with the bytes of its two parts, JSON and arrays

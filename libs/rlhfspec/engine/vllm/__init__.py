"""The engine `vllm`: vLLM under the law, in a child process with its own interpreter (docs/engines.md). `client.py` is
the torch-free engine, `process.py` the child process; `inside/` runs under vLLM's interpreter."""

import struct

LENGTHS = struct.Struct("<II")  # an answer begins with the bytes of its two parts, JSON and arrays

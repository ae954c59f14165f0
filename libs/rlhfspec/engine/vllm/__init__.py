"""The engine `vllm`: vLLM under the law, in a child process under its own interpreter (docs/engines.md).

`client.py` is the engine, torch-free; `sequence.py` what it knows of a sequence; `process.py` the child, as seen from
here; `inside/` is what runs under vLLM's interpreter and imports, of ours, the kernels and the slow decoder.
"""

import struct

LENGTHS = struct.Struct("<II")  # an answer of the child begins with the bytes of its two parts, JSON and arrays

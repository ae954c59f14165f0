"""Migration of in-flight sequences with their KV cache between running generators (docs/moving.md)."""

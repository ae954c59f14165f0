"""Code in vLLM's interpreter. It imports only vllm, torch, the kernels and the oracle."""

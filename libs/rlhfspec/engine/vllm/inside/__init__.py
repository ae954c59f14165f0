"""What runs under vLLM's interpreter: it imports vllm and torch, and of ours the kernels and the slow decoder."""

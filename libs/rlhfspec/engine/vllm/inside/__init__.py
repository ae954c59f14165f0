"""What runs under vLLM's interpreter: it imports vllm, torch and numpy, and of ours the kernels and the slow decoder."""

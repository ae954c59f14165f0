"""Code under vLLM's interpreter: it imports vllm, torch, our kernels and the slow decoder only."""

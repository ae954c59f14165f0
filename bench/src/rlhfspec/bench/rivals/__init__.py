"""Benchmark workers in processes of their own, some under another Python.

`serve.py` and `vllm_worker.py` import nothing of this package, so that environments without it can run them.
"""

"""Workers of the benchmark that run in processes of their own, some under another Python.

`serve.py` and `vllm_worker.py` are plain files: they import nothing of this package, so that the Python of a virtual
environment without it can run them.
"""

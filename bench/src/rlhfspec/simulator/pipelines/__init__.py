"""Simulated pipelines that train actor and critic on the same stages; the trainer has no pipeline parallelism yet."""

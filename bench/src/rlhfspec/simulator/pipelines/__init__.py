"""Schedules of pipelines that train an actor and a critic on the same stages. Pure, and simulated only: the trainer has
no pipeline parallelism yet."""

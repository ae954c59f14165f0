"""`rlhfspec bench`, `models` and `simulate`, found by their entry points (bench/pyproject.toml)."""

"""Process of a stage's worker: start, connections, health, weights, and exit."""

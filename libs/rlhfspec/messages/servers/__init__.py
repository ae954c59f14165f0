"""NATS and Redis of a run with processes, their credentials, and the cleanup after a dead supervisor."""

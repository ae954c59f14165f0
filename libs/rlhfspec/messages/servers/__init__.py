"""NATS and Redis servers of a run, their credentials and their cleanup."""

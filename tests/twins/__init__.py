"""Slow twins that only tests run; a twin that a command runs lies beside its fast path."""

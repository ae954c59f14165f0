"""Slow, obvious twins of fast paths that only tests run. A twin that a command runs too lies beside the fast path."""

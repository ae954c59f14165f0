"""Small utilities for all packages: arrays, locks, clocks, ranks, the object store."""

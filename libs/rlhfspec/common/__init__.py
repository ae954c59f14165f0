"""Small things that every floor above may use: arrays, locks, clocks, ranks, the object store."""

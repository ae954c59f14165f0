"""The supervisor of a run on one machine: starts, watches and cleans up its processes and servers."""

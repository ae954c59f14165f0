"""The supervisor of a run on one machine: starts its processes and servers, watches over them, and cleans up."""

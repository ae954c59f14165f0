"""kubectl-rlhf: kubectl plugin to inspect and control jobs."""

"""kubectl-rlhf: what a person asks about a job in a cluster."""

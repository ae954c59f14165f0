"""What contradicts itself in a job, once for a machine of one's own and for an API server."""

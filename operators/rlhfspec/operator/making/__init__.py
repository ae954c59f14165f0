"""What a job is made of: pods and what stands beside them, and the objects by which others let them run."""

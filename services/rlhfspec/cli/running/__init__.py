"""What `rlhfspec run` starts: all stages in one process, or a process each."""

"""What a job takes of its GPUs, by arithmetic: from configurations of models alone, before a weight is read."""

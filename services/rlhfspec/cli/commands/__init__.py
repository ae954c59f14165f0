"""One module for each command of `rlhfspec`."""

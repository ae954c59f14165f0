"""A module for each command of `rlhfspec`."""

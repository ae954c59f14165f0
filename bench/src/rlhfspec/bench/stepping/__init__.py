"""`rlhfspec bench step`: a whole training step against TRL's."""

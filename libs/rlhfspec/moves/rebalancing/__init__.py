"""Which sequences should go on elsewhere, and when that pays: numpy only, pure."""

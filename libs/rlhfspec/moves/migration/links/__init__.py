"""Links that carry the bytes of a moving sequence between processes."""

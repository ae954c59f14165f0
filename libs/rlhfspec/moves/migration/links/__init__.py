"""How the bytes of a moving sequence get from one process to another."""

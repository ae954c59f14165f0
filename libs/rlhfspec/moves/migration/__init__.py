"""In-flight sequences go from one generator to another, with their KV, while both run (docs/moves.md)."""

"""Check that all model classes of transformers and their variants are bit-exact, or refused by name."""

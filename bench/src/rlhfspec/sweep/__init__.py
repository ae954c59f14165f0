"""Check of all model classes of transformers and variants: right in every bit, or refused by name."""

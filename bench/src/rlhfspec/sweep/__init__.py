"""Every class of model that transformers knows, and its variants: right in every bit, or refused by name."""

"""Proof at load that the engine runs the same model as Hugging Face."""

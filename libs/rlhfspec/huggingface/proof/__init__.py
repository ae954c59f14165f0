"""The proof at load that the engine runs the model that Hugging Face runs."""

"""Our kernels under an unmodified Hugging Face model, and guards that keep a row's bits its own."""

"""Our kernels under an unmodified Hugging Face model, and what keeps a row's bits its own."""

"""Models from Hugging Face under our kernels, and tiny ones to test and demonstrate with."""

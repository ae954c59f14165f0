"""Training on scored samples. Tensors hold n samples in id order, or their T response tokens (`[T]`)."""

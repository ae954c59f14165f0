"""Says which samples go on at another generator, from what generators say of themselves."""

"""Models of the trainer, reference and critic."""

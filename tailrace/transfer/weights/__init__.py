"""New weights from the trainer to the engines."""

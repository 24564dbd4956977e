"""One file per way to run the trainer."""

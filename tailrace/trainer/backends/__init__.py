"""The ways to run the trainer, one file each."""

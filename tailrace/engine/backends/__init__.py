"""Engine implementations, one per file."""

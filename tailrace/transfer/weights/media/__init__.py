"""What weights travel through."""

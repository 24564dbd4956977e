"""What moves between tasks: rows of the transfer queue."""

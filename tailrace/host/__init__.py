"""What Tailrace asks of its machine and its process: cores, memory, signals, streams, places for files."""

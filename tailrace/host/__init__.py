"""Access to the machine and the process: cores, memory, signals, streams, places for files."""

"""Which ready rows a task is handed next: one policy a module."""

"""The storage unit: a process that keeps the cells of rows and hands them to clients."""

"""The ranks of an engine: in this process, or in rank processes."""

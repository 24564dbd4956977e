"""The transfer queue of one event loop, for colocated runs and tests."""

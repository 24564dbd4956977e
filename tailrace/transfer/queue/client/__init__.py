"""Clients of a queue across processes."""

"""Algorithms: a table of tasks each, and pure functions for advantages and losses."""

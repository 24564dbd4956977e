"""Algorithms: each is a table of tasks, with pure functions for advantages and losses."""

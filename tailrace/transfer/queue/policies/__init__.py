"""Policies: the rules by which a task chooses among its ready rows, one in each module."""

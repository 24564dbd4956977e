"""Weights to all engines at once, by a process group."""

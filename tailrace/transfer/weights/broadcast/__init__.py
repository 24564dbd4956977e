"""Broadcasts of weights to all engines at once, by a process group."""

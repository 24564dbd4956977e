"""Changing TP while sequences are in flight."""

"""Decisions over plain numbers, without torch, processes or clocks."""

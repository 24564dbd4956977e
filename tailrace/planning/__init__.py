"""Decisions from plain numbers, without torch, processes or clocks."""

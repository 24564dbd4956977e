"""Runs parts of Tailrace, as they are, in virtual time.

clock    an event loop whose time jumps to the next timer
engine   an engine without a model whose steps take the time that a step costs
"""

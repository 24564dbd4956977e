"""Prompt sources: problems in, tokenized prompts out, in a seeded order. Imports no torch."""

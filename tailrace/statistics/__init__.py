"""Figures about numbers, for all who plan or describe. They import nothing of Tailrace.

attempts   what several answers to a prompt are worth: pass@k, maj@k
intervals  how far a figure may be off
ranking    how well a prediction finds the greatest values
spans      spans of time that overlap
"""

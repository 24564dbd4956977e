"""Figures about numbers, for all who plan or describe. They import nothing of Tailrace.

ranking   how well a prediction finds the greatest values
spans     spans of time that overlap
"""

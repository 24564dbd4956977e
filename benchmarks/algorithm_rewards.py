"""Reward functions that the small model of bench_algorithms.py learns within a few steps."""


def digits(response: str) -> float:
    """The share of a response's characters that are digits."""
    return sum(character.isdecimal() for character in response) / max(len(response), 1)


def digit_first(response: str) -> float:
    """1 if the first character is a digit, else 0: MaxRL is for such rewards."""
    return float(response[:1].isdecimal())

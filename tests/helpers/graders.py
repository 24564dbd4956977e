"""Reward functions that tests name by dotted path."""

from typing import Any


def digit_fraction(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """The share of a response's characters that are digits."""
    return sum(character in "0123456789" for character in response) / max(len(response), 1)


def fails_on_even_length(response: str, answer: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Raise for responses of even length."""
    if len(response) % 2 == 0:
        raise ArithmeticError("even")
    return digit_fraction(response, answer, prompt, metadata)


def undefined(response: str, answer: Any) -> float:
    """Use a name that is not defined."""
    return float(response == answr)  # type: ignore[name-defined]  # noqa: F821


def brevity(tokens: list[int]) -> dict[str, float]:
    """Less than 1 for long responses; says that those of fewer than 12 tokens are right."""
    return {"reward": 1 / (1 + len(tokens)), "correct": len(tokens) < 12, "tokens": len(tokens)}


def one_in_four(response: str, answer: Any) -> float:
    """1 for about a quarter of all responses, whatever they say."""
    return float(sum(map(ord, response)) % 4 == 0)

"""Functions that grade all responses of a group together."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any


def rank(responses: list[str], answer: Any, metadata: dict[str, Any]) -> list[float]:
    """The place of each response by its length, the shortest first; the answer and the metadata are the prompt's."""
    assert (answer, metadata) == ("a", {"k": [1]})
    order = sorted(range(len(responses)), key=lambda place: len(responses[place]))
    return [float(order.index(place)) for place in range(len(responses))]


async def rank_later(responses: list[str]) -> list[float]:
    """The number of responses that are as long, after a while."""
    await asyncio.sleep(0)
    return [float(sum(len(other) == len(own) for other in responses)) for own in responses]


def shares(tokens: list[list[int]], finish_reasons: list[str], prompt: str, question: Any) -> list[Any]:
    """The part of the group's tokens that each response has, and whether it has stopped."""
    total = sum(map(len, tokens))
    return [
        {"reward": len(own) / total, "correct": reason == "stop"}
        for own, reason in zip(tokens, finish_reasons, strict=True)
    ]


def act(responses: list[str]) -> Any:
    """Do as the first response says; by default give None, NaN, a list and a number."""
    deeds: dict[str, Any] = {
        "too few": lambda: [1.0],
        "none": lambda: None,
        "a number": lambda: 1.0,
        "text": lambda: "1111",
        "a mapping": lambda: {"reward": 1.0},
        "divide": lambda: 1 / 0,
        "loop": loop,
        "die": lambda: os._exit(3),
        "an array": array,
    }
    return deeds.get(responses[0], lambda: [None, float("nan"), [1.0], 0.5])()


def array() -> Any:
    """The numbers from 0 to 3."""
    import numpy as np

    return np.arange(4.0)


def loop() -> None:
    """Loop without end."""
    while True:
        pass


def wants_one(response: str) -> list[float]:
    """A function of one response."""
    return [float(len(response))]


def digits_above_mean(responses: Sequence[str]) -> list[dict[str, float]]:
    """The digits of each response, less the mean of the group."""
    digits = [sum(character in "0123456789" for character in text) for text in responses]
    mean = sum(digits) / len(digits)
    return [{"reward": own - mean, "size": len(responses)} for own in digits]

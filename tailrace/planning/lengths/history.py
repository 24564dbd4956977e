"""Lengths from a prompt's own past, and from samples of its group that have finished.

Both are responses to the same prompt, and the newest ones count most.
"""

import math
from collections.abc import Sequence

import msgspec

from tailrace.planning.lengths.base import UNKNOWN, Asked, Expectation, Finished
from tailrace.planning.lengths.effects import Effects, EffectsState


class History:
    """A prompt's responses in epochs before, newer ones first in weight."""

    name = "history"
    knowledge = "responses to the same prompts"
    scouts = False
    tells_samples_apart = False

    def __init__(self, *, discount: float = 0.98) -> None:
        """`discount`: see `Effects`."""
        self._effects = Effects(discount=discount)

    def prepare(self, prompts: Sequence[Asked]) -> None:
        """See `LengthPredictor`; it needs nothing."""

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`."""
        return self._effects.knows(prompt.prompt_id)

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`."""
        return [Expectation.of(*(self._effects.expect(prompt.prompt_id) or UNKNOWN)) for prompt in prompts]

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """See `LengthPredictor`."""
        return Expectation.of(*(self._effects.expect(prompt.prompt_id, beside=math.log(tokens)) or UNKNOWN))

    def learn(self, finished: Sequence[Finished]) -> None:
        """See `LengthPredictor`."""
        for response in finished:
            self._effects.add(response.asked.prompt_id, math.log(response.tokens), response.version)

    def state(self) -> bytes:
        """See `LengthPredictor`."""
        return msgspec.msgpack.encode(self._effects.state())

    def restore(self, state: bytes) -> None:
        """See `LengthPredictor`."""
        self._effects.restore(msgspec.msgpack.decode(state, type=EffectsState))  # its error is a ValueError


class Siblings(History):
    """The same, with one sample of each group run first: its length tells that of the others (PolyTrace, section 3.1).

    It knows something from the first step on, and pays for it: the others of a group wait for the first one, unless
    their prompt has a past.
    """

    name = "siblings"
    scouts = True

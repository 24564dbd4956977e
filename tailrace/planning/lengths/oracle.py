"""Lengths that are known: those of the trace that is played."""

from collections.abc import Sequence

from tailrace.planning.lengths.base import Asked, Expectation, Finished


class Oracle:
    """Knows each response's length: the bound of what any prediction can gain."""

    name = "oracle"
    knowledge = "nothing"
    scouts = False
    tells_samples_apart = True

    def prepare(self, prompts: Sequence[Asked]) -> None:
        """See `LengthPredictor`; it needs nothing."""

    def knows(self, prompt: Asked) -> bool:
        """See `LengthPredictor`."""
        return prompt.forced is not None

    def expect(self, prompts: Sequence[Asked]) -> list[Expectation]:
        """See `LengthPredictor`.

        Raises:
            ValueError: a prompt has no forced length.
        """
        return [Expectation(*[_forced(prompt)] * 3) for prompt in prompts]

    def suppose(self, prompt: Asked, tokens: float) -> Expectation:
        """See `LengthPredictor`. It knows the length already."""
        return self.expect([prompt])[0]

    def learn(self, finished: Sequence[Finished]) -> None:
        """See `LengthPredictor`; there is nothing to learn."""

    def state(self) -> bytes:
        """See `LengthPredictor`."""
        return b""

    def restore(self, state: bytes) -> None:
        """See `LengthPredictor`."""


def _forced(prompt: Asked) -> float:
    if prompt.forced is None:
        raise ValueError(f"prompt {prompt.prompt_id} has no forced length; an oracle is for a trace that is played")
    return float(prompt.forced)

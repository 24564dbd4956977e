"""Runs an operation, answer by answer."""

from typing import Any

from tailrace.errors import TailraceError
from tailrace.transfer.queue.wire.calls import Operation, Outcome, Step
from tailrace.transfer.queue.wire.frames import Buffer, Reply
from tailrace.transfer.queue.wire.messages import Answer


class Play:
    """An operation as far as it has come."""

    def __init__(self, operation: Operation[Any]) -> None:
        self._operation = operation
        self.step = Step([])
        """Those calls wait for their answers."""
        self.result: Any = None
        self._heard: dict[int, Outcome] = {}
        self._go(None)

    def asked(self) -> list[tuple[str, type]]:
        """Who is asked what."""
        return [(call.to, type(call.message)) for call in self.step.calls]

    def answer(self, *answers: Answer | TailraceError, frames: tuple[Buffer, ...] = ()) -> None:
        """To each call, one after the other; all come with `frames`."""
        assert len(answers) == len(self.step.calls)
        outcomes = [answer if isinstance(answer, TailraceError) else Reply(answer, frames) for answer in answers]
        for place, outcome in enumerate(outcomes):
            self.step.heard(place, outcome)
        self._go(outcomes)

    def hear(self, place: int, answer: Answer) -> None:
        """To one call, while the others wait."""
        self._heard[place] = Reply(answer)
        self.step.heard(place, self._heard[place])

    def answer_rest(self, *answers: Answer) -> None:
        """To each call that has none, one after the other."""
        left = [place for place in range(len(self.step.calls)) if place not in self._heard]
        for place, answer in zip(left, answers, strict=True):
            self.hear(place, answer)
        self._go([self._heard[place] for place in range(len(self.step.calls))])

    def _go(self, outcomes: list[Outcome] | None) -> None:
        self._heard = {}
        try:
            self.step = next(self._operation) if outcomes is None else self._operation.send(outcomes)
        except StopIteration as stop:
            self.step, self.result = Step([]), stop.value

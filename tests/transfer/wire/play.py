"""Operations run by hand, answer by answer."""

from typing import Any

from tailrace.errors import TailraceError
from tailrace.transfer.wire.calls import Operation, Outcome, Step
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.messages import Message


class Play:
    """An operation, run as far as its answers allow."""

    def __init__(self, operation: Operation[Any]) -> None:
        self._operation = operation
        self.step = Step([])
        """The calls that wait for their answers."""
        self.result: Any = None
        self._go(None)

    def asked(self) -> list[tuple[str, type]]:
        """The endpoint and message type of each waiting call."""
        return [(call.to, type(call.message)) for call in self.step.calls]

    def answer(self, *answers: Message | TailraceError, frames: tuple[Buffer, ...] = ()) -> None:
        """Answer each waiting call. All answers come with `frames`."""
        assert len(answers) == len(self.step.calls)
        self._go([answer if isinstance(answer, TailraceError) else Reply(answer, frames) for answer in answers])

    def _go(self, outcomes: list[Outcome] | None) -> None:
        try:
            self.step = next(self._operation) if outcomes is None else self._operation.send(outcomes)
        except StopIteration as stop:
            self.step, self.result = Step([]), stop.value
        self.step.meanwhile()

"""A receiver's connection to its sender: it receives plans, and sends reports and requests for turns.

    connect ──GetPlan──▶ sender ──Plan──▶ ReceiverService.follow, GetPlan again
       ▲                    └──closed, silent──▶ ReceiverService.sender_lost
       └──────────────────────after retry_s─────────┘

Waiting: GetPlan waits at the sender until the plan changes, so it is also the sign of life in both directions. The
connection to a lost sender is tried again for ever; callers that wait for weights get an error meanwhile.
"""

from typing import TYPE_CHECKING

from tailrace.errors import SenderLost, TailraceError
from tailrace.transfer.weights.address import WeightsAddress, endpoint_towards
from tailrace.transfer.weights.messages import (
    AnswerOrError,
    EndTurn,
    Leave,
    Plan,
    ReportParent,
    ReportProgress,
    SenderClosed,
    TakeTurn,
    WeightsQuestion,
    ask,
)
from tailrace.transfer.wire.connection import Connection

if TYPE_CHECKING:
    from tailrace.transfer.weights.receiver_service import ReceiverService


class SenderConnection:
    """Connects to the sender, again and again. Used in the receiver's thread."""

    def __init__(self, service: "ReceiverService", address: WeightsAddress) -> None:
        """Connect at `connect`, not before. `service` is called with plans, and when the sender is lost.

        Raises:
            WeightsError: the sender cannot be reached from this host.
        """
        self._service = service
        self._endpoint = endpoint_towards(address.endpoints, address.host)
        self._link: Connection | None = None
        self.connect_at: float | None = None
        """The time to `connect` again, by the server's clock; None while there is a connection."""
        self._turns: set[str] = set()
        """The turns that are wanted or held."""

    def connect(self) -> None:
        """Connect for the first time, or again."""
        self.connect_at = None
        self._link = self._service.server.link(self._endpoint, peer="the sender of the weights")
        self._get_plan(0)
        for turn in self._turns:
            self._ask_for(turn)

    def report_progress(self) -> None:
        """Report this receiver's progress."""
        self._tell(ReportProgress(self._service.progress))

    def report_parent(self, parent: str) -> None:
        """Report that a parent does not answer. An empty name: this receiver cannot serve a version."""
        self._tell(ReportParent(parent))

    def leave(self) -> None:
        """Report that this receiver is closing."""
        self._tell(Leave())

    def take_turn(self, turn: str) -> None:
        """Ask for a turn, which lasts until `end_turn`. Once granted, it is in `ReceiverStatus.turns`."""
        self._turns.add(turn)
        self._ask_for(turn)

    def end_turn(self, turn: str) -> None:
        """Give a turn back, or withdraw the request for it."""
        self._turns.remove(turn)
        with self._service.status as status:
            status.turns.discard(turn)
        self._tell(EndTurn(turn))

    def lose(self, error: SenderLost) -> None:
        """Disconnect, and connect again after a while."""
        assert self._link is not None, "only what is connected can be lost"
        self._service.server.unlink(self._link)
        self._link = None
        self.connect_at = self._service.server.now + self._service.retry_s
        self._service.sender_lost(error)

    def _ask_for(self, turn: str) -> None:
        def answered(answer: AnswerOrError) -> None:
            if turn not in self._turns:
                self._tell(EndTurn(turn))  # the request was repeated after the turn had been given back
            elif not isinstance(answer, TailraceError):  # GetPlan notices a lost sender
                with self._service.status as status:
                    status.turns.add(turn)
                self._service.wakeups.notify()

        if self._link is not None:  # else `connect` asks
            ask(self._link, self._endpoint, TakeTurn(turn), answered, wait=True)

    def _get_plan(self, epoch: int) -> None:
        assert self._link is not None, "it is connected"
        ask(self._link, self._endpoint, self._service.plan_question(epoch), self._on_plan, wait=True)

    def _on_plan(self, answer: AnswerOrError) -> None:
        match answer:
            case (Plan() as plan, _):
                self._service.follow(plan)
                self._get_plan(plan.epoch)
                self._service.wakeups.notify()
            case (SenderClosed(), _):
                self.lose(SenderLost("the sender of the weights was closed"))
            case TailraceError() as error:
                self.lose(SenderLost(f"the sender of the weights is lost: {error}"))
            case _:
                self.lose(SenderLost("the sender of the weights answered something else"))

    def _tell(self, question: WeightsQuestion) -> None:
        """Send a message that needs no answer. Without a connection the sender notices by itself, as with a death."""
        if self._link is not None:
            ask(self._link, self._endpoint, question, lambda answer: None, wait=False)

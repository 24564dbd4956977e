"""A receiver's connection to its sender: plans come by it, and reports and requests for turns go.

    connect ──GetPlan──▶ sender ──Plan──▶ ReceiverService.follow, GetPlan again
       ▲                    └──closed, silent──▶ ReceiverService.sender_lost
       └──────────────────────after retry_s─────────┘

Who waits on whom: GetPlan waits at the sender until the plan changes, so it is also the sign of life in both
directions. A sender that is lost is tried again for ever; whoever waits for weights is told meanwhile.
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
    """Used in the receiver's thread."""

    def __init__(self, service: "ReceiverService", address: WeightsAddress) -> None:
        """Not connected before `connect`. `service` hears of plans, and of the sender's loss.

        Raises:
            WeightsError: the sender cannot be reached from this host.
        """
        self._service = service
        self._endpoint = endpoint_towards(address.endpoints, address.host)
        self._link: Connection | None = None
        self.connect_at: float | None = None
        """When to `connect` again, by the server's clock; None while there is a connection."""
        self._turns: set[str] = set()
        """Those that are wanted or had."""

    def connect(self) -> None:
        """Begin, or begin again."""
        self.connect_at = None
        self._link = self._service.server.link(self._endpoint, peer="the sender of the weights")
        self._get_plan(0)
        for turn in self._turns:
            self._ask_for(turn)

    def report_progress(self) -> None:
        """Tell how far this receiver is."""
        self._tell(ReportProgress(self._service.progress))

    def report_parent(self, parent: str) -> None:
        """Tell that a parent does not answer; an empty name: that this receiver cannot give a version."""
        self._tell(ReportParent(parent))

    def leave(self) -> None:
        """Tell that this receiver is closed."""
        self._tell(Leave())

    def take_turn(self, turn: str) -> None:
        """Ask for a turn; `ReceiverStatus.turns` has it when it is there. Until `end_turn`."""
        self._turns.add(turn)
        self._ask_for(turn)

    def end_turn(self, turn: str) -> None:
        """Give it back, or ask no more for it."""
        self._turns.remove(turn)
        with self._service.status as status:
            status.turns.discard(turn)
        self._tell(EndTurn(turn))

    def lose(self, error: SenderLost) -> None:
        """Hang up, and try again in a while."""
        assert self._link is not None, "only what is connected can be lost"
        self._service.server.unlink(self._link)
        self._link = None
        self.connect_at = self._service.server.now + self._service.retry_s
        self._service.sender_lost(error)

    def _ask_for(self, turn: str) -> None:
        def answered(answer: AnswerOrError) -> None:
            if turn not in self._turns:
                self._tell(EndTurn(turn))  # it was asked for again, after it had been given back
            elif not isinstance(answer, TailraceError):  # a sender that is lost shows by GetPlan
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
        """Ask what needs no answer. Without a connection the sender notices by itself, like a receiver's death."""
        if self._link is not None:
            ask(self._link, self._endpoint, question, lambda answer: None, wait=False)

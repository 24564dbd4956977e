"""A client's knowledge of the servers that it calls."""

from collections.abc import Set

from tailrace.transfer.wire.calls import Call, Outcome


class Peers:
    """Servers of which only the endpoints are known; a subclass knows more.

    A client reports the servers that are silent: they give no sign of life although it waits for them, see
    `Connection.is_silent`. It asks one question at a time. It counts the servers in `gone` as lost.
    """

    def name(self, endpoint: str) -> str:
        """The name of this server in error texts."""
        return "the server"

    def question(self, silent: Set[str]) -> Call | None:
        """The question to ask another server about these endpoints, if any is due. `hear` gets its outcome."""
        return None

    def hear(self, outcome: Outcome) -> None:
        """Take in the outcome of the question."""

    def gone(self, silent: Set[str]) -> Set[str]:
        """The endpoints among these that have turned out to have no server any more. Each answer says so once."""
        return set()

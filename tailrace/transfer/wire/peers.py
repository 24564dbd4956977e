"""What a client knows about the servers that it calls."""

from collections.abc import Set

from tailrace.transfer.wire.calls import Call, Outcome


class Peers:
    """Servers of which nothing is known but their endpoints; a subclass says more.

    A client passes on what it sees: servers are silent that give no sign of life although it waits for them, see
    `Connection.is_silent`. It asks one question at a time, and takes those for lost that are gone.
    """

    def name(self, endpoint: str) -> str:
        """What this server is called in error texts."""
        return "the server"

    def question(self, silent: Set[str]) -> Call | None:
        """What to ask another server about these endpoints, if anything now. `hear` gets what becomes of it."""
        return None

    def hear(self, outcome: Outcome) -> None:
        """The answer to the question."""

    def gone(self, silent: Set[str]) -> Set[str]:
        """Those of these endpoints that have turned out to be no server's any more. Each answer tells so once."""
        return set()

"""The blocks of the cache that move in a switch, as the scheduler plans it and ranks carry it out."""

import msgspec


class Migration(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of the cache that move in one exchange, for the ranks of one new replica.

    A switch has one such exchange for each group of ranks that exchange weights. Where sequences leave their group, it
    has another one, among all ranks.
    """

    sources: list[list[int]]
    """The blocks that move from each old replica among the ranks that meet; the same for all these ranks."""
    targets: list[tuple[int, int, int]]
    """(old replica among those, position in its list, block of the new replica). No new block occurs twice."""

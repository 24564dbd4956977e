"""Which blocks of the cache move in a switch, as the scheduler plans it and ranks carry it out."""

import msgspec


class Migration(msgspec.Struct, frozen=True, array_like=True):
    """Which blocks of the cache move, for the ranks of one new replica."""

    sources: list[list[int]]
    """For each old replica among the ranks that meet, its blocks that are in use; the same for all ranks that meet."""
    targets: list[tuple[int, int, int]]
    """(old replica among those, position in its list, block of the new replica): no block twice."""

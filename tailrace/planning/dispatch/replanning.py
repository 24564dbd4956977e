"""When jobs that wait are placed anew."""

CHANGED = 0.05
"""The least share of the jobs that wait which has to begin before their places are decided anew."""


def is_outdated(planned: int, waiting: int, *, any_idle: bool) -> bool:
    """Whether enough has changed since a plan was made: a share of what waits, or anything if an engine is idle.

    An engine that long responses have nearly for themselves has room all the time.

    Args:
        planned: jobs that waited for their engines when the plan was made.
        waiting: those that wait now.
    """
    least = 0.0 if any_idle else CHANGED * planned
    return abs(waiting - planned) > least

"""The rule for which weights may generate for which training step.

Step s trains weights of version s into version s + 1. A sample's staleness is s less the oldest version that made one
of its tokens. A response for step s begins with version `oldest_version` or newer. Therefore no sample is ever staler
than `max_staleness`, however long it takes: it waits for its turn before it starts, and is never thrown away.
"""


def oldest_version(step: int, max_staleness: int) -> int:
    """The oldest weight version that may begin a response for training step `step`."""
    return max(0, step - max_staleness)


def staleness(step: int, oldest: int) -> int:
    """The staleness of a sample that is trained on in `step` and whose oldest token was made by version `oldest`."""
    return step - oldest

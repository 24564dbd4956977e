"""`tailrace scale`: changes the number of rollout workers of a run that goes on."""

from collections.abc import Sequence
from pathlib import Path

from tailrace.errors import UserError
from tailrace.run.control import Scale, ask


def scale(run: Path, changes: Sequence[str], *, timeout_s: float) -> str:
    """Ask a run for a change, and return what it has done, in words.

    Args:
        changes: `rollout=N`.

    Raises:
        UserError: the change is none, the run does not answer, or it cannot make the change.
    """
    numbers: dict[str, int] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name != "rollout" or not value.isdigit():
            raise UserError(f"{change!r} is no change; give rollout=N, the number of rollout workers")
        numbers[name] = int(value)
    if len(changes) != 1:
        raise UserError(f"{len(changes)} changes were given; give one, such as rollout=4")
    reply = ask(run, Scale(numbers["rollout"]), timeout_s=timeout_s)
    if not reply.ok:
        raise UserError(reply.text)
    return reply.text

"""`tailrace scale`: changes the number of rollout workers of a run that goes on."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tailrace.config.cluster import MOST_WORKERS, ROLLOUT, kind_of_pool
from tailrace.errors import UserError, did_you_mean, quoted
from tailrace.run.control import Scale, ask


def scale(run: Path, changes: Sequence[str], *, timeout_s: float) -> str:
    """Ask a run for a change, and return what it has done, in words.

    Args:
        changes: `rollout=N`, or `rollout.NAME=N` for a named pool.

    Raises:
        UserError: the change is none, the run does not answer, or it cannot make the change.
    """
    if len(changes) != 1:
        raise UserError(f"{len(changes)} changes were given; give one, such as rollout=4")
    pool, _, value = changes[0].partition("=")
    near = "" if kind_of_pool(pool) == ROLLOUT else did_you_mean(kind_of_pool(pool), [ROLLOUT])
    if kind_of_pool(pool) != ROLLOUT or not re.fullmatch("[0-9]{1,9}", value) or int(value) > MOST_WORKERS:
        raise UserError(
            f"{quoted(changes[0])} is no change; give rollout=N, at most {MOST_WORKERS} rollout workers, "
            f"or rollout.NAME=N for those of a named pool{near}"
        )
    reply = ask(run, Scale(int(value), pool), timeout_s=timeout_s, on_wait=lambda text: print(text, file=sys.stderr))
    if not reply.ok:
        raise UserError(reply.text)
    return reply.text

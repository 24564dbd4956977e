"""The counts of a transfer queue, as events, Prometheus and `tailrace queue top` show them."""

from dataclasses import dataclass
from typing import Literal

from tailrace.registers.prometheus import Series


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCount:
    """A field of `QueueStats`, `TaskStats` or `UnitStats`."""

    name: str
    """The name of the field."""
    series: Series
    """The series of the count. Its label `state`, where it has one, is the name of the count."""
    title: str = ""
    """The heading of its column in `tailrace queue top`; the counts of the whole queue have no columns."""
    unit: Literal["rows", "bytes", "s", "groups", ""] = ""
    observed: str = ""
    """Its meaning in the `queue` events of a run, for `docs/metrics.md`; empty where they lack it."""


def _of_task(name: str, help: str, type: Literal["gauge", "counter"] = "counter") -> Series:
    return Series(name=f"tailrace_queue_task_{name}", type=type, help=help, labels=("task",))


def _of_unit(name: str, help: str) -> Series:
    return Series(name=f"tailrace_queue_unit_{name}", help=help, labels=("unit",))


UP = Series(name="tailrace_queue_up", help="Whether the controller answers this token.")
"""A series of a served queue."""
TASK_ROWS = Series(
    name="tailrace_queue_task_rows",
    help="Rows of a task by state.",
    labels=("task", "state"),
    note="The states are `waiting`, `ready` and `leased`.",
)

QUEUE_COUNTS = (
    QueueCount(
        name="rows",
        unit="rows",
        observed="stored",
        series=Series(name="tailrace_queue_rows", help="Rows stored."),
    ),
    QueueCount(
        name="bytes",
        unit="bytes",
        observed="of their cells",
        series=Series(name="tailrace_queue_bytes", help="Bytes of cells stored."),
    ),
    QueueCount(
        name="blocked_puts",
        series=Series(name="tailrace_queue_blocked_puts", help="Producers waiting to put rows."),
    ),
    QueueCount(
        name="version",
        series=Series(name="tailrace_queue_weight_version", help="Newest weight version that the queue has heard of."),
    ),
    QueueCount(
        name="lost_groups",
        unit="groups",
        observed="to be put again: a process of the queue died with them, or a task had them remade",
        series=Series(name="tailrace_queue_lost_groups", help="Groups that have to be put again."),
    ),
    QueueCount(
        name="lacking_rows",
        unit="rows",
        observed="that are on fewer storage units than `queue.replicas`, and are being copied",
        series=Series(
            name="tailrace_queue_lacking_rows", help="Rows that lack copies: on fewer units than queue.replicas."
        ),
    ),
    QueueCount(
        name="put_wait_s",
        unit="s",
        series=Series(name="tailrace_queue_put_wait_seconds", type="counter", help="Time that puts had to wait."),
    ),
)
"""The counts of the whole queue."""

TASK_COUNTS = (
    QueueCount(name="waiting", title="waiting", unit="rows", observed="that wait for their inputs", series=TASK_ROWS),
    QueueCount(name="ready", title="ready", unit="rows", observed="that the task could claim", series=TASK_ROWS),
    QueueCount(name="leased", title="leased", unit="rows", observed="that the task has claimed", series=TASK_ROWS),
    QueueCount(name="consumed", title="consumed", unit="rows", series=_of_task("consumed_rows", "Rows consumed.")),
    QueueCount(
        name="expired",
        title="expired",
        unit="rows",
        observed="that went back because a lease expired or its holder died, so far",
        series=_of_task("expired_rows", "Rows whose lease expired or whose holder died."),
    ),
    QueueCount(
        name="claims",
        title="claims waiting",
        series=_of_task("claims", "Consumers waiting for rows.", "gauge"),
    ),
    QueueCount(
        name="wait_s",
        title="waited s",
        unit="s",
        series=_of_task("wait_seconds", "Time that claims had to wait."),
    ),
)
"""The counts of a task, in the order of the columns."""

UNIT_COUNTS = (
    QueueCount(name="alive", series=_of_unit("alive", "Whether a unit gives signs of life.")),
    QueueCount(name="rows", title="rows", unit="rows", series=_of_unit("rows", "Rows of a unit.")),
    QueueCount(name="bytes", title="MiB", unit="bytes", series=_of_unit("bytes", "Bytes of cells that a unit stores.")),
    QueueCount(
        name="max_bytes",
        title="of MiB",
        unit="bytes",
        series=_of_unit("max_bytes", "The most bytes that a unit stores."),
    ),
)
"""The counts of a storage unit, in the order of the columns."""

"""`tailrace queue top`: shows the contents of a queue, what waits for what, and the state of its storage units."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailrace.errors import PeerLost, UserError
from tailrace.registers.queue import TASK_COUNTS, UNIT_COUNTS, QueueCount
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats, TaskStats, UnitStats
from tailrace.transfer.queue.client.look import read_stats

_EVERY_S = 1.0
_LIMIT_S = 5.0
_MIB = 2**20


def show(connection: Path, *, once: bool) -> None:
    """Print the counts of the queue whose address is in the file `connection`, again each second until Ctrl-C. A
    terminal shows them in place; elsewhere they follow one after the other.

    Raises:
        UserError: there is no such file, or no queue at its address.
    """
    address = QueueAddress.read(connection)
    stats = _look(address, connection)
    console = Console()
    if once:
        console.print(render(stats))
        return
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        show = _in_place(console, stack) if console.is_terminal else _below(console)
        while True:
            show(stats)
            time.sleep(_EVERY_S)
            stats = _look(address, connection)


def _in_place(console: Console, stack: ExitStack) -> Callable[[QueueStats], None]:
    live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
    return lambda stats: live.update(render(stats), refresh=True)


def _below(console: Console) -> Callable[[QueueStats], None]:
    """Return a function that prints to a pipe or a file, and flushes it."""

    def show(stats: QueueStats) -> None:
        console.print(render(stats), Text())
        console.file.flush()

    return show


def _look(address: QueueAddress, connection: Path) -> QueueStats:
    try:
        return read_stats(address, name="top", limit_s=_LIMIT_S)
    except PeerLost:
        raise UserError(
            f"no queue answers at {address.endpoint} within {_LIMIT_S:g} s, where {connection} says it is; "
            f"that of a run (queue.type=service) ends with the run, any other is started with `tailrace queue serve`"
        ) from None


def render(stats: QueueStats) -> Group:
    """Return the counts as a page."""
    return Group(_summary(stats), _tasks(stats), *([_units(stats)] if stats.units else []))


def _summary(stats: QueueStats) -> Text:
    lines = [f"{stats.rows} rows, {_mib(stats.bytes)} MiB, weight version {stats.version}"]
    if stats.blocked_puts:
        lines.append(f"{stats.blocked_puts} puts are blocked: {stats.blocked_by}")
    if stats.put_wait_s:
        lines.append(f"puts have waited {stats.put_wait_s:.1f} s")
    if stats.lost_groups:
        lines.append(f"{stats.lost_groups} groups have to be put again")
    if stats.lacking_rows:
        lines.append(f"{stats.lacking_rows} rows lack copies")
    return Text("\n".join(lines))


def _tasks(stats: QueueStats) -> Table:
    table = _table("task", *(count.title for count in TASK_COUNTS))
    for name, task in stats.tasks.items():
        table.add_row(Text(name), *(_cell(count, task) for count in TASK_COUNTS))
    return table


def _units(stats: QueueStats) -> Table:
    table = _table("unit", *(count.title for count in UNIT_COUNTS))
    for unit in stats.units:
        table.add_row(Text(unit.name), *(_cell(count, unit) for count in UNIT_COUNTS))
    return table


def _cell(count: QueueCount, stats: TaskStats | UnitStats) -> str:
    value = getattr(stats, count.name)
    if isinstance(value, bool):
        return "alive" if value else "dead"
    match count.unit:
        case "bytes":
            return _mib(value)
        case "s":
            return f"{value:.1f}"
        case _:
            return str(value)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f}"

"""`tailrace queue add-unit` and `tailrace queue remove-unit`: storage units join a running queue, and leave it."""

import shlex
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tailrace.config.load import load_as
from tailrace.config.queue_table import AddedUnitConfig
from tailrace.host.interrupt import Signalled, handling, stop_signals
from tailrace.host.streams import outliving_readers
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.processes.added import AddedUnit, add_unit
from tailrace.transfer.queue.processes.added import remove_unit as remove


def serve_unit(connection: Path, overrides: Sequence[str], *, name: str | None, log: Path) -> None:
    """Add a unit to the queue whose address is in the file `connection`. At a signal it leaves; at a second it ends.

    Raises:
        UserError, WireError, QueueError: see `add_unit`.
    """
    address = QueueAddress.read(connection)
    config = load_as(AddedUnitConfig, None, overrides)
    asked, ask = socket.socketpair()  # a signal handler may send
    signalled = Signalled()
    with closing(asked), closing(ask), outliving_readers():
        with (
            handling(stop_signals(), lambda number, _: _send(ask, number, signalled)),
            add_unit(address, config, log=log, name=name) as unit,
        ):
            print(f"{unit.name} has joined the queue; its log: {log}")
            command = shlex.join(["tailrace", "queue", "remove-unit", str(connection), unit.name])
            print(f"Ctrl-C, or this command, has it leave: {command}", flush=True)
            _serve(unit, asked)
        print(f"{unit.name} has left the queue; its rows are on other units.")


def remove_unit(connection: Path, name: str) -> None:
    """Have a unit leave the queue whose address is in the file `connection`, and wait until it has.

    Raises:
        UserError, WireError, QueueError: see `tailrace.transfer.queue.processes.added.remove_unit`.
    """
    remove(QueueAddress.read(connection), name)
    print(f"{name} has left the queue; its rows are on other units.")


def _send(ask: socket.socket, number: int, signalled: Signalled) -> None:
    if signalled.counts(number):
        ask.send(b"!")


def _serve(unit: AddedUnit, asked: socket.socket) -> None:
    """Wait until the unit has left: by itself, or since a signal has come.

    Raises:
        QueueError: it has died, or was ended by a second signal.
    """
    if unit.wait(wake=asked):
        return
    asked.recv(1)
    print(
        "Its rows are copied to other units, which waits for tasks that write to them. Ctrl-C again ends it at once.",
        flush=True,
    )
    unit.leave()
    if not unit.wait(wake=asked):
        unit.end()
        unit.wait()

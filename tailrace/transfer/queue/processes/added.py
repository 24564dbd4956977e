"""A storage unit that joins a running queue from outside, and leaves it again.

    add_unit ──starts──▶ process of the unit ──Join──▶ controller
      └─ at the end of the block, SIGTERM ──▶ it is to leave ──▶ its rows are copied to others ──▶ it ends

The same process serves `tailrace queue add-unit`. A unit that is killed, or whose parent dies, is dead like any other.

Waiting: each wait has a limit. A unit that may not go until its limit is ended, and its rows are lost with it, unless
other units have them.
"""

import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

from tailrace.config.queue_table import AddedUnitConfig
from tailrace.errors import PeerLost, QueueError, QueueTimeout, UserError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.look import fullest, read_stats, retire_unit
from tailrace.transfer.queue.processes.child import Child
from tailrace.transfer.queue.processes.plan import is_own_name, storage_name
from tailrace.transfer.queue.processes.preflight import check_place
from tailrace.transfer.queue.processes.serve import Failed, Left, Listening, UnitSettings
from tailrace.transfer.queue.processes.vitals import START_LIMIT_S
from tailrace.transfer.queue.storage.factory import clear_storage
from tailrace.transfer.socket_directory import socket_directory
from tailrace.transfer.wire.messages import NAME_CHARS

LEAVE_LIMIT_S = 3600.0
"""Seconds for a unit to leave: leases under which its rows are written to have to end."""
_ANSWER_LIMIT_S = 5.0
"""Seconds for the controller to answer a question."""
_LOOK_S = 0.1
"""Seconds between questions whether a unit has joined, or has left."""
_JOIN_EVERY_S = 0.25
"""Seconds between signs of life: a quarter of the shortest `queue.unit_limit_s`."""
_PATIENCE_S = 300.0
"""Seconds without an answer of the controller after which the unit ends: a served queue may be served again."""


class AddedUnit:
    """The process of a unit that has joined."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._is_asked = self._is_over = self._was_ended = False
        self.has_left = False
        """Whether it has left, with its rows on other units."""

    @property
    def name(self) -> str:
        """The unit's name in the queue."""
        return self._child.name

    @property
    def pid(self) -> int:
        """The pid of the process."""
        return self._child.pid

    def leave(self) -> None:
        """Have the unit leave. Its process ends when its rows are on other units; see `wait`."""
        if not self._is_asked:
            self._is_asked = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def end(self) -> None:
        """End the process at once. Rows that it alone has are lost, which `wait` tells."""
        self._was_ended = True
        self._child.hang_up()

    def wait(self, limit_s: float = math.inf, *, wake: socket.socket | None = None) -> bool:
        """Wait until the process has ended, `wake` is readable, or the limit has passed. Return whether it has ended.

        Raises:
            QueueError: it has ended without having left, or was ended.
        """
        if self._was_ended:
            raise QueueError(f"{self.name} was ended before it had left: rows that it alone had are to be put again")
        deadline = time.monotonic() + limit_s
        while not self._is_over:
            left_s = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            descriptor = self._child.fileno()
            if descriptor not in wait([descriptor, *([] if wake is None else [wake])], left_s):
                return False
            messages = self._child.hear()
            self.has_left = self.has_left or any(isinstance(message, Left) for message in messages)
            self._is_over = not messages
        if not self.has_left:
            raise QueueError(self._child.obituary())
        return True


@contextmanager
def add_unit(
    address: QueueAddress,
    config: AddedUnitConfig | None = None,
    *,
    log: Path,
    name: str | None = None,
    leave_limit_s: float = LEAVE_LIMIT_S,
) -> Iterator[AddedUnit]:
    """Add a storage unit to the queue at `address` while the block runs. At its end the unit leaves.

    Of several controllers, the one whose units have the least room gets it.

    `config`: where it keeps cells and listens. `log`: the file to which its process prints. `name`: unique in the
    queue; by default one of this host and time.

    Raises:
        UserError: there is no queue at the address, it has a unit of that name or may give it to one, or this machine
            cannot serve a unit.
        WireError: the queue has another token.
        QueueError: the unit could not start, has died, or has not left within `leave_limit_s`.
    """
    config = config or AddedUnitConfig()
    name = name or f"{socket.gethostname()[:80]}-{time.time_ns():x}"
    stats = _look(address)
    if any(unit.name == name for unit in stats.units):
        raise UserError(f"the queue has a unit {name!r} already; give another name")
    if len(name) > NAME_CHARS:
        raise UserError(f"the name {name[:20]}… has {len(name)} characters; give one of at most {NAME_CHARS}")
    if is_own_name(name):
        raise UserError(f"the name {name!r} is for units that the queue starts itself; give another")
    check_place(config.listen, config.storage, keys="")
    own = fullest(address, limit_s=_ANSWER_LIMIT_S) if address.others else address
    with ExitStack() as stack:
        sockets = stack.enter_context(socket_directory())
        settings = UnitSettings(
            token=address.token,
            endpoints=[f"ipc://{sockets}/unit", f"tcp://{config.listen}:*"],
            name=name,
            controller=own.endpoint,
            storage=config.storage.model_dump(mode="json"),
            storage_name=storage_name(address.token, name),
            join_every_s=_JOIN_EVERY_S,
            patience_s=_PATIENCE_S,
        )
        child = Child(name, settings, log)
        stack.callback(child.end, _ANSWER_LIMIT_S)
        _await_start(child, own)
        unit = AddedUnit(child)
        try:
            yield unit
        finally:
            unit.leave()
            if not unit.wait(leave_limit_s):
                raise QueueError(
                    f"unit {name} has not left the queue within {leave_limit_s:g} s, and was ended: rows that it alone "
                    "had are lost, and are to be put again"
                )
        clear_storage(config.storage, name=settings.storage_name)


def remove_unit(address: QueueAddress, name: str, *, limit_s: float = LEAVE_LIMIT_S) -> None:
    """Have a unit leave the queue at `address`: its rows are copied to other units, and then its process ends.

    Raises:
        UserError: there is no queue at the address; it has no such unit, or that is its last.
        WireError: the queue has another token.
        QueueTimeout: the unit has not left within `limit_s` seconds. It goes on leaving.
    """
    deadline = time.monotonic() + limit_s
    _look(address)
    retire_unit(address, name, limit_s=_ANSWER_LIMIT_S)
    while any(unit.name == name for unit in _look(address).units):
        if time.monotonic() > deadline:
            raise QueueTimeout(
                f"unit {name} has not left within {limit_s:g} s, and goes on leaving: tasks write outputs to its rows, "
                "or other units have no room"
            )
        time.sleep(_LOOK_S)


def _await_start(child: Child, address: QueueAddress) -> None:
    """Wait until a unit has joined.

    Raises:
        QueueError: it could not start, or takes too long.
    """
    deadline = time.monotonic() + START_LIMIT_S
    listens = False
    while time.monotonic() < deadline:
        if wait([child.fileno()], _LOOK_S):
            messages = child.hear()
            for message in messages:
                if isinstance(message, Failed):
                    raise QueueError(message.reason)
                listens = listens or isinstance(message, Listening)
            if not messages:
                raise QueueError(child.obituary())
        if listens and any(unit.name == child.name and unit.alive for unit in _look(address).units):
            return
    raise QueueError(f"unit {child.name} has not joined the queue within {START_LIMIT_S:g} s, see {child.log}")


def _look(address: QueueAddress) -> QueueStats:
    try:
        return read_stats(address, name="units", limit_s=_ANSWER_LIMIT_S)
    except PeerLost:
        raise UserError(
            f"no queue answers at {address.endpoint} within {_ANSWER_LIMIT_S:g} s; it has ended, or runs elsewhere: "
            "give the file that it has written"
        ) from None

"""The plan of a queue's processes: the settings of each, where they listen, and the state that they go on from."""

import fcntl
import hashlib
import itertools
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tailrace.config.queue_table import TableConfig
from tailrace.config.transfer import ArenaStorageConfig, ServiceQueueConfig
from tailrace.errors import QueueError, UserError
from tailrace.host.whole_file import whole_file
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.processes.preflight import check_service
from tailrace.transfer.queue.processes.serve import ControllerSettings, UnitSettings
from tailrace.transfer.queue.rows.table import check_table
from tailrace.transfer.queue.storage.factory import clear_storage
from tailrace.transfer.queue.table_factory import make_tasks
from tailrace.transfer.shared_files import remove_orphans
from tailrace.transfer.socket_directory import directory_of, socket_directory
from tailrace.transfer.wire.sockets import host_id

CONTROLLER = "controller"
_JOIN_EVERY_S = 1.0
"""Seconds between signs of life of a unit."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a controller among those of its queue."""

    number: int = 0
    of: int = 1
    token: bytes | None = None
    """The token of the queue; None for a new one, or that of an earlier start."""


_log = logging.getLogger(__name__)


class QueuePlan:
    """The plan of one queue, in one directory."""

    address: QueueAddress
    """The address of the queue, known in `prepared`. It has the real endpoints as soon as the controller listens."""

    def __init__(
        self, config: ServiceQueueConfig, table: TableConfig, directory: Path, *, resume: bool, place: Place
    ) -> None:
        """See `QueueProcesses`."""
        self._config = config
        self._place_among = place
        self._table = table
        self._directory = directory
        self._resume = resume
        self._starts = 0
        self._has_served = False
        self._units = [_unit_name(place.number + place.of * number) for number in range(config.units)]
        self._numbers = itertools.count(place.number + place.of * config.units, place.of)

    @property
    def units(self) -> Sequence[str]:
        """The names of the units, in the order in which they were started."""
        return self._units

    @property
    def least_units(self) -> int:
        """The fewest units that there may be."""
        return self._config.units

    @property
    def max_units(self) -> int:
        """The most units that there may be."""
        return self._config.max_units or self._config.units

    @property
    def can_grow(self) -> bool:
        """Whether the number of units may change by itself."""
        return self.max_units > self.least_units

    def is_spare(self, unit: str) -> bool:
        """Whether a unit may leave when it is not needed."""
        return unit in self._units[self._config.units :]

    def add_unit(self) -> str:
        """Plan for another unit, and return its name, which no unit has had.

        Raises:
            OSError: the directory cannot be written to.
        """
        name = _unit_name(next(self._numbers))
        self._keep_units([*self._units, name])
        return name

    def forget_unit(self, name: str) -> None:
        """Forget a spare unit that has left, and remove what it has stored.

        Raises:
            OSError: the directory cannot be written to.
        """
        self._keep_units([unit for unit in self._units if unit != name])
        self._clear_storage([name])

    @property
    def connection(self) -> Path:
        """The file that holds the address."""
        return self._directory / "connection.json"

    @property
    def journal(self) -> Path:
        """The file of the controller's journal."""
        return self._directory / "journal"

    def log(self, name: str) -> Path:
        """Return the file to which a process prints."""
        return self._directory / f"{name}.log"

    @property
    def has_lost_journal(self) -> bool:
        """Whether a controller has served, so that there was a journal, and the journal is gone or empty now."""
        return self._has_served and not (self.journal.exists() and self.journal.stat().st_size > 0)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Hold the directory in the block. At its end the units' stored parts are removed, unless the queue goes on.

        Raises:
            UserError: another process serves a queue there, or its address cannot be read.
            QueueError, ConfigError: the table cannot be served, or not on this machine.
            OSError: the directory cannot be used.
        """
        check_table(make_tasks(self._table, controllers=self._place_among.of), self._table.columns)
        check_service(self._config)
        with _locked(self._directory):
            if not self._resume:
                self.journal.unlink(missing_ok=True)
                self._kept_units.unlink(missing_ok=True)
            before = address_before(self.connection, controllers=1) if self._resume else None
            if before is not None and self._kept_units.exists():
                self._units = self._kept_units.read_text().split()
                of = self._place_among.of
                self._numbers = itertools.count(of + max(map(_unit_number, self._units)), of)
                missing = self._config.units - len(self._units)
                self._units += map(_unit_name, itertools.islice(self._numbers, max(0, missing)))
            again = None if before is None else directory_of(before.endpoints)
            with socket_directory(again) as self._sockets:
                self.address = self._place(before)
                try:
                    yield
                finally:
                    self._clear()

    def settings(self, name: str) -> ControllerSettings | UnitSettings:
        """Return the settings of a process that is started now."""
        return self._controller_settings() if name == CONTROLLER else self._unit_settings(name)

    def publish(self, endpoints: list[str]) -> bool:
        """Write the address when the first controller serves at `endpoints`. Return False for later controllers."""
        if self._has_served:
            return False
        self._has_served = True
        self.address = QueueAddress(endpoints=endpoints, host=host_id(), token=self.address.token)
        self.address.write(self.connection)
        return True

    @property
    def _kept_units(self) -> Path:
        """The file with the names of the units, where these are not those of the configuration."""
        return self._directory / "units"

    def _keep_units(self, units: list[str]) -> None:
        """Have these units, and write their names to the file."""
        with whole_file(self._kept_units) as partial:
            partial.write_text(" ".join(units))
        self._units = units

    def _place(self, before: QueueAddress | None) -> QueueAddress:
        """Choose where the controller listens: at the endpoints of an earlier start, if there was one."""
        port = f"tcp://{self._config.listen}:"
        others = [] if before is None else before.endpoints
        tcp = next((endpoint for endpoint in others if endpoint.startswith(port)), f"{port}*")
        token = self._place_among.token or (secrets.token_bytes(32) if before is None else before.token)
        return QueueAddress(endpoints=[f"ipc://{self._sockets}/{CONTROLLER}", tcp], host=host_id(), token=token)

    def _controller_settings(self) -> ControllerSettings:
        return ControllerSettings(
            token=self.address.token,
            endpoints=self.address.endpoints,
            table=self._table.model_dump_json(),
            config=self._config.model_dump_json(),
            journal=str(self.journal),
            controllers=self._place_among.of,
        )

    def _unit_settings(self, name: str) -> UnitSettings:
        self._starts += 1
        return UnitSettings(
            token=self.address.token,
            # a new socket for each start, so that no client takes the unit for the one before it
            endpoints=[f"ipc://{self._sockets}/{name}-{self._starts}", f"tcp://{self._config.listen}:*"],
            name=name,
            controller=self.address.endpoint,
            storage=self._config.storage.model_dump(mode="json"),
            storage_name=storage_name(self.address.token, name),
            join_every_s=min(_JOIN_EVERY_S, self._config.unit_limit_s / 4),
        )

    def _clear(self) -> None:
        """Remove the memory of units that were killed, and the stored parts if the queue does not go on."""
        if isinstance(self._config.storage, ArenaStorageConfig):
            remove_orphans(self._config.storage.path)
        if not self._resume:
            self._clear_storage(self.units)

    def _clear_storage(self, units: Iterable[str]) -> None:
        """Remove the stored parts of units that have ended."""
        try:
            for unit in units:
                clear_storage(self._config.storage, name=storage_name(self.address.token, unit))
        except QueueError as error:
            _log.warning("what the queue has stored is left there: %s", error)


def address_before(connection: Path, *, controllers: int) -> QueueAddress | None:
    """Return the address of the queue that was served here before; None where there was none.

    `connection`: the file of the address.

    Raises:
        UserError: it had another number of controllers, or its address cannot be read.
    """
    if not connection.exists():
        return None
    address = QueueAddress.read(connection)
    if (before := len(address.each)) != controllers:
        raise UserError(
            f"{connection.parent} has a queue with queue.controllers={before}, and this one has {controllers}; "
            f"give the number of before, or another directory"
        )
    return address


_UNIT = "unit-"


def is_own_name(name: str) -> bool:
    """Whether a queue may give a unit that it starts itself this name, now or later."""
    return name.startswith(_UNIT) and name.removeprefix(_UNIT).isdecimal()


def _unit_name(number: int) -> str:
    return f"{_UNIT}{number}"


def _unit_number(name: str) -> int:
    return int(name.removeprefix(_UNIT))


def storage_name(token: bytes, unit: str) -> str:
    """Return the name of a unit's storage. `token`: that of its queue, the same after a restart."""
    return f"tailrace-{hashlib.sha256(token).hexdigest()[:16]}-{unit}"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make the directory and hold it for this queue.

    Raises:
        UserError: another queue is served there.
        OSError: the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process serves a queue in {directory}; stop it or choose another") from None
        yield

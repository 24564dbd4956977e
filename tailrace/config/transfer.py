"""Schema of the transfer queue."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from tailrace.config.base import Bytes, Config, Count, Keywords, PathText, Processes, Seconds
from tailrace.config.queue_policies import PolicyConfig

Liveness = Annotated[float, Field(ge=1, le=1e6)]
"""A limit in seconds after which silence counts as death. Below 1 s, a busy machine would make healthy processes count
as dead."""
StorageBytes = Annotated[int, Field(ge=2**20, le=2**50)]


class MemoryStorageConfig(Config):
    """Cells in the memory of the storage unit; they travel to clients in messages."""

    type: Literal["memory"] = "memory"
    max_bytes: StorageBytes = 8 * 2**30
    """Maximum number of bytes that a unit holds."""


class ArenaStorageConfig(Config):
    """Cells in memory that a storage unit shares with the clients on its host; they are not copied between them."""

    type: Literal["arena"] = "arena"
    directory: PathText = "/dev/shm"
    """Directory of the files of the shared memory; a file system in memory."""
    max_bytes: StorageBytes = 8 * 2**30
    """Maximum number of bytes that a unit holds."""

    @property
    def path(self) -> Path:
        """The path of `directory`."""
        return Path(self.directory)


class SpillStorageConfig(Config):
    """Cells in the memory of the storage unit up to a budget, and in a file beyond it."""

    type: Literal["spill"] = "spill"
    directory: PathText
    """Directory of the file; on a disk."""
    memory_bytes: Bytes = 4 * 2**30
    """Bytes that a unit holds in memory; the least recently written cells go to the file."""
    max_bytes: StorageBytes = 64 * 2**30
    """Maximum number of bytes that a unit holds, in memory and in the file together."""

    @property
    def path(self) -> Path:
        """The path of `directory`."""
        return Path(self.directory)


class RedisStorageConfig(Config):
    """Cells in a Redis server, where they survive the storage unit."""

    type: Literal["redis"] = "redis"
    url: str = "redis://127.0.0.1:6379/0"
    """The server: redis://host:port/database, rediss:// for TLS, or unix:///path."""
    timeout_s: Seconds = 10.0
    """Seconds within which the server has to answer; a call is tried twice."""
    max_bytes: StorageBytes = 4 * 2**30
    """Maximum number of bytes that a unit stores."""


class AdapterStorageConfig(Config):
    """Your own storage, see docs/adapters.md. `f(args, **options)` makes it."""

    type: Literal["adapter"] = "adapter"
    path: str
    """Dotted path of `f`, such as my_package.my_storage.make_storage; the working directory is importable."""
    options: Keywords = {}
    """Keyword arguments of `f`."""
    max_bytes: StorageBytes = 8 * 2**30
    """Maximum number of bytes that a unit holds."""


StorageConfig = Annotated[
    MemoryStorageConfig | ArenaStorageConfig | SpillStorageConfig | RedisStorageConfig | AdapterStorageConfig,
    Field(discriminator="type"),
]
"""Where a storage unit of the transfer queue keeps cells."""


def _of_one_machine(listen: str) -> str:
    """Refuse addresses of no machine: this address is given to others."""
    if listen in ("*", "0.0.0.0", "::"):
        raise ValueError(f"{listen} is the address of no machine; give the one at which others reach this one")
    return listen


ListenAddress = Annotated[str, AfterValidator(_of_one_machine)]


def _is_empty(values: dict[str, PolicyConfig]) -> bool:
    """Whether nothing was given, so that nothing is written of it."""
    return not values


class _Bounds(Config):
    """Limits of every queue that a run or `tailrace queue serve` makes."""

    max_rows: Count = 65536
    """Maximum number of stored rows; producers wait beyond that."""
    max_bytes: Bytes = 4 * 2**30
    """Maximum number of bytes of stored cells; producers wait beyond that. Outputs of tasks may exceed it."""
    lease_s: Liveness = 600.0
    """Seconds after which the rows of a worker without a sign of life go back; a worker that works renews its claim."""
    timeout_s: Seconds = 3600.0
    """Seconds that a put or a claim waits at most. Then a task without work asks again, and the training step fails."""
    policies: Annotated[dict[str, PolicyConfig], Field(exclude_if=_is_empty)] = {}
    """By name of a task of the algorithm, the policy by which it chooses rows: one of `table.tasks.policy` below. Other
    tasks have the algorithm's choice. A policy that does not fit its task is refused. The tasks of a table of your own
    have their policies in the table."""


class LocalQueueConfig(_Bounds):
    """A transfer queue inside the process of the run."""

    type: Literal["local"] = "local"


class ServiceQueueConfig(_Bounds):
    """A transfer queue in processes of its own: a controller and storage units."""

    type: Literal["service"] = "service"
    controllers: Processes = 1
    """Controllers. Each has its part of the groups and an equal share of `units`, `max_units`, `max_rows` and
    `max_bytes`. Several are for machines with cores to spare. `balanced` policies need 1."""
    units: Processes = 2
    """Storage units to start, a multiple of `controllers`; others may join."""
    max_units: Processes | None = None
    """Most storage units. While there are fewer, another one is started when the units are 80 % full, or 40 % where a
    put waits. It leaves when the others would be 40 % full without it; `units` stay. By default there are always as
    many as `units`."""
    replicas: Processes = 1
    """Number of units that each row is written to, at most `units` / `controllers`; with 2, no row is lost with a unit.
    Where fewer units are alive, a row is written to fewer."""
    storage: StorageConfig = ArenaStorageConfig()
    """Where units keep cells."""
    listen: ListenAddress = "127.0.0.1"
    """Address of this machine at which the processes listen, at free ports. They are not reached at any other
    address."""
    client_limit_s: Liveness = 30.0
    """Seconds without a sign of life after which the run counts as dead, and its rows go back. Other clients give their
    own limits, so `tailrace queue serve` ignores this key."""
    timeout_s: Seconds = 3600.0
    """Seconds that a put or a claim of the run waits at most. Then a task without work asks again, and the training
    step fails. Other clients give their own limits, so `tailrace queue serve` ignores this key."""
    unit_limit_s: Liveness = 10.0
    """Seconds without a sign of life after which a unit counts as dead, and its rows as lost."""

    @field_validator("units")
    @classmethod
    def _as_many_for_each_controller(cls, units: int, others: ValidationInfo) -> int:
        """Check that the controllers can share the units."""
        return _multiple(units, others.data.get("controllers", 1))  # missing where it is not valid itself

    @field_validator("max_units")
    @classmethod
    def _no_fewer_than_at_first(cls, most: int | None, others: ValidationInfo) -> int | None:
        """Check that the units to start may be there, and that the controllers can share all of them."""
        units = others.data.get("units", 1)  # missing where `units` itself is not valid
        if most is not None and most < units:
            raise ValueError(f"{most} is less than queue.units, {units}; raise it, or lower units")
        return most if most is None else _multiple(most, others.data.get("controllers", 1))

    @field_validator("replicas")
    @classmethod
    def _on_units_of_their_own(cls, replicas: int, others: ValidationInfo) -> int:
        """Check that there are enough units: no unit has a row twice."""
        units = others.data.get("units", replicas)  # missing where `units` itself is not valid
        if replicas > units:
            raise ValueError(
                f"{replicas} is more than queue.units, {units}; a row is on each unit once, so raise units"
            )
        controllers = others.data.get("controllers", 1)
        if replicas * controllers > units:
            raise ValueError(
                f"{replicas} is more than the {units // controllers} units of each controller (queue.units / "
                f"queue.controllers); raise units, or lower controllers"
            )
        return replicas


def _multiple(units: int, controllers: int) -> int:
    """Check that each controller has as many units."""
    if units % controllers:
        raise ValueError(
            f"{units} is no multiple of queue.controllers, {controllers}; each controller has as many units"
        )
    return units


class RemoteQueueConfig(Config):
    """A transfer queue that is already running and has held no rows yet. It serves one run, or one that is resumed."""

    type: Literal["remote"] = "remote"
    connection: PathText
    """The file written by `tailrace queue serve`: where the queue is, and its token."""
    timeout_s: Seconds = 3600.0
    """Seconds that a put or a claim waits at most. Then a task without work asks again, and the training step fails."""
    client_limit_s: Liveness = 30.0
    """Seconds without a sign of life after which the run counts as dead, and its rows go back."""
    shared_memory: bool = True
    """Whether cells may pass through the memory of units on this host; otherwise through sockets."""

    @property
    def path(self) -> Path:
        """The path of `connection`."""
        return Path(self.connection)


QueueConfig = Annotated[LocalQueueConfig | ServiceQueueConfig | RemoteQueueConfig, Field(discriminator="type")]
"""The transfer queue of a run."""


def controllers_of(config: QueueConfig) -> int:
    """The number of controllers of the queue that a run starts; 1 for a queue that is there already."""
    return config.controllers if isinstance(config, ServiceQueueConfig) else 1

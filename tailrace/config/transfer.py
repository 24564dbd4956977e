"""Schema of the transfer queue."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from tailrace.config.base import Bytes, Config, Count, PathText, Processes, Seconds

Liveness = Annotated[float, Field(ge=1, le=1e6)]
"""Seconds of silence that mean something: less pass on a busy machine, and everybody would count as dead."""
StorageBytes = Annotated[int, Field(ge=2**20, le=2**50)]


class MemoryStorageConfig(Config):
    """Cells in the memory of the storage unit; they travel to clients in messages."""

    type: Literal["memory"] = "memory"
    max_bytes: StorageBytes = 8 * 2**30
    """Bytes that a unit holds at most."""


class ArenaStorageConfig(Config):
    """Cells in memory that a storage unit shares with the clients on its host; they are not copied between them."""

    type: Literal["arena"] = "arena"
    directory: PathText = "/dev/shm"
    """Where the files of the shared memory are made; a file system in memory."""
    max_bytes: StorageBytes = 8 * 2**30
    """Bytes that a unit holds at most."""

    @property
    def path(self) -> Path:
        """Of `directory`."""
        return Path(self.directory)


class SpillStorageConfig(Config):
    """Cells in the memory of the storage unit up to a budget, and in a file beyond it."""

    type: Literal["spill"] = "spill"
    directory: PathText
    """Where the file is made; on a disk."""
    memory_bytes: Bytes = 4 * 2**30
    """Bytes that a unit holds in memory; the least recently written go to the file."""
    max_bytes: StorageBytes = 64 * 2**30
    """Bytes that a unit holds at most, in memory and in the file together."""

    @property
    def path(self) -> Path:
        """Of `directory`."""
        return Path(self.directory)


class RedisStorageConfig(Config):
    """Cells in a Redis server, where they survive the storage unit."""

    type: Literal["redis"] = "redis"
    url: str = "redis://127.0.0.1:6379/0"
    """The server: redis://host:port/database, rediss:// for TLS, or unix:///path."""
    timeout_s: Seconds = 10.0
    """Seconds that the server has to answer; a call is tried twice."""
    max_bytes: StorageBytes = 4 * 2**30
    """Bytes that a unit stores at most."""


StorageConfig = Annotated[
    MemoryStorageConfig | ArenaStorageConfig | SpillStorageConfig | RedisStorageConfig, Field(discriminator="type")
]
"""Where a storage unit of the transfer queue keeps cells."""


class _Bounds(Config):
    """What every queue that a run or `tailrace queue serve` makes has."""

    max_rows: Count = 65536
    """Rows stored at most; producers wait beyond that."""
    max_bytes: Bytes = 4 * 2**30
    """Bytes of cells stored at most; producers wait beyond that. Outputs of tasks may exceed it."""
    lease_s: Liveness = 600.0
    """Seconds after which the rows of a worker that gives no sign of life go back; one at work renews its claim."""
    timeout_s: Seconds = 3600.0
    """Seconds that a put or a claim waits at most; a task without work then asks again, the training step fails."""


class LocalQueueConfig(_Bounds):
    """A transfer queue inside the process of the run."""

    type: Literal["local"] = "local"


class ServiceQueueConfig(_Bounds):
    """A transfer queue in processes of its own: a controller and storage units."""

    type: Literal["service"] = "service"
    units: Processes = 2
    """Storage units to start; others may join."""
    replicas: Processes = 1
    """Units that each row is written to, `units` at most; with 2, no row is lost with a unit. Fewer where fewer are
    alive."""
    storage: StorageConfig = ArenaStorageConfig()
    """Where units keep cells."""
    listen: str = "127.0.0.1"
    """The address of this machine at which the processes listen, at ports that are free. Others are not reached."""
    client_limit_s: Liveness = 30.0
    """Seconds without a sign of life after which the run counts as dead, and its rows go back. Other clients name their
    own, so `tailrace queue serve` does not look at it."""
    timeout_s: Seconds = 3600.0
    """Seconds that a put or a claim of the run waits at most; a task without work then asks again, the training
    step fails. Other clients name their own, so `tailrace queue serve` does not look at it."""
    unit_limit_s: Liveness = 10.0
    """Seconds without a sign of life after which a unit counts as dead, and its rows as lost."""

    @field_validator("listen")
    @classmethod
    def _of_one_machine(cls, listen: str) -> str:
        """Others are told this address."""
        if listen in ("*", "0.0.0.0", "::"):
            raise ValueError(f"{listen} is the address of no machine; give the one at which others reach this one")
        return listen

    @field_validator("replicas")
    @classmethod
    def _on_units_of_their_own(cls, replicas: int, others: ValidationInfo) -> int:
        """No unit has a row twice."""
        units = others.data.get("units", replicas)  # missing where it is not valid itself
        if replicas > units:
            raise ValueError(
                f"{replicas} is more than queue.units, {units}; a row is on each unit once, so raise units"
            )
        return replicas


class RemoteQueueConfig(Config):
    """A transfer queue that runs already, and has held no rows yet: it is for one run, or for one that is resumed."""

    type: Literal["remote"] = "remote"
    connection: PathText
    """The file that `tailrace queue serve` has written: where the queue is, and its token."""
    timeout_s: Seconds = 3600.0
    """Seconds that a put or a claim waits at most; a task without work then asks again, the training step fails."""
    client_limit_s: Liveness = 30.0
    """Seconds without a sign of life after which the run counts as dead, and its rows go back."""
    shared_memory: bool = True
    """Whether cells may pass through the memory of units on this host; otherwise through sockets."""

    @property
    def path(self) -> Path:
        """Of `connection`."""
        return Path(self.connection)


QueueConfig = Annotated[LocalQueueConfig | ServiceQueueConfig | RemoteQueueConfig, Field(discriminator="type")]
"""The transfer queue of a run."""

"""Makes the storage that a configuration names, and removes what it has left when the queue does not go on."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import QueueError
from tailrace.transfer.queue.storage.base import Storage

if TYPE_CHECKING:
    from tailrace.config.transfer import StorageConfig


def make_storage(config: "StorageConfig", *, name: str) -> Storage:
    """Make the storage of `config.type` for a unit. `name`: names queue and unit, unique among units of one server.

    A storage is made of the keys of its configuration, and of nothing else of it: in a unit's process that is no
    schema.

    Raises:
        QueueError: the storage cannot be made, for example because its server cannot be reached.
        UserError: the factory of an adapter is not there, or makes no storage.
    """
    match config.type:
        case "memory":
            from tailrace.transfer.queue.storage.memory import MemoryStorage

            return MemoryStorage(max_bytes=config.max_bytes)
        case "arena":
            from tailrace.transfer.queue.storage.arena import ArenaStorage

            return ArenaStorage(parent=Path(config.directory), max_bytes=config.max_bytes)
        case "spill":
            from tailrace.transfer.queue.storage.spill import SpillStorage

            directory = Path(config.directory)
            return SpillStorage(directory=directory, memory_bytes=config.memory_bytes, max_bytes=config.max_bytes)
        case "redis":
            try:
                from tailrace.transfer.queue.storage.redis import RedisStorage
            except ModuleNotFoundError:
                raise QueueError("storage in Redis needs the package redis: pip install 'tailrace[redis]'") from None
            return RedisStorage(url=config.url, name=name, timeout_s=config.timeout_s, max_bytes=config.max_bytes)
        case "adapter":
            from tailrace.transfer.queue.storage.adapter import StorageArgs, make_adapter

            return make_adapter(config, StorageArgs(name=name, max_bytes=config.max_bytes))


def clear_storage(config: "StorageConfig", *, name: str) -> None:
    """Remove the parts that an ended unit of this name has left in Redis. Other storages end with their unit, or, of an
    adapter, are left to it.

    Raises:
        QueueError: the server cannot be reached.
    """
    if config.type == "redis":
        with closing(make_storage(config, name=name)) as storage:
            storage.drop(storage.parts())

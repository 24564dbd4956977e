"""Checks what a queue needs of this machine, before anything is written. What is missing is one line."""

import os
import tempfile
from pathlib import Path

import zmq

from tailrace.config.transfer import (
    AdapterStorageConfig,
    ArenaStorageConfig,
    MemoryStorageConfig,
    RedisStorageConfig,
    ServiceQueueConfig,
    SpillStorageConfig,
    StorageConfig,
)
from tailrace.errors import ConfigError, QueueError
from tailrace.transfer.queue.storage.adapter import load_storage_factory
from tailrace.transfer.queue.storage.factory import make_storage


def check_service(config: ServiceQueueConfig) -> None:
    """Check that processes of this machine can serve the queue of `config`.

    Raises:
        UserError: they cannot listen at the address, or cannot have the storage. It names the key.
    """
    check_place(config.listen, config.storage, keys="queue.")


def check_place(listen: str, storage: StorageConfig, *, keys: str) -> None:
    """Check that a process of this machine can listen at an address and have a storage.

    `keys`: the beginning of the names of their keys, such as `queue.`.

    Raises:
        UserError: it cannot. It names the key.
    """
    _check_listen(listen, keys)
    _check_storage(storage, f"{keys}storage")


def _check_listen(listen: str, keys: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        try:
            socket.bind(f"tcp://{listen}:*")
        except zmq.ZMQError as error:
            why = os.strerror(error.errno or 0)
            raise ConfigError(
                f"{keys}listen={listen}: this machine cannot listen there: {why}; give one of its own "
                f"addresses: 127.0.0.1, or the one by which other machines reach it"
            ) from None


def _check_storage(config: StorageConfig, key: str) -> None:
    match config:
        case MemoryStorageConfig():
            return
        case ArenaStorageConfig():
            wanted = f"a file system in memory that this user can write to, or {key}.type=memory"
            _check_directory(config.path, key, wanted)
        case SpillStorageConfig():
            _check_directory(config.path, key, "one on a disk that this user can write to")
        case RedisStorageConfig():
            try:
                make_storage(config, name="tailrace-preflight").close()
            except QueueError as error:
                raise ConfigError(
                    f"{key}.type=redis: {error}; start a server, or give {key}.url another one's"
                ) from None
        case AdapterStorageConfig():
            load_storage_factory(config, f"{key}.path")


def _check_directory(directory: Path, key: str, wanted: str) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="tailrace-"):
            known = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"{key}.directory={directory}: {error.strerror}; give {wanted}") from None
    if known.f_blocks and not known.f_bavail:
        raise ConfigError(f"{key}.directory={directory} is full; make room there, or give {wanted}")

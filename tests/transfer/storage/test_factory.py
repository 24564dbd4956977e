import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tailrace.config.transfer import StorageConfig
from tailrace.errors import QueueError
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.factory import make_storage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.storage.spill import SpillStorage


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "memory"}, MemoryStorage),
        ({"type": "arena", "directory": "{tmp}"}, ArenaStorage),
        ({"type": "spill", "directory": "{tmp}", "memory_bytes": 1}, SpillStorage),
    ],
)
def test_a_configuration_makes_the_storage_of_its_type(config: dict[str, Any], expected: type, tmp_path: Path) -> None:
    values = {key: str(tmp_path) if value == "{tmp}" else value for key, value in config.items()}
    storage = make_storage(parse(values), name="queue")
    assert type(storage) is expected
    storage.close()


def test_a_configuration_makes_a_storage_in_redis_under_the_name(redis_url: str) -> None:
    from tailrace.transfer.queue.storage.redis import RedisStorage

    storage = make_storage(parse({"type": "redis", "url": redis_url}), name="factory")
    assert type(storage) is RedisStorage
    storage.close()


def test_redis_without_its_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "tailrace.transfer.queue.storage.redis", raising=False)
    with pytest.raises(QueueError, match=r"pip install 'tailrace\[redis\]'"):
        make_storage(parse({"type": "redis"}), name="queue")


def parse(values: dict[str, Any]) -> StorageConfig:
    adapter: TypeAdapter[StorageConfig] = TypeAdapter(StorageConfig)
    return adapter.validate_python(values)

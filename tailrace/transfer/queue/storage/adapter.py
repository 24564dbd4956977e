"""A storage that somebody else wrote, named by the dotted path of its factory; see docs/adapters.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailrace.host.user_code import check_made, load_factory
from tailrace.transfer.queue.storage.base import Storage

if TYPE_CHECKING:
    from tailrace.config.transfer import AdapterStorageConfig

_KEY = "queue.storage.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageArgs:
    """What the factory of a storage gets."""

    name: str
    """The name of queue and unit. No other unit has it, and a restarted unit has the same."""
    max_bytes: int
    """The most bytes of all parts together."""


def load_storage_factory(config: "AdapterStorageConfig", key: str) -> Callable[..., Any]:
    """Load the factory that `config` names, and check that it can be called. `key`: that of its path, for messages.

    Raises:
        UserError: the factory is not there, or cannot be called so.
    """
    return load_factory(key, config.path, "args", **config.options)


def make_adapter(config: "AdapterStorageConfig", args: StorageArgs) -> Storage:
    """Return `f(args, **options)`, where `f` is the configured factory.

    Raises:
        UserError: `f` cannot be called, or returns something other than a storage.
    """
    made = load_storage_factory(config, _KEY)(args, **config.options)
    return check_made(_KEY, config.path, made, Storage)  # type: ignore[type-abstract]

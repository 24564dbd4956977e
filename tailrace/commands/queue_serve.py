"""`tailrace queue serve`: a queue in processes of its own, for clients that come and go."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from shlex import quote

from tailrace.config.load import keys_of, load_as, load_config
from tailrace.config.queue_table import ServeConfig
from tailrace.config.run import RunConfig
from tailrace.config.transfer import AdapterStorageConfig, RedisStorageConfig, ServiceQueueConfig
from tailrace.errors import ConfigError, PeerLost, nearest
from tailrace.host.interrupt import stop_signals
from tailrace.host.metrics_server import check_port
from tailrace.host.streams import outliving_readers
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.look import read_stats
from tailrace.transfer.queue.processes.metrics import SETTING, serving_metrics
from tailrace.transfer.queue.processes.several import SeveralProcesses, queue_processes
from tailrace.transfer.queue.processes.supervisor import QueueProcesses

_LOOK_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The queue that is to be served."""

    config: ServeConfig
    of_run: bool
    """Whether the table is that of a training run, which can then use the queue."""


def load_served(recipe: Path, overrides: Sequence[str]) -> Served:
    """Load the table of a training run, or the table that the recipe itself describes.

    Raises:
        ConfigError: the recipe is neither; see also `load_as`.
    """
    keys = keys_of(recipe)
    if "table" in keys:
        own = load_as(ServeConfig, recipe, overrides)
        if own.queue.policies:
            raise ConfigError(
                f"{recipe}: queue.policies is for the recipe of a run; a task of a table has its policy in table.tasks"
            )
        return Served(config=own, of_run=False)
    _check_recipe(recipe, keys)
    from tailrace.run.queue import run_table

    config = load_config(recipe, [*overrides, "queue.type=service"])
    assert isinstance(config.queue, ServiceQueueConfig), "the last override counts"
    table = run_table(config)
    return Served(config=ServeConfig(queue=config.queue, table=table), of_run=True)


def _check_recipe(recipe: Path, keys: set[str]) -> None:
    """Check that a recipe without a table is that of a run; `load_config` finds a slip in its keys."""
    if keys.intersection(RunConfig.model_fields.keys() - ServeConfig.model_fields.keys()):
        return
    for key in sorted(keys.difference(ServeConfig.model_fields)):
        if near := nearest(key, [*ServeConfig.model_fields, *RunConfig.model_fields]):
            raise ConfigError(f"{recipe}: unknown key {key}; did you mean {near}?")
    raise ConfigError(
        f"{recipe} is neither a table nor a training recipe: it has {', '.join(sorted(keys)) or 'no keys'}; "
        f"a table has the key table, a recipe model, prompts and others"
    )


def serve(served: Served, directory: Path, *, metrics_port: int | None) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, going on with what an earlier queue has left in `directory`.

    Raises:
        UserError, QueueError: see `QueueProcesses`; the port of the metrics is taken.
    """
    if metrics_port is not None:
        check_port(metrics_port, setting=SETTING)
    config = served.config
    processes = queue_processes(config.queue, config.table, directory, resume=True)
    asked: SimpleQueue[bool] = SimpleQueue()  # may be put to in a signal handler
    """Requests to end the queue; False where it has been given up."""
    processes.on_given_up(lambda: asked.put(False))

    def stop() -> None:
        asked.put(True)
        processes.stop()

    with outliving_readers(), _on_signals(stop), processes, ExitStack() as stack:
        stack.enter_context(_on_signals(lambda: asked.put(True)))
        for line in greeting(served, processes.connection):
            print(line)
        if (stats := _look(processes)) and stats.lost_groups:
            print(f"{stats.lost_groups} groups are lost and have to be put again: the storage has not kept their rows.")
        if metrics_port is not None:
            port = stack.enter_context(serving_metrics(processes.address, metrics_port))
            print(f"Metrics: http://127.0.0.1:{port}/metrics")
        print(end="", flush=True)
        if asked.get():
            _say_what_goes(processes, config.queue)


def greeting(served: Served, connection: Path) -> list[str]:
    """Return the lines that say how to use the queue."""
    if served.of_run:
        use = [
            f"Serving. One run can use this queue, with: queue.type=remote {quote(f'queue.connection={connection}')}"
        ]
    else:
        use = [
            "Serving. Use this queue from Python:",
            "    from pathlib import Path",
            "    from tailrace.transfer.queue.address import QueueAddress",
            "    from tailrace.transfer.queue.client.sync_queue import SyncQueue",
            f'    queue = SyncQueue(QueueAddress.read(Path({str(connection)!r})), name="...")',
        ]
    return [*use, f"Watch it with: tailrace queue top {quote(str(connection))}"]


def _say_what_goes(processes: QueueProcesses | SeveralProcesses, config: ServiceQueueConfig) -> None:
    if isinstance(config.storage, RedisStorageConfig):
        return
    if (stats := _look(processes)) and stats.rows:
        kind = f"queue.storage.type={config.storage.type}"
        if isinstance(config.storage, AdapterStorageConfig):
            print(f"{stats.rows} rows are dropped, unless the storage of {kind} is lasting", flush=True)
        else:
            print(
                f"{stats.rows} rows are dropped: {kind} has them while the queue is served, redis beyond that",
                flush=True,
            )


def _look(processes: QueueProcesses | SeveralProcesses) -> QueueStats | None:
    try:
        return read_stats(processes.address, name="serve", limit_s=_LOOK_LIMIT_S)
    except PeerLost:
        return None  # the controller has just died; these counts are worth no wait


@contextmanager
def _on_signals(then: Callable[[], object]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: then()) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

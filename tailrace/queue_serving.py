"""`tailrace queue serve`: a queue in processes of its own, for clients that come and go."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tailrace.config.load import keys_of, load_as, load_config
from tailrace.config.queue_table import ServeConfig
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.interrupt import SIGNALS
from tailrace.transfer.queue.metrics import serving_metrics
from tailrace.transfer.queue.processes import QueueProcesses


def load_served(recipe: Path, overrides: Sequence[str]) -> ServeConfig:
    """The table of a training run, or one that the recipe describes itself.

    Raises:
        ConfigError: see `load_as`.
    """
    if "table" in keys_of(recipe):
        return load_as(ServeConfig, recipe, overrides)
    from tailrace.algorithms.factory import make_algorithm  # takes seconds
    from tailrace.run_queue import run_table

    config = load_config(recipe, [*overrides, "queue.type=service"])
    assert isinstance(config.queue, ServiceQueueConfig), "the last override counts"
    return ServeConfig(queue=config.queue, table=run_table(config, make_algorithm(config.algorithm)))


def serve(config: ServeConfig, directory: Path, *, metrics_port: int | None) -> None:
    """Serve until SIGINT or SIGTERM, going on with what an earlier queue has left in `directory`.

    Raises:
        UserError, QueueError: see `QueueProcesses`.
        OSError: the port of the metrics is taken.
    """
    processes = QueueProcesses(config.queue, config.table, directory, resume=True)
    with _stopped_by_signals(processes), processes, ExitStack() as stack:
        print(f"Serving. One run can use this queue, with: queue.type=remote queue.connection={processes.connection}")
        print(f"Watch it with: tailrace queue top {processes.connection}", flush=True)
        if metrics_port is not None:
            port = stack.enter_context(serving_metrics(processes.address, metrics_port))
            print(f"Metrics: http://127.0.0.1:{port}/metrics", flush=True)
        processes.wait()


@contextmanager
def _stopped_by_signals(processes: QueueProcesses) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: processes.stop()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""A queue's counts for Prometheus: each scrape asks the controller once."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.errors import WireError
from tailrace.host.metrics_server import MetricsServer
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import QueueStats
from tailrace.transfer.queue.client.look import read_stats

SETTING = "--metrics-port"
"""Who asks for the port."""
_LIMIT_S = 5.0
"""For the controller to answer; below the ten seconds that Prometheus waits by default."""


@contextmanager
def serving_metrics(address: QueueAddress, port: int) -> Iterator[int]:
    """Answer scrapes at `port` of this machine alone, from a thread, in the block: the port, for 0 one that is free.

    Raises:
        UserError: the port cannot be had, such as one that is taken.
    """
    registry = CollectorRegistry()
    registry.register(_Scrape(address))
    with closing(MetricsServer(registry, port, setting=SETTING)) as server:
        yield server.port


class _Scrape(Collector):
    def __init__(self, address: QueueAddress) -> None:
        self._address = address

    def collect(self) -> Iterator[Metric]:
        try:
            stats = read_stats(self._address, name="metrics", limit_s=_LIMIT_S)
        except WireError:  # it does not answer, or is another queue by now, with another token
            yield _up(0)
            return
        yield _up(1)
        yield from _of_queue(stats)
        yield from _of_tasks(stats)
        yield from _of_units(stats)


def _up(value: int) -> Metric:
    return GaugeMetricFamily("tailrace_queue_up", "Whether the controller answers this token.", value)


def _of_queue(stats: QueueStats) -> Iterator[Metric]:
    gauges = (
        ("rows", "Rows stored.", stats.rows),
        ("bytes", "Bytes of cells stored.", stats.bytes),
        ("blocked_puts", "Producers waiting to put rows.", stats.blocked_puts),
        ("weight_version", "Newest weight version that the queue has heard of.", stats.version),
        ("lost_groups", "Groups that have to be put again.", stats.lost_groups),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"tailrace_queue_{name}", text, value)
    yield CounterMetricFamily("tailrace_queue_put_wait_seconds", "Time that puts had to wait.", stats.put_wait_s)


def _of_tasks(stats: QueueStats) -> Iterator[Metric]:
    rows = GaugeMetricFamily("tailrace_queue_task_rows", "Rows of a task by state.", labels=["task", "state"])
    claims = GaugeMetricFamily("tailrace_queue_task_claims", "Consumers waiting for rows.", labels=["task"])
    consumed = CounterMetricFamily("tailrace_queue_task_consumed_rows", "Rows consumed.", labels=["task"])
    expired = CounterMetricFamily(
        "tailrace_queue_task_expired_rows", "Rows whose lease expired or whose holder died.", labels=["task"]
    )
    waited = CounterMetricFamily("tailrace_queue_task_wait_seconds", "Time that claims had to wait.", labels=["task"])
    for name, task in stats.tasks.items():
        for state in ("waiting", "ready", "leased"):
            rows.add_metric([name, state], getattr(task, state))
        claims.add_metric([name], task.claims)
        consumed.add_metric([name], task.consumed)
        expired.add_metric([name], task.expired)
        waited.add_metric([name], task.wait_s)
    yield from (rows, claims, consumed, expired, waited)


def _of_units(stats: QueueStats) -> Iterator[Metric]:
    alive = GaugeMetricFamily("tailrace_queue_unit_alive", "Whether a unit gives signs of life.", labels=["unit"])
    rows = GaugeMetricFamily("tailrace_queue_unit_rows", "Rows of a unit.", labels=["unit"])
    size = GaugeMetricFamily("tailrace_queue_unit_bytes", "Bytes of cells that a unit stores.", labels=["unit"])
    bound = GaugeMetricFamily("tailrace_queue_unit_max_bytes", "The most bytes that a unit stores.", labels=["unit"])
    for unit in stats.units:
        for family, value in ((alive, unit.alive), (rows, unit.rows), (size, unit.bytes), (bound, unit.max_bytes)):
            family.add_metric([unit.name], value)
    yield from (alive, rows, size, bound)

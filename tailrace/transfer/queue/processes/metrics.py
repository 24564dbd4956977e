"""Serves a queue's counts to Prometheus: each scrape asks the controller once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.errors import WireError
from tailrace.host.metrics_server import MetricsServer
from tailrace.registers.prometheus import Series
from tailrace.registers.queue import QUEUE_COUNTS, TASK_COUNTS, UNIT_COUNTS, UP, QueueCount
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.look import read_stats

SETTING = "--metrics-port"
"""The setting that names the port."""
_LIMIT_S = 5.0
"""Seconds for the controller to answer; below the 10 s that Prometheus waits by default."""


@contextmanager
def serving_metrics(address: QueueAddress, port: int) -> Iterator[int]:
    """Answer scrapes from a thread while the block runs, from this machine alone. The value is the port.

    `port`: 0 for one that is free.

    Raises:
        UserError: the port cannot be used, for example because it is taken.
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
        except WireError:  # the queue does not answer, or another one with another token is there now
            yield _up(0)
            return
        yield _up(1)
        yield from _families(QUEUE_COUNTS, {(): stats})
        yield from _families(TASK_COUNTS, {(name,): task for name, task in stats.tasks.items()})
        yield from _families(UNIT_COUNTS, {(unit.name,): unit for unit in stats.units})


def _up(value: int) -> Metric:
    return GaugeMetricFamily(UP.name, UP.help, value)


def _families(counts: Iterable[QueueCount], stats: Mapping[tuple[str, ...], object]) -> Iterator[Metric]:
    """Yield the metrics of some counts. `stats`: the objects with the fields, by the values of their labels."""
    families: dict[Series, GaugeMetricFamily | CounterMetricFamily] = {}
    for count in counts:
        series = count.series
        kind = CounterMetricFamily if series.type == "counter" else GaugeMetricFamily
        family = families.setdefault(series, kind(series.name, series.help, labels=series.labels))
        state = [count.name] if "state" in series.labels else []
        for labels, holder in stats.items():
            family.add_metric([*labels, *state], getattr(holder, count.name))
    yield from families.values()

"""A sink that serves the figures of a run to Prometheus as they arise; `tailrace.registers` has the series."""

from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from tailrace.events import Event
from tailrace.host.metrics_server import MetricsServer
from tailrace.registers import prometheus as series
from tailrace.registers.events import ABOUT, EventKind
from tailrace.registers.metrics import STALENESS
from tailrace.registers.phases import PURPOSES, STATES
from tailrace.registers.prometheus import Series
from tailrace.registers.queue import QUEUE_COUNTS, TASK_COUNTS, TASK_ROWS
from tailrace.report.workers import worker_of

SETTING = "observe.metrics_port"
"""The key of a recipe that sets the port."""
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

M = TypeVar("M", bound=MetricWrapperBase)


class PrometheusSink:
    """Counts and gauges of a run, at `http://127.0.0.1:<port>/metrics`. A resumed run counts from 0 again."""

    def __init__(self, port: int) -> None:
        """Serve from now on.

        Raises:
            UserError: the port is not available.
        """
        registry = CollectorRegistry()
        self._step = _StepMetrics(registry)
        self._workers = _WorkerMetrics(registry)
        self._queue = _QueueMetrics(registry)
        self._server = MetricsServer(registry, port, setting=SETTING)
        self.port = self._server.port

    def __call__(self, event: Event) -> None:
        """Take one event; ignore an event that no series shows."""
        match event.task:
            case EventKind.RUN:
                self._step.begin(event)
            case EventKind.STEP:
                self._step.add(event)
            case EventKind.EVALUATION:
                self._step.evaluate(event)
            case EventKind.QUEUE:
                self._queue.set(event)
            case _:
                self._workers.add(event)

    def close(self) -> None:
        """Free the port."""
        self._server.close()


def _made(kind: type[M], entry: Series, registry: CollectorRegistry) -> M:
    return kind(entry.name, entry.help, entry.labels, registry=registry)


class _StepMetrics:
    """The series of training."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = _made(Gauge, series.TOTAL_STEPS, registry)
        self._steps = _made(Gauge, series.TRAINED_STEPS, registry)
        self._resumes = _made(Counter, series.RESUMES, registry)
        self._seconds = _made(Gauge, series.STEP_SECONDS, registry)
        self._last = _made(Gauge, series.STEP_METRIC, registry)
        self._evaluation = _made(Gauge, series.EVALUATION_METRIC, registry)
        self._samples = _made(Counter, series.SAMPLES, registry)
        self._tokens = _made(Counter, series.TOKENS, registry)
        self._staleness = Histogram(series.STALENESS.name, series.STALENESS.help, buckets=_VERSIONS, registry=registry)

    def begin(self, event: Event) -> None:
        self._total.set(event.info.get("total_steps") or 0)
        self._resumes.inc(bool(event.info.get("resumed_from")))

    def evaluate(self, event: Event) -> None:
        self._evaluation.clear()
        for name, value in event.metrics.items():
            self._evaluation.labels(name).set(value)

    def add(self, event: Event) -> None:
        self._steps.set((event.step or 0) + 1)
        self._seconds.set(event.end - event.start)
        self._samples.inc(event.samples or 0)
        self._tokens.inc(event.tokens or 0)
        self._last.clear()
        for name, value in event.metrics.items():
            if name.startswith(STALENESS.prefix):
                for _ in range(int(value)):
                    self._staleness.observe(int(name.removeprefix(STALENESS.prefix)))
            else:
                self._last.labels(name).set(value)


class _WorkerMetrics:
    """The series of workers: their time, weights, starts and deaths. In a run of one process its actors count as
    workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = _made(Counter, series.WORKER_SECONDS, registry)
        self._phases = _made(Counter, series.WORKER_PHASE_SECONDS, registry)
        self._parts = _made(Counter, series.WORKER_PART_SECONDS, registry)
        self._memory = _made(Gauge, series.WORKER_MEMORY, registry)
        self._peak = _made(Gauge, series.WORKER_MEMORY_PEAK, registry)
        self._version = _made(Gauge, series.WEIGHT_VERSION, registry)
        self._counted = {task: _made(Counter, entry.series, registry) for task, entry in ABOUT.items() if entry.series}
        """The counters, by kind of event."""

    def add(self, event: Event) -> None:
        worker = worker_of(event)
        self._add_use(event, worker)
        if event.about.gives_version:
            self._version.labels(worker).set(event.version or 0)
        if event.task == EventKind.WORKER_STARTED:
            for counter in self._counted.values():
                counter.labels(worker)  # a series at 0 can be watched, an absent one cannot
        if event.task in self._counted:
            self._counted[event.task].labels(worker).inc()

    def _add_use(self, event: Event, worker: str) -> None:
        """Add what the worker tells about its time and its memory."""
        match event.task:
            case EventKind.ACTIVITY:
                for state in STATES:
                    self._seconds.labels(worker, state).inc(event.metrics.get(state, 0.0))
            case EventKind.BREAKDOWN:
                for name, seconds in event.metrics.items():
                    phase, is_part, part = name.partition("/")
                    series = self._parts.labels(worker, phase, part) if is_part else self._phases.labels(worker, phase)
                    series.inc(seconds)
            case EventKind.MEMORY:
                for purpose in PURPOSES.keys() & event.metrics.keys():
                    self._memory.labels(worker, purpose).set(event.metrics[purpose])
                self._peak.labels(worker).set(event.metrics["peak"])


class _QueueMetrics:
    """The series of the queue, under the names that a served queue has for them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = _made(Gauge, TASK_ROWS, registry)
        self._of_task = {
            count.name: _made(Counter, count.series, registry)
            for count in TASK_COUNTS
            if count.observed and count.series.type == "counter"
        }
        self._of_queue = {count.name: _made(Gauge, count.series, registry) for count in QUEUE_COUNTS if count.observed}
        self._had: dict[str, float] = {}
        """The newest values of the queue's counters: a queue that is restored from a checkpoint goes on from there."""

    def set(self, event: Event) -> None:
        for name, gauge in self._of_queue.items():
            gauge.set(event.metrics.get(name, 0.0))
        for name, value in event.metrics.items():
            count, _, task = name.partition("/")
            if count in self._of_task:
                self._of_task[count].labels(task).inc(max(0.0, value - self._had.get(name, value)))
                self._had[name] = value
            elif task:
                self._rows.labels(task, count).set(value)

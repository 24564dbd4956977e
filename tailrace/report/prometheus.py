"""A sink that serves what a run does to Prometheus, as it happens."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tailrace.activity import STATES
from tailrace.events import Event
from tailrace.host.metrics_server import MetricsServer
from tailrace.report.workers import VERSION_TASKS, worker_of

SETTING = "observe.metrics_port"
"""Who asks for the port."""
_STALENESS = "staleness/"
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class PrometheusSink:
    """Counts and gauges of a run, at `http://127.0.0.1:<port>/metrics`. A resumed run counts from 0 again."""

    def __init__(self, port: int) -> None:
        """Serve from now on.

        Raises:
            UserError: the port cannot be had.
        """
        registry = CollectorRegistry()
        self._step = _StepMetrics(registry)
        self._workers = _WorkerMetrics(registry)
        self._queue = _QueueMetrics(registry)
        self._server = MetricsServer(registry, port, setting=SETTING)
        self.port = self._server.port

    def __call__(self, event: Event) -> None:
        """Take one event; one that says nothing here is passed over."""
        match event.task:
            case "run":
                self._step.begin(event)
            case "step":
                self._step.add(event)
            case "evaluation":
                self._step.evaluate(event)
            case "queue":
                self._queue.set(event)
            case _:
                self._workers.add(event)

    def close(self) -> None:
        """Free the port."""
        self._server.close()


class _StepMetrics:
    """What was trained."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Gauge("tailrace_total_steps", "Training steps that the run is to make.", registry=registry)
        self._steps = Gauge("tailrace_trained_steps", "Training steps made so far.", registry=registry)
        self._resumes = Counter("tailrace_resumes", "Times that it went on from a checkpoint.", registry=registry)
        self._seconds = Gauge("tailrace_step_seconds", "Time that the last step took.", registry=registry)
        self._last = Gauge("tailrace_step_metric", "Figures of the last step.", ["name"], registry=registry)
        self._evaluation = Gauge(
            "tailrace_evaluation_metric", "Figures of the last evaluation.", ["name"], registry=registry
        )
        self._samples = Counter("tailrace_samples", "Samples trained on.", registry=registry)
        self._tokens = Counter("tailrace_tokens", "Response tokens trained on.", registry=registry)
        self._staleness = Histogram(
            "tailrace_staleness", "Of the samples trained on, in versions.", buckets=_VERSIONS, registry=registry
        )

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
            if name.startswith(_STALENESS):
                for _ in range(int(value)):
                    self._staleness.observe(int(name.removeprefix(_STALENESS)))
            else:
                self._last.labels(name).set(value)


class _WorkerMetrics:
    """What workers do and what becomes of them. In a run of one process its actors count as workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Counter(
            "tailrace_worker_seconds", "Time of a worker by what it did.", ["worker", "state"], registry=registry
        )
        self._version = Gauge(
            "tailrace_weight_version", "Newest weights that a worker has.", ["worker"], registry=registry
        )
        self._starts = Counter("tailrace_worker_starts", "Times that a worker started.", ["worker"], registry=registry)
        self._deaths = Counter("tailrace_worker_deaths", "Times that a worker died.", ["worker"], registry=registry)

    def add(self, event: Event) -> None:
        worker = worker_of(event)
        match event.task:
            case "activity":
                for state in STATES:
                    self._seconds.labels(worker, state).inc(event.metrics.get(state, 0.0))
            case task if task in VERSION_TASKS:
                self._version.labels(worker).set(event.version or 0)
            case "worker_started":
                self._starts.labels(worker).inc()
                self._deaths.labels(worker)  # 0 can be watched, an absent series not
            case "worker_died":
                self._deaths.labels(worker).inc()


class _QueueMetrics:
    """What the queue holds; under the names that a served queue gives it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._of_task = Gauge(
            "tailrace_queue_task_rows", "Rows of a task by state.", ["task", "state"], registry=registry
        )
        self._rows = Gauge("tailrace_queue_rows", "Rows stored.", registry=registry)
        self._bytes = Gauge("tailrace_queue_bytes", "Bytes of cells stored.", registry=registry)
        self._lost = Gauge("tailrace_queue_lost_groups", "Groups that have to be put again.", registry=registry)
        self._expired = Counter(
            "tailrace_queue_task_expired_rows",
            "Rows whose lease expired or whose holder died.",
            ["task"],
            registry=registry,
        )
        self._had_expired: dict[str, float] = {}
        """By task, as the queue has counted: one that is restored from a checkpoint goes on from there."""

    def set(self, event: Event) -> None:
        for name, value in event.metrics.items():
            state, _, task = name.partition("/")
            if state == "expired":
                self._expired.labels(task).inc(max(0.0, value - self._had_expired.get(task, value)))
                self._had_expired[task] = value
            elif task:
                self._of_task.labels(task, state).set(value)
        self._rows.set(event.metrics.get("rows", 0.0))
        self._bytes.set(event.metrics.get("bytes", 0.0))
        self._lost.set(event.metrics.get("lost_groups", 0.0))

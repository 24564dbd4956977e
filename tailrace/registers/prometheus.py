"""The series with which a run answers Prometheus. Their names are a contract with dashboards."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric of Prometheus."""

    name: str
    """The name as it is registered; a counter is scraped as `<name>_total`."""
    type: Literal["gauge", "counter", "histogram"] = "gauge"
    help: str
    """A sentence that Prometheus and `docs/metrics.md` show."""
    labels: tuple[str, ...] = ()
    note: str = ""
    """A further sentence for `docs/metrics.md`."""

    @property
    def scraped_name(self) -> str:
        """The name in a scrape."""
        return f"{self.name}_total" if self.type == "counter" else self.name


TOTAL_STEPS = Series(name="tailrace_total_steps", help="Training steps that the run is to make.")
TRAINED_STEPS = Series(
    name="tailrace_trained_steps", help="Training steps made so far.", note="After a resume 0 until its first step."
)
RESUMES = Series(
    name="tailrace_resumes",
    type="counter",
    help="Times that it went on from a checkpoint.",
    note="By `--resume`, or since its trainer had died.",
)
STEP_SECONDS = Series(name="tailrace_step_seconds", help="Time that the last step took.")
STEP_METRIC = Series(
    name="tailrace_step_metric",
    help="Figures of the last step.",
    labels=("name",),
    note="Without `staleness/<versions>`.",
)
EVALUATION_METRIC = Series(name="tailrace_evaluation_metric", help="Figures of the last evaluation.", labels=("name",))
SAMPLES = Series(name="tailrace_samples", type="counter", help="Samples trained on.")
TOKENS = Series(name="tailrace_tokens", type="counter", help="Response tokens trained on.")
STALENESS = Series(name="tailrace_staleness", type="histogram", help="Of the samples trained on, in versions.")
WORKER_SECONDS = Series(
    name="tailrace_worker_seconds",
    type="counter",
    help="Time of a worker by what it did.",
    labels=("worker", "state"),
    note="The states are those of `activity`.",
)
WORKER_PHASE_SECONDS = Series(
    name="tailrace_worker_phase_seconds",
    type="counter",
    help="The same time by phase.",
    labels=("worker", "phase"),
    note="The phases are the metrics of `breakdown`.",
)
WORKER_PART_SECONDS = Series(
    name="tailrace_worker_part_seconds",
    type="counter",
    help="Time of a phase by its parts, as far as they are known.",
    labels=("worker", "phase", "part"),
    note="The parts are the metrics `<phase>/<part>` of `breakdown`.",
)
WORKER_MEMORY = Series(
    name="tailrace_worker_memory_bytes",
    help="What the memory of a worker holds.",
    labels=("worker", "purpose"),
    note="The purposes are the metrics of `memory`, without its sums.",
)
WORKER_MEMORY_PEAK = Series(
    name="tailrace_worker_memory_peak_bytes",
    help="The most that a worker held at once since it told before.",
    labels=("worker",),
)
WEIGHT_VERSION = Series(
    name="tailrace_weight_version",
    help="Newest weights that a worker has.",
    labels=("worker",),
    note="Of the trainer: that it has published.",
)
WORKER_STARTS = Series(
    name="tailrace_worker_starts", type="counter", help="Times that a worker started.", labels=("worker",)
)
WORKER_DEATHS = Series(
    name="tailrace_worker_deaths", type="counter", help="Times that a worker died.", labels=("worker",)
)

RUN_SERIES = (
    TOTAL_STEPS,
    TRAINED_STEPS,
    RESUMES,
    STEP_SECONDS,
    STEP_METRIC,
    EVALUATION_METRIC,
    SAMPLES,
    TOKENS,
    STALENESS,
    WORKER_SECONDS,
    WORKER_PHASE_SECONDS,
    WORKER_PART_SECONDS,
    WORKER_MEMORY,
    WORKER_MEMORY_PEAK,
    WEIGHT_VERSION,
    WORKER_STARTS,
    WORKER_DEATHS,
)
"""The series of a run, without those of its queue."""

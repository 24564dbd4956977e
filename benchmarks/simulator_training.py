"""Predicted step times and memory of a trainer, beside those that prime-rl has published.

    trainer_step_error_pct   median error of the seconds of a step
    peak_memory_error_pct    median error of the largest memory that the allocator has reserved

The source is `prime_rl_baselines`, in the folder TAILRACE_DATA. One constant for time and one for memory are fitted for
each kind of GPU, on one half of its runs; the errors are those of the other half. The halves alternate in the order of
the SHA-256 of the files' names, so a kind has both. Runs that failed are in neither.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_high
from typing import Annotated, Any

import typer

from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import trainer_memory
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Adapters, Layout, MicroBatch, TrainingSetup

GIB = 2**30
ADAPTERS_KEPT = 4
"""prime-rl holds so many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run."""

    name: str
    kind: str
    config: Mapping[str, Any]
    step_s: float
    """Measured; 0 where the run failed."""
    reserved_gib: float

    @classmethod
    def read(cls, path: Path) -> "Run":
        """The run of a file."""
        values = json.loads(path.read_text(encoding="utf-8"))
        metrics = values["metrics"]
        return cls(
            name=path.stem.removeprefix("benchmark-").removesuffix("-cp1-ep1"),
            kind=path.name.split("-")[1].lstrip("0123456789x").upper(),
            config=values["config"],
            step_s=metrics["step_time"]["mean"],
            reserved_gib=metrics["peak_memory"]["gib"],
        )

    @property
    def order(self) -> str:
        """Where it is among the runs of its kind, before these are halved."""
        return hashlib.sha256(f"benchmark-{self.name}-cp1-ep1.json".encode()).hexdigest()

    @property
    def setup(self) -> TrainingSetup:
        """What was trained: all devices are one FSDP2 group, and every layer is checkpointed."""
        config = self.config
        rank = config["lora_rank"]
        return TrainingSetup(
            shape=find_shape(config["model_name"]),
            layout=Layout(
                dp=config["num_gpus"], sharding="full", checkpointing="full", offload=config["ac"] == "Offload"
            ),
            head="whole" if config["type"] == "sft" else "chunks",
            adapters=Adapters(rank=rank, kept=ADAPTERS_KEPT) if rank else None,
        )

    @property
    def batch(self) -> MicroBatch:
        """A micro-batch: one sequence."""
        return MicroBatch.of([self.config["seq_len"]])

    def predicted_s(self, inefficiency: float) -> float:
        """Seconds of a step."""
        pool = open_cluster(f"{self.config['num_gpus']}x{self.kind}").pools[0]
        times = AnalyticTrainingTimes(self.setup, pool, inefficiency=inefficiency)
        return times.step_s([self.batch] * self.config["micro_batches"])

    @property
    def inefficiency(self) -> float:
        """The constant with which the prediction is what was measured."""
        low, high = 0.01, 100.0
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.predicted_s(middle) < self.step_s else (low, middle)
        return high

    @property
    def allocated_gib(self) -> float:
        """Predicted, at the worst instant."""
        return trainer_memory(self.setup, self.batch).peak / GIB


def training_figures(data: Path) -> dict[str, Any]:
    """The figures; `data`: the folder of the data."""
    runs = [Run.read(path) for path in sorted((data / "prime_rl_baselines").glob("*.json"))]
    by_kind: defaultdict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.order):
        if run.config["success"]:
            by_kind[run.kind].append(run)
    kinds = {kind: _kind_figures(by_kind[kind]) for kind in sorted(by_kind)}
    unseen = {name: errors for figures in kinds.values() for name, errors in figures["unseen"].items()}
    return {
        "trainer_step_error_pct": _median(errors[0] for errors in unseen.values()),
        "peak_memory_error_pct": _median(errors[1] for errors in unseen.values()),
        "unseen_runs": len(unseen),
        "kinds": kinds,
        "out_of_memory": {run.name: round(run.allocated_gib, 1) for run in runs if _ran_out(run)},
    }


def _kind_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """The constants of a kind, and the errors (time, memory; %) of each run. In `runs`, the halves alternate."""
    fitted, unseen = runs[::2], runs[1::2]
    # of an even number, the larger of the two in the middle: a plan that fits and comes in time is worth more
    inefficiency = median_high(run.inefficiency for run in fitted)
    reserved = median_high(run.reserved_gib / run.allocated_gib for run in fitted)
    figures = {
        half: {run.name: _errors(run, inefficiency, reserved) for run in each}
        for half, each in (("fitted", fitted), ("unseen", unseen))
    }
    return {
        "inefficiency": round(inefficiency, 2),
        "reserved": round(reserved, 3),
        "step_error_pct": _median(step for step, _ in figures["unseen"].values()),
        "memory_error_pct": _median(memory for _, memory in figures["unseen"].values()),
        **figures,
    }


def _errors(run: Run, inefficiency: float, reserved: float) -> tuple[float, float]:
    step, memory = run.predicted_s(inefficiency) / run.step_s, run.allocated_gib * reserved / run.reserved_gib
    return round(100 * (step - 1), 1), round(100 * (memory - 1), 1)


def _median(errors: Iterable[float]) -> float:
    return round(median(abs(error) for error in errors), 1)


def _ran_out(run: Run) -> bool:
    return "OutOfMemory" in (run.config["error_reason"] or "")


def main(
    data: Annotated[Path | None, typer.Argument(help="The folder of the data.", envvar="TAILRACE_DATA")] = None,
) -> None:
    """Print the figures."""
    if data is None or not (data / "prime_rl_baselines").is_dir():
        print(json.dumps({"bench": "simulator_training", "skipped": "TAILRACE_DATA has no prime_rl_baselines"}))
        return
    print(json.dumps({"bench": "simulator_training", **training_figures(data)}))


if __name__ == "__main__":
    typer.run(main)

"""How many times longer than at its rates a Megatron trainer takes at most: a constant of `papers_setup`.

    python benchmarks/megatron_fit.py

NeMo-RL has published steps of dense models on H100 that Megatron-core trains, one step behind the engines
(nemo_rl_performance.csv in the folder TAILRACE_DATA). Updates and log-probabilities of a step come one after the other
on the trainer's devices, so they take no longer than the step. Each row so has the largest constant that it allows; the
least of these is what `papers_setup.MEGATRON` is. The last line is JSON.
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from scipy.optimize import brentq

from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch, TrainingSetup

MODELS = {"Llama-3.1-8B-Instruct": "Llama-3.1-8B", "Qwen3-32B": "Qwen3-32B"}
MOST = 10.0
Row = Mapping[str, str]


def rows(file: Path) -> Iterator[Row]:
    """Yield the steps of dense models in bf16 on H100 that are trained one step behind, on devices of their own."""
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            kind = row["gpu"], row["precision"], row["mode"], row["placement"]
            if kind == ("H100", "bf16", "1-off", "separate") and row["model"] in MODELS:
                yield row


def training_s(row: Row, inefficiency: float) -> float:
    """Seconds of updates and log-probabilities. Sequences are packed up to the longest that there may be."""
    devices = int(row["train_gpus"])
    tp, pp = int(row["train_tp"]) * int(row["train_cp"]), int(row["train_pp"])
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=devices // (tp * pp),
        sharding="optimizer",
        checkpointing="full" if row["activation_checkpointing"] == "true" else "none",
    )
    setup = TrainingSetup(shape=find_shape(MODELS[row["model"]]), layout=layout)
    times = AnalyticTrainingTimes(setup, open_cluster(f"{devices}xH100").pools[0], inefficiency=inefficiency)
    length = float(row["avg_seq_len"]) + float(row["implied_prompt_len"])
    packed = max(1, round(float(row["max_seq_len"]) / length))
    samples = int(row["samples_per_step"])
    updates = samples // int(row["train_global_batch"])
    each = [MicroBatch.of([length] * packed)] * max(1, round(samples / updates / layout.dp / packed))
    return updates * (times.step_s(each) + times.log_probs_s(each))


def largest(row: Row) -> float:
    """The constant under which the trainer takes as long as the step."""
    return float(brentq(lambda one: training_s(row, one) - float(row["step_time_s"]), 0.1, MOST))


def main() -> None:
    """Print the constants."""
    file = Path(os.environ.get("TAILRACE_DATA", "")) / "nemo_rl_performance.csv"
    if not file.is_file():
        print(f"skipped: {file} is not there; set TAILRACE_DATA to a folder that has it")
        print(json.dumps({"skipped": True}))
        return
    found = {f"{row['release']} {row['model']}": round(largest(row), 2) for row in rows(file)}
    print(json.dumps({"skipped": False, "largest": found, "least": min(found.values())}))


if __name__ == "__main__":
    main()

"""PolyTrace: the permitted staleness, and stages that do not scale."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from papers_setup import (
    DAPO,
    GRPO,
    SERVER,
    SLOTS,
    Published,
    System,
    Task,
    generation_s,
    pool_of,
    reasoning,
    simulated,
    split_of,
    task_of,
    trainer_of,
)
from papers_table import Row, Section

from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import MicroBatch, TrainingSetup
from tailrace.simulator.summary import Summary
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

NODE = 8
NETWORK = 25e9 / NODE
"""Bytes a second of a device of cluster A to other nodes: 200 Gbit/s a node."""
FAST = 200e9 / NODE
"""The same of cluster B: 1,600 Gbit/s."""
MODEL = "Qwen2.5-1.5B"
PROMPTS, GROUP_SIZE, PROMPT = 128, 8, 100
MOST = 32_000
BOUNDS = (0, 8, 16)
FEWER = (64, 32)
"""Sequences that an engine decodes together, in an experiment."""
SEARCHING, MATHEMATICS = (64, 128), (32, 128)
"""GPUs of figure 24."""
STEPS, WARM_UP = 24, 4
"""Training steps of the staleness table: more than the largest bound, so that it could bind."""

SYNC = System(policy="pull", host=SERVER, trainer="fsdp")
ASYNC = replace(SYNC, streaming=True, weights="in_flight")
VERL = System(placement="colocated", host=SERVER, trainer="fsdp")


def pool(devices: int) -> Pool:
    """Nodes of cluster A."""
    return pool_of("A800", devices, network=NETWORK)


def staleness(
    folder: Path, *, bounds: Sequence[int] = BOUNDS, slots: int = SLOTS, pool: Pool | None = None
) -> list[Summary]:
    """Simulate table 3: one node generates, and one trains. `pool`: two nodes, by default cluster B."""
    lengths = reasoning(folder, most=MOST, count=STEPS * PROMPTS * GROUP_SIZE)
    task = task_of(MODEL, DAPO, lengths, groups=PROMPTS, group_size=GROUP_SIZE, prompt=PROMPT)
    systems = [replace(ASYNC if bound else SYNC, max_staleness=bound, slots=slots) for bound in bounds]
    nodes = pool or pool_of("H800", 2 * NODE, network=FAST)
    scenarios = [replace(split_of(task, system, nodes, NODE), steps=STEPS) for system in systems]
    return [simulated(scenario, task.replay, warm_up=WARM_UP) for scenario in scenarios]


def searching(devices: int) -> float:
    """Seconds of the rollout of the searching task, whose steps have 256 groups of 8."""
    task = _of_workload("search-7b", "Qwen2.5-7B", groups=256)
    return generation_s(task, pool(devices), devices, VERL)[0]


def mathematics(devices: int) -> float:
    """Seconds of training on a step of the mathematics task, which has 96 groups of 8."""
    task = _mathematics()
    models, _ = trainer_of(task, pool(devices), devices, VERL)
    return models.step_s()


def exchanged(devices: int) -> float:
    """Seconds of an update of the same model on one sequence for each device."""
    task = _mathematics()
    _, layout = trainer_of(task, pool(devices), devices, VERL)
    times = AnalyticTrainingTimes(TrainingSetup(shape=task.shape, layout=layout), pool(devices))
    return times.step_s([MicroBatch.of([task.batches.tokens / (task.groups * GROUP_SIZE)])])


def _mathematics() -> Task:
    return _of_workload("math-32b", "Qwen2.5-32B", groups=96)


def _of_workload(name: str, model: str, *, groups: int) -> Task:
    trace = open_workload(name).sample(steps=1, groups=groups, group_size=GROUP_SIZE, seed=0)
    algorithm = DAPO if name == "math-32b" else GRPO
    return Task(shape=find_shape(model), algorithm=algorithm, replay=Replay.of(trace), groups=groups)


def report(published: Published, folder: Path) -> Section:
    """Simulate all, and compare. `folder`: TAILRACE_DATA."""
    runs = staleness(folder)
    rows = [*_table_3(published, runs), *_figure_24(published)]
    return Section(
        title="PolyTrace",
        assumptions=_assumptions(),
        rows=rows,
        experiments=_experiments(folder),
        findings=_findings(runs),
    )


def _experiments(folder: Path) -> list[str]:
    held = []
    for slots in FEWER:
        sync, ahead = staleness(folder, bounds=BOUNDS[:2], slots=slots)
        held.append(f"{sync.step_s / ahead.step_s:.2f} x at a staleness of {ahead.staleness:.1f} with {slots}")
    sync, ahead = staleness(folder, bounds=BOUNDS[:2], pool=pool(2 * NODE))
    few, many = (exchanged(devices) for devices in MATHEMATICS)
    return [
        f"Engines that decode fewer than {SLOTS} sequences together: asynchrony gains {', '.join(held)}. The paper's "
        "pipeline settles at 1 to 2; how many responses are under way is not stated.",
        f"Two nodes of cluster A instead of B: asynchrony gains {sync.step_s / ahead.step_s:.2f} x.",
        f"Updates with one sequence for each device, so that exchanges take most of the time: one on {MATHEMATICS[1]} "
        f"GPUs takes {many / few:.2f} x of the time of one on {MATHEMATICS[0]} ({many:.1f} s and {few:.1f} s). So "
        "training on more GPUs is slower only where each has as many micro-batches as before, and the network is "
        "slower.",
    ]


def _table_3(published: Published, runs: Sequence[Summary]) -> Iterator[Row]:
    hours = [published.value(f"end-to-end time, staleness at most {bound}") for bound in BOUNDS]
    for bound, each, run in list(zip(BOUNDS, hours, runs, strict=True))[1:]:
        yield Row(
            where="table 3",
            what=f"staleness at most {bound}, over 0",
            published=hours[0] / each,
            simulated=runs[0].step_s / run.step_s,
            why="how many responses are under way is not stated; see the experiments",
        )
    yield Row(
        where="table 3",
        what=f"staleness at most {BOUNDS[2]}, over {BOUNDS[1]}",
        published=hours[1] / hours[2],
        simulated=runs[1].step_s / runs[2].step_s,
    )


def _figure_24(published: Published) -> Iterator[Row]:
    rollout = [published.value("rollout time", devices=f"{devices} ") for devices in SEARCHING]
    training = [published.value("training time", devices=f"{devices} ") for devices in MATHEMATICS]
    yield Row(
        where="figure 24",
        what="searching, rollout on 128 GPUs, over 64",
        published=rollout[1] / rollout[0],
        simulated=searching(SEARCHING[1]) / searching(SEARCHING[0]),
        why="the longest chain of turns binds both clusters here, and exchanges of prefills do not grow with them",
    )
    yield Row(
        where="figure 24",
        what="mathematics, training on 128 GPUs, over 32",
        published=training[1] / training[0],
        simulated=mathematics(MATHEMATICS[1]) / mathematics(MATHEMATICS[0]),
        why="four times the devices have a quarter of the micro-batches here; see the experiments",
    )


def _assumptions() -> list[str]:
    return [
        "Table 3: two nodes of 8 H800 (cluster B), of which one generates and one trains. The model is not stated; its "
        f"accuracies are those of a distilled 1.5B model, so it is {MODEL} here. Responses are those of DeepSeek-R1 "
        f"(as for StreamRL), of up to {MOST:,} tokens: {PROMPTS} prompts with {GROUP_SIZE} responses, DAPO (no "
        f"reference). {STEPS} steps, of which {WARM_UP} do not count.",
        "With 0 the stages take turns; else samples stream, and weights are taken while responses are under way.",
        "Figure 24: A800, 200 Gbit/s a node. Searching: the shipped workload search-7b, 256 groups of 8, Qwen2.5-7B, "
        "the best TP degree. Mathematics: math-32b, 96 groups of 8, Qwen2.5-32B, DAPO, FSDP.",
    ]


def _findings(runs: Sequence[Summary]) -> list[str]:
    sync, eight, sixteen = runs
    return [
        f"What agrees: a bound of {BOUNDS[2]} has {eight.step_s / sixteen.step_s:.2f} x of the throughput of "
        f"{BOUNDS[1]}, since the longer stage binds.",
        "",
        f"What does not agree: asynchrony gains {sync.step_s / eight.step_s:.2f} x, since stages work at the "
        f"same time, "
        "and batches do not drain. The model, the lengths, the batch and the responses under way are not stated. The "
        f"trainer computes {eight.training:.0%} of the time here, and staleness grows to {eight.staleness:.1f}. The "
        "paper reports 1 to 2.",
        "",
        "More devices make no stage slower in the simulation. Exchanges that disturb each other, and ranks that wait "
        "for the last one, are not modelled.",
    ]

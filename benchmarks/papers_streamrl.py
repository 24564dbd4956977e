"""StreamRL: colocated baselines, streaming, asynchronous training, allocation, elasticity, two datacentres."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from papers_setup import (
    MEGATRON,
    PPO,
    PPO_OF_VERL,
    SERVER,
    SERVICE_LIMIT,
    SLOTS,
    STEPS,
    Published,
    System,
    Task,
    best_split,
    colocated,
    expectation_error,
    generation_s,
    pool_of,
    reasoning,
    separated,
    side_by_side,
    simulated,
    split_of,
    task_of,
    trainer_of,
)
from papers_table import Row, Section

from tailrace.errors import PlanError
from tailrace.planning.elasticity import Elasticity, ScaleDecision, ScaleLimits
from tailrace.planning.hardware.base import Link, Pool
from tailrace.types import IntArray

SMALL = "Qwen2.5-7B"
DEVICES = {SMALL: 32, "Qwen2.5-32B": 64, "Qwen2.5-72B": 128}
PROMPT = 200
BATCH = 1024
SHARE = 0.2
"""Of the samples, those that count as long: alpha in Algorithm 2."""
NODE = 8
PRICE = 2.85
"""Of an H800, where an H20 costs 1 (table 1)."""
SCALES = {"5K": 0.25, "10K": 0.5, "20K": 1.0}
FEWER = 32
"""Sequences that a replica decodes together, in an experiment."""
ITERATIONS = 20
"""In which the longest response grows from 10K to 20K in figure 11."""
NETWORK = 25e9
"""Bytes a second of an H800 to other nodes: 8 × 200 Gbit/s a node."""
CLOUD = 12.5e9 / NODE
"""The same of an H20: 100 Gbit/s a node."""

VERL = System(placement="colocated", host=SERVER)
COLOCATION = System(placement="colocated")
SYNC = System(streaming=True)
ASYNC = replace(SYNC, policy="skewness_aware").ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and a data set."""

    model: str
    scale: str
    lengths: Sequence[int]
    """Of the data set "20K"."""
    error: float
    """Of expected lengths, as a deviation of their logarithm."""

    @property
    def pool(self) -> Pool:
        """Its devices."""
        return pool_of("H800", DEVICES[self.model], network=NETWORK)

    def task(self, factor: float | None = None) -> Task:
        """What is trained, with lengths scaled by `factor`; by default by that of its data set."""
        scaled = np.maximum(1, np.rint(np.array(self.lengths) * (factor or SCALES[self.scale]))).astype(np.int64)
        return task_of(self.model, PPO, scaled, groups=BATCH, prompt=PROMPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step under each system of figure 8 and table 3."""

    setting: Setting
    verl: float
    colocation: float
    skewness: float
    algorithm: float
    """As `skewness`, with Algorithm 2 as it is printed and lengths that are known as well as its ranker knows them."""
    sync: float
    sync_skewness: float
    """As `sync`, where samples are placed by their lengths."""
    asynchronous: float
    sync_split: int
    """Devices that generate."""
    split: int
    """The same, asynchronous."""
    even: float
    """The asynchronous one where half of the devices generate."""


def measure(setting: Setting) -> Times:
    """Simulate all systems."""
    task, pool = setting.task(), setting.pool
    systems = {
        "colocation": COLOCATION,
        "skewness": replace(COLOCATION, policy="skewness_aware"),
        "algorithm": replace(COLOCATION, policy="streamrl", expectation_error=setting.error),
    }
    alone = {name: simulated(colocated(task, pool, each), task.replay).step_s for name, each in systems.items()}
    theirs = replace(task, algorithm=PPO_OF_VERL, trainers={})
    sync_split, sync = best_split(task, SYNC, pool)
    split, asynchronous = best_split(task, ASYNC, pool)
    return Times(
        setting=setting,
        verl=simulated(colocated(theirs, pool, VERL), task.replay).step_s,
        sync=sync.step_s,
        sync_skewness=simulated(
            split_of(task, replace(SYNC, policy="skewness_aware"), pool, sync_split), task.replay
        ).step_s,
        sync_split=sync_split,
        asynchronous=asynchronous.step_s,
        split=split,
        even=simulated(split_of(task, ASYNC, pool, pool.devices // 2), task.replay).step_s,
        **alone,
    )


def elastic(setting: Setting) -> list[ScaleDecision]:
    """What is decided after each iteration of figure 11; an addition adds a node to those that generate."""
    first, pool = setting.task(SCALES["10K"]), setting.pool
    splits = range(NODE, pool.devices, NODE)
    start = min(splits, key=lambda devices: max(_stages(first, pool, devices, pool.devices - devices)))
    rule = Elasticity(ScaleLimits(least=1, most=2 * pool.nodes, patience=1, cool_down=0))
    nodes, decisions = start // NODE, []
    for iteration in range(ITERATIONS):
        task = setting.task(SCALES["10K"] * (1 + iteration / (ITERATIONS - 1)))
        now, more, fewer = (
            _stages(task, pool, NODE * max(1, count), pool.devices - start) for count in (nodes, nodes + 1, nodes - 1)
        )
        generation_s, training_s = now
        decision = rule.decide(
            engines=nodes,
            generation_s=generation_s,
            training_s=training_s,
            saved_s=generation_s - more[0],
            lost_s=fewer[0] - generation_s,
        )
        nodes += decision.action == "add"
        decisions.append(decision)
    return decisions


def _stages(task: Task, pool: Pool, generate: int, train: int) -> tuple[float, float]:
    """Seconds of generation and of training."""
    return generation_s(task, pool, generate, ASYNC)[0], trainer_of(task, pool, train, ASYNC)[0].step_s()


def apart(setting: Setting, system: System, split: int, step_s: float) -> float:
    """Figure 12: samples a second for the same money with generation on H20 in another datacentre, over one place.

    The stage that is the shorter one gets fewer devices (Algorithm 1).

    Args:
        split: devices that generate in one place.
        step_s: seconds of a step there.
    """
    task, near = setting.task(), setting.pool
    cloud = pool_of("H20", 4 * NODE, network=CLOUD, place="cloud")
    m, n = cloud.devices, near.devices - split
    generation, training = generation_s(task, cloud, m, system)[0], trainer_of(task, near, n, system)[0].step_s()
    if generation < training:
        m = min(_halves(m), key=lambda k: abs(generation_s(task, cloud, k, system)[0] - training))
    else:
        n = min(
            _fitting(task, near, n, system),
            key=lambda k: abs(trainer_of(task, near, k, system)[0].step_s() - generation),
        )
    scenario = separated(task, system, cloud, near, generate=m, train=n, wide=Link(bytes_per_s=10e9, latency_s=1e-3))
    far = simulated(scenario, task.replay)
    cost = near.devices * PRICE / (m + n * PRICE)
    return step_s / far.step_s * cost


def _halves(devices: int) -> Iterator[int]:
    while devices >= 4:
        yield devices
        devices -= 4


def _fitting(task: Task, pool: Pool, devices: int, system: System) -> Iterator[int]:
    for count in range(devices, 0, -2):
        with suppress(PlanError):
            trainer_of(task, pool, count, system)
            yield count


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Ratios of the largest model where something else is assumed."""

    skewness: float
    sync: float
    asynchronous: float
    even: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A setting, and what its systems differ by from those of the rows."""

    setting: Setting
    inefficiency: float = MEGATRON
    slots: int = SLOTS

    def of(self, system: System) -> System:
        """A system, changed."""
        return replace(system, inefficiency=self.inefficiency, slots=self.slots)


def other(variant: Variant) -> Other:
    """Simulate a variant. Ratios are those of table 3 and figure 10."""
    task, pool = variant.setting.task(), variant.setting.pool
    colocation, sync, ahead = map(variant.of, (COLOCATION, SYNC, ASYNC))
    alone, skewed = (
        simulated(colocated(task, pool, each), task.replay).step_s
        for each in (colocation, replace(colocation, policy="skewness_aware"))
    )
    asynchronous = best_split(task, ahead, pool)[1].step_s
    even = simulated(split_of(task, ahead, pool, pool.devices // 2), task.replay).step_s
    return Other(
        skewness=alone / skewed,
        sync=alone / best_split(task, sync, pool)[1].step_s,
        asynchronous=alone / asynchronous,
        even=even / asynchronous,
    )


def other_cost(variant: Variant) -> float:
    """Figure 12 in a variant."""
    ahead = variant.of(ASYNC)
    split, near = best_split(variant.setting.task(), ahead, variant.setting.pool)
    return apart(variant.setting, ahead, split, near.step_s)


def _experiments(settings: Sequence[Setting], published: Published, times: Sequence[Times], cut: IntArray) -> list[str]:
    largest, small = settings[-1], settings[len(SCALES) - 1]
    variants = [
        Variant(setting=replace(largest, lengths=cut.tolist())),
        Variant(setting=largest, inefficiency=1.0),
        Variant(setting=largest, slots=FEWER),
    ]
    lengths, quick, few = side_by_side(other, variants)
    cost = other_cost(Variant(setting=small, slots=FEWER))
    late = cut[cut > cut.max() / 2].sum() / cut.sum()
    backends = published.value("StreamRL-Async throughput, highest") / max(
        each.verl / each.asynchronous for each in times
    )
    return [
        f"Lengths that are cut at 20,000 tokens instead of scaled: {_told(lengths)}. Then {late:.0%} of the tokens are "
        "in responses that are longer than half of the longest one, so that samples end late.",
        f"A trainer that reaches its rates (a constant of 1.0 instead of {MEGATRON}): {_told(quick)}.",
        f"Engines that decode at most {FEWER} sequences together, instead of {SLOTS}: {_told(few)}; figure 12 has "
        f"{cost:.2f} x for the longest data set. So figure 10 hangs on how many devices generation needs. The paper "
        "shows the devices of each stage only in a picture.",
        f"A verl that takes {backends:.2f} times as long: the highest gain of figure 8 is that of the paper. The paper "
        "says that a part of this gain is its own backends', and not how much.",
    ]


def _told(found: Other) -> str:
    return (
        f"table 3 has {found.skewness:.2f}, {found.sync:.2f} and {found.asynchronous:.2f} x, and figure 10 "
        f"{found.even:.2f} x"
    )


def report(published: Published, folder: Path) -> Section:
    """Simulate all, and compare. `folder`: TAILRACE_DATA."""
    most, count = round(published.value('maximum output length, dataset "20K"')), STEPS * BATCH
    lengths = reasoning(folder, most=most, count=count)
    cut = np.minimum(most, reasoning(folder, most=SERVICE_LIMIT, count=count))
    error = expectation_error(published.value("recall of the longest 20 %", model="Qwen2.5-7B"), SHARE)
    error *= float(np.log(lengths).std())
    settings = [
        Setting(model=model, scale=scale, lengths=lengths.tolist(), error=error)
        for model in DEVICES
        for scale in SCALES
    ]
    times = side_by_side(measure, settings)
    costs = [apart(each.setting, ASYNC, each.split, each.asynchronous) for each in times[: len(SCALES)]]
    decisions = elastic(settings[len(SCALES) - 1])
    rows = [*_figure_8(published, times), *_table_3(published, times[-1]), *_figure_10(published, times)]
    rows += _figure_12(published, times, costs)
    return Section(
        title="StreamRL",
        assumptions=_assumptions(lengths, error),
        rows=rows,
        experiments=_experiments(settings, published, times, cut),
        findings=_findings(published, times, decisions),
    )


def _figure_8(published: Published, times: Sequence[Times]) -> Iterator[Row]:
    gains = {
        ("StreamRL-Sync throughput", "verl"): [each.verl / each.sync for each in times],
        ("StreamRL-Sync throughput", "ColocationRL"): [each.colocation / each.sync for each in times],
        ("StreamRL-Async throughput", "verl"): [each.verl / each.asynchronous for each in times],
    }
    for (name, baseline), found in gains.items():
        why = _WHY_VERL if baseline == "verl" else _WHY_STAGES
        for end, value in (("lowest", min(found)), ("highest", max(found))):
            row = next(
                each
                for each in published.rows
                if each["quantity"].startswith(name) and end in each["quantity"] and each["baseline"] == baseline
            )
            yield Row(
                where="figure 8",
                what=f"{name} over {baseline}, {end}",
                published=float(row["value"]),
                simulated=value,
                why=why,
            )


def _table_3(published: Published, times: Times) -> Iterator[Row]:
    found = {
        "+ skewness-aware scheduling": (times.skewness, ""),
        "+ disaggregation and streaming": (times.sync, _WHY_STAGES),
        "+ asynchronous": (times.asynchronous, _WHY_STAGES),
    }
    for name, (step_s, why) in found.items():
        value = published.value(name, where="Table 3")
        yield Row(where="table 3", what=name, published=value, simulated=times.colocation / step_s, why=why)
    for what, row, step_s in (
        ("Algorithm 2 as printed, with the ranker's recall", "+ skewness-aware scheduling", times.algorithm),
        ("disaggregation and streaming, placed by lengths", "+ disaggregation and streaming", times.sync_skewness),
    ):
        yield Row(
            where="table 3",
            what=what,
            published=published.value(row, where="Table 3"),
            simulated=times.colocation / step_s,
            why="see below",
            headline=False,
        )


def _figure_10(published: Published, times: Sequence[Times]) -> Iterator[Row]:
    value = published.value("speedup by resource allocation, asynchronous")
    for each in times:
        if each.setting.scale == "20K" and each.setting.model != SMALL:
            yield Row(
                where="figure 10",
                what=f"chosen split over an even one, {each.setting.model}",
                published=value,
                simulated=each.even / each.asynchronous,
                why=_WHY_STAGES,
            )


def _figure_12(published: Published, times: Sequence[Times], costs: Sequence[float]) -> Iterator[Row]:
    splits = [each.split for each in times if each.setting.model == SMALL]
    generate = f"{min(splits)} to {max(splits)}" if len(set(splits)) > 1 else str(splits[0])
    for end, value in (("lowest", min(costs)), ("highest", max(costs))):
        yield Row(
            where="figure 12",
            what=f"throughput by cost with H20 far away, {end}",
            published=published.value(f"throughput by hardware cost, {end}", where="7.3"),
            simulated=value,
            why=f"in one place only {generate} of {DEVICES[SMALL]} devices generate here; the others stay as dear",
        )


_WHY_STAGES = (
    "how long each stage takes is shown only in a picture; see the experiments with other trainers and engines"
)
_WHY_VERL = "verl's and the paper's backends differ here by what a host takes of a step alone; see the experiments"


def _assumptions(lengths: IntArray, error: float) -> list[str]:
    p50, p90 = np.percentile(lengths, [50, 90])
    devices = ", ".join(f"{count} for {model}" for model, count in DEVICES.items())
    return [
        "Responses: the paper has DeepSeek-R1's to its own prompts, and shows their lengths only as a picture. Here "
        "they are those of a public service of DeepSeek-R1 with short prompts (ServeGen, client 66), scaled from "
        f"its limit of {SERVICE_LIMIT:,} tokens to 20,000: mean {lengths.mean():,.0f}, median {p50:,.0f}, 90th "
        f"percentile {p90:,.0f}. 10K and 5K are these, scaled, as in the paper.",
        f"Devices: H800, {devices}. The paper states 32 for 7B in figure 11, and 128 as the whole cluster.",
        f"PPO on {BATCH} samples, a prompt of {PROMPT} tokens each, one update a step: actor and critic are trained, "
        "and two forward passes come before (reference, critic). verl has one more, for the log-probabilities that one "
        "update has by itself. All share the trainer's devices in turns.",
        "verl: colocated, vLLM's host. ColocationRL: the same with an engine whose host takes no time. StreamRL: "
        "separated, streaming, the same engine; asynchronous with one step and delayed weights. All have the Megatron "
        "trainer.",
        "Skewness-aware placement is Tailrace's, with the longest first, and lengths are known: the paper finds that "
        "its ranker has most of what an oracle gains (figure 9). With the ranker's recall of 0.87 (expectations that "
        f"err by {error:.2f} in the logarithm) placement gains nothing here. One row has Algorithm 2 as printed, with "
        "that recall. Where the trainer streams and is not ahead, samples are placed in turn: placed by their lengths, "
        "all end at about the same time, and late. This was chosen after both had been simulated.",
        f"Figure 11: lengths grow within {ITERATIONS} iterations, which the paper does not state; a node of {NODE} "
        "joins by `planning.elasticity`. Figure 12: H20 with 80 Gbit/s between, Algorithm 1, prices of table 1.",
    ]


def _findings(published: Published, times: Sequence[Times], decisions: Sequence[ScaleDecision]) -> list[str]:
    largest, last = times[-1], decisions[-1]
    model, base = largest.setting.model, largest.colocation
    quickest = sum(each.asynchronous < min(each.verl, each.colocation, each.skewness, each.sync) for each in times)
    streaming = published.value("+ disaggregation and streaming", where="Table 3")
    added = [str(number) for number, each in enumerate(decisions, start=1) if each.action == "add"]
    return [
        f"What agrees: the asynchronous system is the quickest in {quickest} of {len(times)} settings. Skewness-aware "
        f"placement makes a colocated step of {model} {1 - largest.skewness / base:.0%} shorter. That step takes "
        f"{base:,.0f} s. The paper's takes 500 s or more, since the ten seconds of its transfer are less than 2 % of "
        "it.",
        "",
        f"The separated, streaming, synchronous system has {base / largest.sync:.2f} x of the colocated throughput "
        f"here, and {streaming:.2f} x in the paper. Placed by lengths it has {base / largest.sync_skewness:.2f} x. One "
        f"step ahead it has {base / largest.asynchronous:.2f} x.",
        "",
        f"What does not agree: with {SMALL} on {DEVICES[SMALL]} devices training takes so much of a step that "
        "streaming within one step gains little over taking turns, and that few devices generate. So a change "
        "to cheaper ones "
        "saves little.",
        "",
        "Figure 11: the paper adds a node after iterations 10 and 16. Here nodes are added after "
        f"{' and '.join(added) or 'none'} of {len(decisions)}. At the end generation takes {last.lead_s:+.0f} s more "
        f"than training, and another node would save {last.saved_s:.0f} s. The rule adds one when the first is the "
        "larger.",
    ]

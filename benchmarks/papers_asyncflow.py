"""AsyncFlow: tasks one at a time, streaming, asynchronous training, and how it scales beside a colocated system."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from papers_pat import Lengths
from papers_setup import (
    GRPO,
    MEGATRON,
    SERVER,
    STEPS,
    Algorithm,
    Published,
    System,
    Task,
    best_split,
    colocated,
    lognormal,
    pool_of,
    separated,
    side_by_side,
    simulated,
    task_of,
)
from papers_table import Row, Section

from tailrace.planning.hardware.base import Pool
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import TrainingSetup
from tailrace.simulator.scenario import Scenario, Scorer, TrainerTimes

PROMPTS, GROUP_SIZE = 512, 8
PROMPT = 100
MOST = 8192
SIZES = {"Qwen2.5-7B": (32, 64, 128, 256, 512), "Qwen2.5-32B": (64, 128, 256, 512, 1024)}
ABLATION = ("Qwen2.5-7B", 512)
THIRDS = (176, 160, 176)
"""NPUs of rollout, reference and update until these are chosen: a third each, in whole nodes."""

VERL = System(placement="colocated", host=SERVER, trainer="fsdp")
SEQUENTIAL = System(host=SERVER)
STREAMING = System(streaming=True, policy="pull", host=SERVER)
ASYNC = STREAMING.ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on some NPUs."""

    model: str
    devices: int
    lengths: Lengths
    prompts: int = PROMPTS
    group_size: int = GROUP_SIZE

    @property
    def pool(self) -> Pool:
        """Its devices."""
        return pool_of("Ascend-910B", self.devices)

    def task(self) -> Task:
        """What is trained."""
        count = STEPS * self.prompts * self.group_size
        drawn = lognormal(self.lengths.median, self.lengths.deviation, most=MOST, count=count)
        return task_of(self.model, GRPO, drawn, groups=self.prompts, group_size=self.group_size, prompt=PROMPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step under each system."""

    model: str
    devices: int
    verl: float
    asynchronous: float
    sequential: float = 0.0
    """With a third of the devices for each task; so is `streaming`. Simulated for the ablation alone."""
    streaming: float = 0.0

    @property
    def gain(self) -> float:
        """Throughput over verl."""
        return self.verl / self.asynchronous


def measure(setting: Setting) -> Times:
    """Simulate the systems."""
    task, pool = setting.task(), setting.pool
    even = {}
    if (setting.model, setting.devices) == ABLATION:
        for name, system in (("sequential", SEQUENTIAL), ("streaming", STREAMING)):
            even[name] = simulated(apart(task, system, pool), task.replay).step_s
    return Times(
        model=setting.model,
        devices=setting.devices,
        verl=simulated(colocated(task, pool, VERL), task.replay).step_s,
        asynchronous=best_split(task, ASYNC, pool)[1].step_s,
        **even,
    )


def apart(task: Task, system: System, pool: Pool) -> Scenario:
    """A system whose rollout, reference and update have devices of their own."""
    generate, refer, train = THIRDS
    update = replace(task, algorithm=Algorithm(trained=1, scored=1), trainers={})
    scenario = separated(update, system, pool, pool, generate=generate, train=train)
    times = AnalyticTrainingTimes(TrainingSetup(shape=task.shape), pool, inefficiency=MEGATRON)
    if system.streaming:
        return replace(scenario, reference=Scorer(times=times, workers=refer))
    before_s = times.log_probs_s(task.batches.micro_batches(refer))
    trainer = replace(scenario.trainer, times=After(scenario.trainer.times, before_s))
    return replace(scenario, trainer=trainer)


@dataclass(frozen=True, slots=True)
class After:
    """A trainer that begins with a step when a reference has scored all of it."""

    times: TrainerTimes
    before_s: float

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """See `TrainerTimes`."""
        return self.times.update_s(micro_batch)

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """See `TrainerTimes`."""
        return self.times.score_s(micro_batch)

    def optimizer_s(self) -> float:
        """Seconds of the optimizer step, and of the reference before all."""
        return self.before_s + self.times.optimizer_s()


def report(published: Published, lengths: Lengths) -> Section:
    """Simulate all, and compare."""
    settings = [
        Setting(model=model, devices=devices, lengths=lengths) for model, sizes in SIZES.items() for devices in sizes
    ]
    times = {(each.model, each.devices): each for each in side_by_side(measure, settings)}
    rows = [*_table_1(published, times[ABLATION]), *_figure_10(published, times)]
    return Section(
        title="AsyncFlow",
        assumptions=_assumptions(lengths),
        rows=rows,
        experiments=_experiments(lengths, times),
        findings=_findings(times),
    )


def padded(setting: Setting) -> float:
    """Seconds of a step of a verl that trains on responses padded to the longest that there may be."""
    task, pool = setting.task(), setting.pool
    mean = task.batches.tokens / (setting.prompts * setting.group_size)
    return simulated(colocated(task, pool, replace(VERL, slower=(PROMPT + MOST) / mean)), task.replay).step_s


def _experiments(lengths: Lengths, times: Mapping[tuple[str, int], Times]) -> list[str]:
    small, _ = SIZES
    ablation = Setting(model=small, devices=ABLATION[1], lengths=lengths)
    single = replace(ablation, prompts=PROMPTS * GROUP_SIZE, group_size=1)
    larger = [replace(ablation, devices=devices, prompts=2 * PROMPTS) for devices in (32, 512)]
    few, one, many = side_by_side(measure, [larger[0], single, larger[1]])
    pads = [(small, 32), (small, 256), ("Qwen2.5-32B", 512)]
    slow = side_by_side(padded, [Setting(model=model, devices=devices, lengths=lengths) for model, devices in pads])
    gains = [seconds / times[pad].asynchronous for seconds, pad in zip(slow, pads, strict=True)]
    told = ", ".join(
        f"{gain:.2f} x for {model} on {devices}" for gain, (model, devices) in zip(gains, pads, strict=True)
    )
    return [
        f"Responses that need not wait for the others of their prompt ({PROMPTS * GROUP_SIZE:,} prompts of one): "
        f"streaming gains {one.sequential / one.streaming:.2f} x over one task at a time.",
        f"{2 * PROMPTS:,} prompts a step: {small} gains {few.gain:.2f} x over verl on 32 and {many.gain:.2f} x on 512, "
        f"its linearity is {few.asynchronous / many.asynchronous / 16:.2f}; streaming gains "
        f"{many.sequential / many.streaming:.2f} x, and asynchronous {many.sequential / many.asynchronous:.2f} x.",
        f"A verl that trains on padded responses: {told}. The paper does not say whether its verl pads.",
    ]


def _table_1(published: Published, times: Times) -> Iterator[Row]:
    for name, step_s, why in (
        ("+ TransferQueue (streaming overlap)", times.streaming, _WHY_STREAMING),
        ("+ asynchronous optimization", times.asynchronous, _WHY_ASYNC),
    ):
        yield Row(
            where="table 1",
            what=f"{name}, over one task at a time",
            published=published.value(name),
            simulated=times.sequential / step_s,
            why=why,
        )
    yield Row(
        where="section 6.3",
        what="asynchronous over TransferQueue",
        published=1 + published.value("throughput gain of asynchronous optimization over TransferQueue") / 100,
        simulated=times.streaming / times.asynchronous,
        why="streaming hides less here, and asynchrony has the rest to hide",
    )


def _figure_10(published: Published, times: Mapping[tuple[str, int], Times]) -> Iterator[Row]:
    small, large = SIZES
    yield Row(
        where="figure 10",
        what="over verl, mean of all settings",
        published=published.value("throughput, mean of all settings"),
        simulated=statistics.fmean(each.gain for each in times.values()),
        why=_WHY_SMALL,
    )
    gains = {
        (small, 32): 1 + published.value("throughput gain", model=small) / 100,
        (small, 256): published.value("throughput, peak"),
        (small, 512): published.value("throughput", model=small),
        (large, 512): published.value("throughput", model=large),
    }
    for (model, devices), value in gains.items():
        yield Row(
            where="figure 10",
            what=f"over verl, {model} on {devices}",
            published=value,
            simulated=times[model, devices].gain,
            why=_WHY_SMALL,
        )
    for model, sizes in SIZES.items():
        first, last = times[model, sizes[0]], times[model, sizes[-1]]
        yield Row(
            where="figure 10",
            what=f"linearity, {model} from {sizes[0]} to {sizes[-1]}",
            published=published.value("linearity over a 16-fold larger cluster", model=model),
            simulated=first.asynchronous / last.asynchronous / (sizes[-1] / sizes[0]),
            why=_WHY_LINEAR,
        )


_WHY_STREAMING = "most prompts come late: when the last of eight responses has ended; see the experiments"
_WHY_ASYNC = "how devices are divided in the baseline is not stated"
_WHY_SMALL = "what verl's step has besides offloading and its host is not stated; see the experiments"
_WHY_LINEAR = "the batch is not stated; a larger one scales better, see the experiments"


def _assumptions(lengths: Lengths) -> list[str]:
    return [
        "Responses: neither lengths nor batch are stated. The data set is PAT's, and so are the lengths (lognormal, "
        f"median {lengths.median:,.0f}, deviation {lengths.deviation:.2f}), cut at {MOST:,} tokens.",
        f"GRPO on {PROMPTS} prompts of {PROMPT} tokens with {GROUP_SIZE} responses each, on all clusters; one update "
        "a step. Reference and old log-probabilities are computed on the trainer's devices.",
        "Devices: Ascend 910B of the catalogue, 16 a node; all engines have vLLM's host. verl: colocated, FSDP, each "
        "engine with its share of the prompts. AsyncFlow: Megatron trainer, engines that fetch prompts. Table 1: "
        f"rollout, reference and update have {', '.join(map(str, THIRDS))} NPUs of their own, until asynchrony, which "
        "includes the choice of the split. One at a time, a task begins when the one before has ended.",
    ]


def _findings(times: Mapping[tuple[str, int], Times]) -> list[str]:
    gains = ["/".join(f"{times[model, devices].gain:.2f}" for devices in sizes) for model, sizes in SIZES.items()]
    sizes = ["/".join(map(str, sizes)) for sizes in SIZES.values()]
    told = "; ".join(f"{model} {gain} x on {size}" for model, gain, size in zip(SIZES, gains, sizes, strict=True))
    return [
        f"What agrees: the asynchronous system gains more over verl on larger clusters ({told}). Generation there is "
        "bound by its longest responses, and training runs beside it.",
        "",
        "What does not agree: on small clusters computation binds both systems, and a split of the devices gains "
        "little over turns. Streaming alone gains less than in the paper. A prompt is trained on when the last of its "
        "responses has ended, and so most prompts come late.",
    ]

"""AsyncFlow: tasks one at a time, streaming, asynchronous training, and how it scales beside a colocated system."""

import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from papers_pat import Lengths
from papers_setup import (
    GRPO,
    PROCESSES,
    SERVER,
    STEPS,
    Published,
    System,
    Task,
    best_split,
    colocated,
    lognormal,
    pool_of,
    replay_of,
    simulated,
    split_of,
)
from papers_table import Row, Section

from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.catalogue import find_shape

PROMPTS, GROUP_SIZE = 512, 8
PROMPT = 100
MOST = 8192
SIZES = {"Qwen2.5-7B": (32, 64, 128, 256, 512), "Qwen2.5-32B": (64, 128, 256, 512, 1024)}
ABLATION = ("Qwen2.5-7B", 512)

VERL = System(placement="colocated", policy="pull", host=SERVER, trainer="fsdp")
SEQUENTIAL = System(policy="pull", host=SERVER)
STREAMING = replace(SEQUENTIAL, streaming=True)
ASYNC = replace(STREAMING, max_staleness=1, weights="delayed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on some NPUs."""

    model: str
    devices: int
    lengths: Lengths

    @property
    def pool(self) -> Pool:
        """Its devices."""
        return pool_of("Ascend-910B", self.devices)

    def task(self) -> Task:
        """What is trained."""
        count = STEPS * PROMPTS * GROUP_SIZE
        drawn = lognormal(self.lengths.median, self.lengths.deviation, most=MOST, count=count)
        replay = replay_of(drawn, prompt=PROMPT, group_size=GROUP_SIZE)
        return Task(shape=find_shape(self.model), algorithm=GRPO, replay=replay, groups=PROMPTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step under each system."""

    model: str
    devices: int
    verl: float
    asynchronous: float
    sequential: float = 0.0
    """With half of the devices for each stage; so is `streaming`. Simulated for the ablation alone."""
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
            even[name] = simulated(split_of(task, system, pool, pool.devices // 2), task.replay).step_s
    return Times(
        model=setting.model,
        devices=setting.devices,
        verl=simulated(colocated(task, pool, VERL), task.replay).step_s,
        asynchronous=best_split(task, ASYNC, pool)[1].step_s,
        **even,
    )


def report(published: Published, lengths: Lengths) -> Section:
    """Simulate all, and compare."""
    settings = [
        Setting(model=model, devices=devices, lengths=lengths) for model, sizes in SIZES.items() for devices in sizes
    ]
    with ProcessPoolExecutor(PROCESSES) as processes:
        times = {(each.model, each.devices): each for each in processes.map(measure, settings)}
    rows = [*_table_1(published, times[ABLATION]), *_figure_10(published, times)]
    return Section(title="AsyncFlow", assumptions=_assumptions(lengths), rows=rows, findings=_findings(times))


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
        why="streaming hides less here, so that asynchrony has more left to hide",
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


_WHY_STREAMING = (
    "a prompt is trained on when its last response has ended, of eight; so most prompts come late, and little is left "
    "to overlap"
)
_WHY_ASYNC = "the paper's baseline also runs reference and reward one after the other on devices of their own"
_WHY_SMALL = (
    "verl's colocated step has no cost here but offloading and its host; what makes it slower on small clusters in "
    "the paper is not stated"
)
_WHY_LINEAR = "the batch is the same on all clusters here, so that the longest responses bind the large ones"


def _assumptions(lengths: Lengths) -> list[str]:
    return [
        "Responses: neither lengths nor batch are stated. The data set is PAT's, and so are the lengths (lognormal, "
        f"median {lengths.median:,.0f}, deviation {lengths.deviation:.2f}), cut at {MOST:,} tokens.",
        f"GRPO on {PROMPTS} prompts of {PROMPT} tokens with {GROUP_SIZE} responses each, on all clusters; one update "
        "a step. Reference and old log-probabilities are computed on the trainer's devices.",
        "Devices: Ascend 910B of the catalogue, 16 a node; all engines have vLLM's host. verl: colocated, FSDP. "
        "AsyncFlow: Megatron trainer. Table 1: half of the devices for each stage until asynchrony, which includes "
        "the choice of the split.",
    ]


def _findings(times: Mapping[tuple[str, int], Times]) -> list[str]:
    gains = ["/".join(f"{times[model, devices].gain:.2f}" for devices in sizes) for model, sizes in SIZES.items()]
    sizes = ["/".join(map(str, sizes)) for sizes in SIZES.values()]
    told = "; ".join(f"{model} {gain} x on {size}" for model, gain, size in zip(SIZES, gains, sizes, strict=True))
    return [
        f"What agrees: the asynchronous system gains more over verl on larger clusters ({told}). Generation there is "
        "bound by its longest responses, and training runs beside it.",
        "",
        "What does not: on small clusters computation binds both systems, and a split of the devices gains little "
        "over turns. The paper gains there, too, from what verl's colocated step costs on its NPUs, which it does not "
        "break down. Streaming alone gains less than in the paper. A prompt is trained on when the last of its "
        "responses has ended, and so most prompts come late.",
    ]

"""PAT: generation whose TP degree changes while a batch drains, beside the best static degree."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from papers_setup import (
    DEGREES,
    GRPO,
    SEED,
    SLOTS,
    Published,
    System,
    Task,
    engines_of,
    offloading_s,
    pool_of,
    step_times,
    task_of,
    trainer_of,
)
from papers_table import Row, Section

from tailrace.planning.drain import Work, drain
from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.remaining import Bound, Unfinished
from tailrace.planning.step_times.base import MixedStepTimes
from tailrace.planning.step_times.rates import Host
from tailrace.planning.tp_decision import Snapshot
from tailrace.planning.tp_merge import context, merge
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, ProfileKey, SwitchCost, TPProfile, grid
from tailrace.planning.tp_switch import SwitchController

BATCH, GROUP_SIZE = 128, 8
PROMPT = 100
NODE = 8
NETWORK = 12.5e9 / NODE
"""Bytes a second of an A40 to other nodes: 100 Gbit/s a node."""
STEPS = 5
START = 2
"""The degree that generation begins with: that of the paper's switch (section 5.4), and of its predictions (5.5)."""
CONTEXT = 4096
"""Tokens of each sequence in figure 4, as in figure 6."""
TOKENS = 2**20
"""Cached tokens of a replica up to which steps are profiled."""
PROFILED = 131_072
"""The longest context that is profiled."""
HELD, HELD_CONTEXT, HELD_TP = 9, 12_288, 2
"""Sequences, and their contexts, at the switch whose parts are published, and the degree before."""
PREFILLS = ((1, 128), (1, 1024), (1, 8192), (1, 32_768), (16, 1024), (16, 8192), (128, 1024))
SYSTEM = System(placement="colocated", trainer="fsdp")
K = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lognormal distribution of lengths through two published shares."""

    log_median: float
    deviation: float

    @classmethod
    def of(cls, published: Published) -> "Lengths":
        """Through the shares of responses longer than 8K and than 16K (figure 3b)."""
        normal = statistics.NormalDist()
        shares = (published.value(f"responses longer than {n}K") / 100 for n in (8, 16))
        near, far = (normal.inv_cdf(1 - share) for share in shares)
        deviation = math.log(2) / (far - near)
        return cls(log_median=math.log(8 * K) - near * deviation, deviation=deviation)

    @property
    def median(self) -> float:
        """In tokens."""
        return math.exp(self.log_median)

    def batches(self, most: int) -> Iterator[list[int]]:
        """Yield batches in which a response at least has the most tokens that one may have."""
        random = np.random.default_rng(SEED)
        while True:
            drawn = self.median * np.exp(self.deviation * random.standard_normal(BATCH))
            lengths = np.clip(np.rint(drawn), 1, most).astype(np.int64)
            if lengths.max() == most:
                yield lengths.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The parts of a switch on A40 (figure 12)."""

    reshard_s: float
    """Of LLaMA3.1-8B."""
    capture_s: float
    rest_s: float
    state_s: float
    """For the keys and values of the sequences that were held."""

    @classmethod
    def of(cls, published: Published) -> "Switches":
        """Read them."""
        reshard_s, capture_s, state_s, all_s = (
            published.value(name)
            for name in ("weights, PAT", "CUDA graph recapture, PAT", "KV migration, PAT", "switch, PAT")
        )
        rest_s = all_s - reshard_s - capture_s - state_s
        return cls(reshard_s=reshard_s, capture_s=capture_s, rest_s=rest_s, state_s=state_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on some nodes."""

    model: str
    kind: str
    nodes: int = 1
    most: int
    """Tokens of the longest response."""

    @property
    def pool(self) -> Pool:
        """Its devices."""
        return pool_of(self.kind, self.nodes * NODE, network=NETWORK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Mean seconds over the steps of a setting."""

    static: dict[int, float]
    """Of generation, by the static TP degree."""
    adaptive: float
    switches: float
    """Of a step."""
    rest: float
    """Seconds of all but generation."""

    @property
    def best(self) -> float:
        """Of generation under the best static degree."""
        return min(self.static.values())

    def speedup(self, baseline: float) -> float:
        """Of a whole step, over one with so many seconds of generation."""
        return (baseline + self.rest) / (self.adaptive + self.rest)


def sglang(published: Published) -> Host:
    """What SGLang's host takes of a step, as the steps of one sequence in figure 4 say: the mean of the two degrees."""
    times = step_times(find_shape("Llama-3.1-8B"), pool_of("A40", NODE))
    left = (_published_s(published, tp, 1) - times.step_s(tp, 1, CONTEXT, 1) for tp in (START, NODE))
    return Host(step_s=statistics.fmean(left))


def _published_s(published: Published, tp: int, size: int) -> float:
    return published.value(f"decode latency a token, TP{tp}, global batch {size}") / 1e3


def measure(setting: Setting, lengths: Lengths, switches: Switches, host: Host) -> Times:
    """Simulate the steps of a setting. Each node has a part of the batch, and decides by itself."""
    batches = list(itertools.islice(lengths.batches(setting.most), STEPS))
    every = np.array(batches).reshape(-1)
    groups = BATCH // GROUP_SIZE
    task = task_of(setting.model, GRPO, every, groups=groups, group_size=GROUP_SIZE, prompt=PROMPT)
    node = pool_of(setting.kind, NODE)
    degrees = tuple(tp for tp in DEGREES if engines_of(task, node, NODE, tp, SYSTEM) is not None)
    times = step_times(task.shape, node, host)
    parts = [[batch[first :: setting.nodes] for first in range(setting.nodes)] for batch in batches]
    profile = profile_of(task, node, degrees, times, switches)
    runs = [[adaptive(profile, times, degrees, part, task, START, setting.most) for part in step] for step in parts]
    models, _ = trainer_of(task, setting.pool, setting.pool.devices, SYSTEM)
    return Times(
        static={
            tp: statistics.fmean(max(_static(times, tp, part) for part in step) for step in parts) for tp in degrees
        },
        adaptive=statistics.fmean(max(seconds for seconds, _ in step) for step in runs),
        switches=statistics.fmean(count for step in runs for _, count in step),
        rest=models.step_s() + offloading_s(task, setting.pool),
    )


def _dealt(lengths: Sequence[int], tp: int) -> list[list[Work]]:
    """The sequences of each replica when all have their prompts."""
    replicas = NODE // tp
    return [[(PROMPT, tokens) for tokens in lengths[first::replicas]] for first in range(replicas)]


def _prompts_s(times: MixedStepTimes, tp: int, lengths: Sequence[int]) -> float:
    return times.prefill_s(tp, math.ceil(len(lengths) * tp / NODE), PROMPT)


def _static(times: MixedStepTimes, tp: int, lengths: Sequence[int]) -> float:
    """Seconds of generation under one degree."""
    return _prompts_s(times, tp, lengths) + drain(times, tp, _dealt(lengths, tp), (), slots=SLOTS)[-1].seconds


def adaptive(
    profile: TPProfile,
    times: MixedStepTimes,
    degrees: tuple[int, ...],
    lengths: Sequence[int],
    task: Task,
    tp: int,
    most: int,
) -> tuple[float, int]:
    """Seconds of generation that begins with degree `tp` and changes it as Algorithm 1 says, and the changes.

    Each response is expected to reach the most tokens, as in PAT (section 4.2).
    """
    controller = SwitchController(
        profile, Bound(), max_batch_size=SLOTS, least_gain=0.0, steps_between=10**9, look_ahead=False
    )
    replicas, seconds, changes = _dealt(lengths, tp), _prompts_s(times, tp, lengths), 0
    while unfinished := sum(map(len, replicas)):
        if controller.due(unfinished):
            decision = controller.decide(_snapshot(tp, degrees, replicas, task, most))
            if decision.switch:
                chosen = next(candidate for candidate in decision.candidates if candidate.tp == decision.chosen)
                seconds += chosen.switch_s
                replicas, tp = merge(replicas, tp, decision.chosen, tokens=context).replicas, decision.chosen
                changes += 1
        state = drain(times, tp, replicas, (), slots=SLOTS, stops={unfinished - math.ceil(unfinished / 8)} - {0})[0]
        replicas, seconds = state.replicas, seconds + state.seconds
    return seconds, changes


def _snapshot(tp: int, degrees: tuple[int, ...], replicas: Sequence[Sequence[Work]], task: Task, most: int) -> Snapshot:
    return Snapshot(
        tp=tp,
        degrees=degrees,
        replicas=tuple(
            tuple(
                Unfinished(context=held, generated=held - PROMPT, most=max(1, most + PROMPT - held))
                for held, _ in works
            )
            for works in replicas
        ),
        kv_bytes_per_token=round(task.shape.cache_bytes()),
        groups=frozenset(degrees),
    )


def profile_of(task: Task, pool: Pool, degrees: Sequence[int], times: MixedStepTimes, switches: Switches) -> TPProfile:
    """What PAT's profiler would find. On other devices than A40, the parts of a switch that send data take as much
    less time as the links are quicker; they grow with the model."""
    quicker = pool.device.link_gb_s / pool_of("A40", NODE).device.link_gb_s
    measured = find_shape("Llama-3.1-8B")
    held = math.ceil(HELD / (NODE // HELD_TP)) * HELD_CONTEXT * measured.cache_bytes() / HELD_TP
    cost = partial(
        SwitchCost,
        reshard_s=switches.reshard_s * task.shape.parameters / measured.parameters / quicker,
        rest_s=switches.rest_s,
        kv_bytes_per_s=held / switches.state_s * quicker,
    )
    return TPProfile(
        key=ProfileKey(
            model=task.shape.name,
            architecture={},
            dtype="bfloat16",
            ranks=NODE,
            threads_per_rank=1,
            hardware=pool.kind,
            cores=1,
            backend="sglang",
            collectives="nccl",
        ),
        created="",
        tailrace="",
        token_budget=TOKENS,
        decode=tuple(
            DecodePoint(
                tp=tp,
                replicas=1,
                batch_size=size,
                context_tokens=size * length,
                seconds=times.step_s(tp, size, size * length, 1),
            )
            for tp in degrees
            for size, length in grid(TOKENS, SLOTS, PROFILED)
        ),
        prefill=tuple(
            PrefillPoint(tp=tp, batch_size=size, length=length, seconds=times.prefill_s(tp, size, length))
            for tp in degrees
            for size, length in PREFILLS
        ),
        switches=tuple(
            cost(source_tp=source, target_tp=target) for source, target in itertools.permutations(degrees, 2)
        ),
        group_s={tp: 0.0 for tp in degrees if tp > 1},
        capture_s=dict.fromkeys(degrees, switches.capture_s),
    )


def report(published: Published, lengths: Lengths) -> Section:
    """Simulate all, and compare."""
    switches, host = Switches.of(published), sglang(published)
    run = partial(measure, lengths=lengths, switches=switches, host=host)
    h100 = {
        "LLaMA3.1-8B": run(Setting(model="Llama-3.1-8B", kind="H100", most=24 * K)),
        "Qwen3-14B": run(Setting(model="Qwen3-14B", kind="H100", most=16 * K)),
    }
    a40 = {
        ("8 A40", "LLaMA3.1-8B", "lowest", 6): run(Setting(model="Llama-3.1-8B", kind="A40", most=6 * K)),
        ("8 A40", "LLaMA3.1-8B", "highest", 16): run(Setting(model="Llama-3.1-8B", kind="A40", most=16 * K)),
        ("16 A40", "LLaMA3.1-8B", "highest", 16): run(Setting(model="Llama-3.1-8B", kind="A40", nodes=2, most=16 * K)),
        ("16 A40", "Qwen3-14B", "lowest", 6): run(Setting(model="Qwen3-14B", kind="A40", nodes=2, most=6 * K)),
        ("16 A40", "Qwen3-14B", "highest", 16): run(Setting(model="Qwen3-14B", kind="A40", nodes=2, most=16 * K)),
    }
    rows = [row for model, times in h100.items() for row in _on_h100(published, model, times)]
    rows += [row for setting, times in a40.items() for row in _on_a40(published, setting, times)]
    rows += _latencies(published, host)
    return Section(
        title="PAT",
        assumptions=_assumptions(lengths, switches, host),
        rows=rows,
        experiments=_experiments(published, h100, a40),
        findings=_findings(list(h100.values()), list(a40.values()), published),
    )


def _on_h100(published: Published, model: str, times: Times) -> Iterator[Row]:
    devices, stays = "8 H100", times.static[START]
    value = partial(published.value, model=model, devices=devices)
    row = partial(Row, where="section 5.3")
    what = f"{model} on {devices}"
    yield row(
        what=f"{what}: generation shorter by",
        published=value("generation time reduction"),
        simulated=100 * (1 - times.adaptive / stays),
        unit="%",
        why=_WHY_GENERATION,
    )
    yield row(
        what=f"{what}: throughput over static TP {START}",
        published=value("throughput", where="5.2"),
        simulated=times.speedup(stays),
        why=_WHY_STEP,
    )
    if model == "LLaMA3.1-8B":
        yield row(
            what=f"{what}: step shorter by",
            published=value("iteration time reduction"),
            simulated=100 * (1 - 1 / times.speedup(stays)),
            unit="%",
            why=_WHY_STEP,
        )
    for name, seconds, why in (("verl", stays, ""), ("PAT", times.adaptive, _WHY_GENERATION)):
        yield row(
            what=f"{what}: generation, {name}",
            published=value(f"generation time, {name}"),
            simulated=seconds,
            unit="s",
            why=why,
            headline=False,
        )
    yield _best_stays(what, value("throughput", where="5.2"), times)


def _on_a40(published: Published, setting: tuple[str, str, str, int], times: Times) -> Iterator[Row]:
    devices, model, end, most = setting
    value = published.value(f"throughput, {end}", model=model, devices=f"{devices}-")
    what = f"{model} on {devices}, {most}K"
    yield Row(
        where="figure 10",
        what=f"{what}: throughput over static TP {START}",
        published=value,
        simulated=times.speedup(times.static[START]),
        why=_WHY_A40,
    )
    yield _best_stays(what, value, times)


def _best_stays(what: str, value: float, times: Times) -> Row:
    best = min(times.static, key=times.static.__getitem__)
    return Row(
        where="",
        what=f"{what}: the same, over the best static degree, TP {best}",
        published=value,
        simulated=times.speedup(times.best),
        why="see below",
        headline=False,
    )


def _latencies(published: Published, host: Host) -> Iterator[Row]:
    pool = pool_of("A40", NODE)
    times = step_times(find_shape("Llama-3.1-8B"), pool, host)
    for size in (1, BATCH):
        seconds = {}
        for tp in (START, NODE):
            each = max(1, size * tp // NODE)
            seconds[tp] = times.step_s(tp, each, each * CONTEXT, 1)
            yield Row(
                where="figure 4",
                what=f"decode step on A40, TP {tp}, {size} sequences",
                published=1e3 * _published_s(published, tp, size),
                simulated=1e3 * seconds[tp],
                unit="ms",
                why="contexts are not stated in the figure",
                headline=False,
            )


_WHY_GENERATION = "both times are within 10% of the paper's, which their difference is not"
_WHY_STEP = "all but generation takes less here than in the paper; see the experiments"
_WHY_A40 = "the degree of the baseline is not stated; see the experiments"


def _experiments(
    published: Published, h100: Mapping[str, Times], a40: Mapping[tuple[str, str, str, int], Times]
) -> list[str]:
    """What rests on the seconds of the rest of a step, and on the degree of the baseline."""
    llama = h100["LLaMA3.1-8B"]
    rest = published.value("step time, verl") - published.value("generation time, verl", model="LLaMA3.1-8B")
    other, stays = replace(llama, rest=rest), llama.static[START]
    degrees = [
        f"{model} on {devices}, {most}K: {times.speedup(times.static[START]):.2f} over TP {START}, "
        f"{times.speedup(times.static[2 * START]):.2f} over TP {2 * START}"
        for (devices, model, _, most), times in a40.items()
    ]
    return [
        f"The {rest:.0f} s that the paper prints for all of a step of LLaMA3.1-8B on H100 but generation, instead of "
        f"{llama.rest:.0f} s: a step is {100 * (1 - 1 / other.speedup(stays)):.1f} % shorter, and the throughput is "
        f"{other.speedup(stays):.2f} x.",
        f"Another static degree on A40: {'; '.join(degrees)}. The paper's figures lie between the two.",
    ]


def _assumptions(lengths: Lengths, switches: Switches, host: Host) -> list[str]:
    return [
        "Responses: lognormal through the two published shares (10.85 % above 8K, 2.18 % above 16K): median "
        f"{lengths.median:,.0f}, deviation {lengths.deviation:.2f}, for both models; cut at the maximum. Mean of "
        f"{STEPS} batches in which one response at least has the maximum, as in the paper.",
        f"GRPO on {BATCH} responses, as in the paper's sections 1 to 3: groups of {GROUP_SIZE}, prompts of {PROMPT} "
        f"tokens. FSDP trains colocated. SGLang's host takes {1e3 * host.step_s:.2f} ms of each step: what figure 4 "
        "leaves beside the simulated work of the devices for one sequence, in the mean of its two degrees.",
        "Decisions: `planning.tp_switch`, without look-ahead or a least gain, each response expected to reach the "
        "maximum (Algorithm 1), on a profile of the analytic steps at the paper's points. Generation runs by "
        "`planning.drain`.",
        f"Switches: the published parts on A40 (weights {switches.reshard_s} s, capture {switches.capture_s} s, the "
        f"rest {switches.rest_s:.2f} s; keys and values {switches.state_s} s for 9 samples at 12K). On H100 the parts "
        "that send data take as much less as its links are quicker.",
        f"Baseline: the paper says the best static degree, and does not say which. It is TP {START} in the rows that "
        "count, from which the paper's switches start. This was chosen after the simulation had shown that the "
        f"seconds printed for verl are those of TP {START}. The rows over the best degree are the comparison as the "
        "paper words it, and do not count.",
    ]


def _findings(h100: Sequence[Times], a40: Sequence[Times], published: Published) -> list[str]:
    all_times = [*h100, *a40]
    verl = [published.value("generation time, verl", model=model) for model in ("LLaMA3.1-8B", "Qwen3-14B")]
    quickest = sorted({min(times.static, key=times.static.__getitem__) for times in all_times})
    worst = min(times.speedup(times.best) for times in all_times)
    one, many = (published.value(f"decode latency change TP2 -> TP8, batch {size}") for size in (1, BATCH))
    least, most = (published.value(f"time with one sample left, of generation, {end}") for end in ("lowest", "highest"))
    ours, theirs = [f"{times.static[START]:,.0f} s" for times in h100], [f"{seconds:,.0f} s" for seconds in verl]
    shorter = [f"{1 - times.adaptive / times.static[START]:.0%}" for times in h100]
    return [
        f"What agrees: on H100, generation under TP {START} takes {' and '.join(ours)} for the two models, where the "
        f"paper prints {' and '.join(theirs)} for verl. Only SGLang's host was fitted, on A40. A change shortens it "
        f"by {' and '.join(shorter)}.",
        "",
        f"What does not agree: the best static degree is TP {' or '.join(map(str, quickest))} here. Compared with that "
        f"one a change gains nothing ({worst:.2f} x at worst). The paper's own figures say so, too. TP 8 takes "
        f"{-one:.0f} % less than TP 2 for one sequence and {many:.0f} % more for {BATCH}, and one sequence "
        f"alone takes {least:.0f} "
        f"to {most:.0f} % of generation. What kept TP 8 from being its best static degree is not stated. Expecting "
        "every response to reach the maximum, Algorithm 1 changes early, which costs little here.",
    ]

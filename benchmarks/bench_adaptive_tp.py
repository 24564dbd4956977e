"""`make bench-adaptive-tp`: adaptive tensor parallelism on a long-tailed workload, beside DP 2 and TP 2 that stay.

Two ranks of one thread each, a model of 113M random weights in bf16. The engines that are compared live at the same
time and take turns, each in a process of its own that is blocked while another works. The last line is JSON.

- Natural: the machine as it is. Profile, then rounds of one batch each under DP 2, TP 2 and adaptive TP. The static
  runs also show how far the profile's predictions are from what their steps took, and how much of that is the
  machine's drift (predictor.py).
- Switch: a switch in the middle of such a batch, and the same change of TP by a restart.
- Emulated link: a link between the ranks that makes TP 2 cost 26 % more than DP 2 at the full batch and 37 % less than
  TP 1 at batch 1, which are the figures of PAT, section 3.2. Profile and rounds as before, with one more contestant:
  "bound" takes all responses for the longest, where adaptive TP otherwise goes by the survival curve.
- Uniform: over the same link, responses of equal length.
- Eight ranks: the controller alone, on a table of step times (eight_ranks.py).
- End to end: iterations of training (adaptive_run.py). With `--end-to-end` this is all.

Response lengths are those of DAPO training steps (PolyTrace's workloads, in the folder $TAILRACE_DATA). Where these are
missing, they are log-normal with the same median and 99th percentile. They are scaled so that the longest of all
batches has 1,024 tokens.

What is known is printed as it comes, one JSON line for each part.
"""

import json
import math
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from adaptive_run import BUILD, ENVIRONMENT, end_to_end, profiled
from eight_ranks import LONGEST as LONGEST_OF_EIGHT
from eight_ranks import SEQUENCES as SEQUENCES_OF_EIGHT
from eight_ranks import decision_ms, eight_ranks
from gate import Contestant
from predictor import Turns
from random_model import SMALL, model_of

from tailrace.planning.drain import drain, drain_s
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.tp_merge import merge
from tailrace.planning.tp_profile import TPProfile

HERE = Path(__file__).parent
WORKLOAD = Path("polytrace", "dapo_math_32b")

GROUPS, GROUP_SIZE = 8, 8
LONGEST = 1024
PROMPT_TOKENS = 96
UNIFORM_TOKENS = 160
DTYPE = "bfloat16"
"""The C++ decoder computes it on any CPU, also where the engine's default is float32."""
KV_CACHE_GIB = 0.75
"""KV cache on each rank: 43 sequences of the longest length."""
SWITCH_LEFT = 8
"""Responses of a batch that are unfinished at a switch."""
SWITCH_ROUNDS = 5
RUN_STEPS = 3
"""Steps of a run end to end; the first warms up."""
SUMS = 2 * SMALL.num_hidden_layers + 1
"""Sums in a step of a replica."""
EXCHANGES = SUMS + 3
"""With those of a few bytes in which tokens are drawn."""
MOST_BANDWIDTH = 1e6
"""GiB a second of a link that has no bound."""
FULL_BATCH_COST, SINGLE_COST = 1.26, 0.63
"""Costs of TP 2: over DP 2 at the full batch, over TP 1 at batch 1 (PAT, section 3.2)."""


class Batch(NamedTuple):
    """The prompts and the response lengths of one round."""

    prompts: list[list[int]]
    lengths: list[int]

    def task(self, kind: str, **more: object) -> dict[str, Any]:
        """Return the task for a contestant."""
        return {"task": kind, "prompts": self.prompts, "lengths": self.lengths, "group_size": GROUP_SIZE, **more}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each comparison, after one of warm-up.")] = 5,
    runs: Annotated[int, typer.Option(min=1, help="Of each arm, end to end.")] = 3,
    *,
    only_end_to_end: Annotated[bool, typer.Option("--end-to-end", help="Compare training runs alone.")] = False,
) -> None:
    """Run all comparisons."""
    if only_end_to_end:
        print(json.dumps({"bench": "adaptive-tp", "end_to_end": end_to_end(runs, RUN_STEPS)}))
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    model = model_of(SMALL)
    batches, source = workload(rounds + 1)
    uniform = [Batch(batch.prompts, [UNIFORM_TOKENS] * len(batch.lengths)) for batch in batches]
    print(f"lengths: {source}", flush=True)

    result: dict[str, object] = {"bench": "adaptive-tp", "lengths": source}

    def note(**figures: object) -> None:
        """Keep figures, and print them at once: the whole takes hours."""
        result.update(figures)
        print(json.dumps(figures), flush=True)

    note(**by_table())
    profile = make_profile(model, "natural", None)
    natural = compare(model, "natural", profile, batches, None, predicts=True)
    note(**natural.predictor, natural={**natural.ratios(), "foreseen": foreseen(profile, batches[1:])})
    note(**compare_switch(model, batches, profile))
    link = calibrate(profile)
    print(f"link: {link}", flush=True)
    linked_profile = make_profile(model, "link", link)
    linked = compare(model, "link", linked_profile, batches, link, bound=True)
    (BUILD / "drain.json").write_text(json.dumps(linked.typical_drain))
    foreseen_linked = foreseen(linked_profile, batches[1:])
    costs = {"foreseen": foreseen_linked, "link": link, "tp2_cost": link_cost(linked_profile)}
    note(emulated_link={**linked.ratios(), **costs})
    level = compare(model, "uniform", linked_profile, uniform, link)
    note(uniform_overhead=level.vs_best_static, uniform_switches=level.switches)
    parts = {"natural": natural, "link": linked, "uniform": level}
    note(seconds={name: those.seconds for name, those in parts.items()})
    note(end_to_end=end_to_end(runs, RUN_STEPS))
    print(json.dumps(result))


def by_table() -> dict[str, object]:
    """Return the figures of eight ranks whose steps take what a table says."""
    drawn, _ = response_lengths(random.Random(1), 5, SEQUENCES_OF_EIGHT // GROUP_SIZE)
    scale = LONGEST_OF_EIGHT / max(map(max, drawn))
    batches = [[max(1, round(scale * length)) for length in lengths] for lengths in drawn]
    return {"eight_ranks": eight_ranks(batches), "decision_ms_8x256": decision_ms(batches[0])}


class Comparison(NamedTuple):
    """Seconds of each round's batch by contestant, and what was observed on the way."""

    rounds: dict[str, list[float]]
    predictor: dict[str, object]
    """How far predictions were off; empty where they were not looked at."""
    switches: list[int]
    """Number of switches of adaptive TP in each round."""
    drains: list[dict[str, Any]]
    """Drains of each round, by contestant."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the median batch, by contestant."""
        return {key: round(statistics.median(seconds), 3) for key, seconds in self.rounds.items()}

    @property
    def best_static(self) -> str:
        """The contestant of fixed TP that takes less time in all."""
        return min(("dp2", "tp2"), key=lambda key: sum(self.rounds[key]))

    @property
    def vs_best_static(self) -> float:
        """Adaptive TP's time over that of `best_static`; see `ratio`."""
        return self.ratio(self.best_static)

    @property
    def typical_drain(self) -> dict[str, Any]:
        """The drains of the round with the median ratio to `best_static`."""
        order = sorted(range(len(self.drains)), key=self._ratios(self.best_static).__getitem__)
        return self.drains[order[len(order) // 2]]

    def ratio(self, other: str) -> float:
        """Return the median ratio of adaptive TP's time to that of `other` for the same batch."""
        return round(statistics.median(self._ratios(other)), 3)

    def _ratios(self, other: str) -> list[float]:
        return [adaptive / others for adaptive, others in zip(self.rounds["adaptive"], self.rounds[other], strict=True)]

    def ratios(self) -> dict[str, object]:
        """Return adaptive TP's time over that of others."""
        names = {"dp2": "vs_dp", "tp2": "vs_tp", "bound": "vs_bound"}
        vs_others = {name: self.ratio(key) for key, name in names.items() if key in self.rounds}
        return {"vs_best_static": self.vs_best_static, **vs_others, "switches": self.switches}


def compare(
    model: Path,
    name: str,
    profile: Path,
    batches: Sequence[Batch],
    link: dict[str, float] | None,
    *,
    bound: bool = False,
    predicts: bool = False,
) -> Comparison:
    """Run each batch under each configuration; the first batch is warm-up.

    `predicts`: the static engines also measure the points of the profile again in each round, and more at the end.
    """
    linked = {} if link is None else {"link": link}
    adaptive = {"profile": str(profile), "max_response_tokens": LONGEST}
    configurations: dict[str, dict[str, Any]] = {
        "dp2": {"dp": 2},
        "tp2": {"tp": 2, **linked},
        "adaptive": {"dp": 2, "adaptive_tp": adaptive, **linked},
    }
    if bound:
        configurations["bound"] = {"dp": 2, "adaptive_tp": {**adaptive, "estimate": "bound"}, **linked}
    seen: dict[str, list[dict[str, Any]]] = {key: [] for key in configurations}
    predictor: dict[str, object] = {}
    with ExitStack() as stack:
        engines = {key: start(stack, f"{name}-{key}", model, c) for key, c in configurations.items()}
        turns = Turns(TPProfile.read(profile), engines) if predicts else None
        for number, batch in enumerate(batches):
            for key in sorted(engines, reverse=number % 2 == 0):
                if turns is not None and number:
                    turns.before(key)
                figures = engines[key].step(timeout_s=1200, **batch.task("stage"))
                if turns is not None and number:
                    turns.after(key, figures["steps"])
                if figures["tokens"] != sum(batch.lengths):
                    raise RuntimeError(f"{key} made {figures['tokens']} tokens instead of {sum(batch.lengths)}")
                switches = [f"{s['from']}→{s['to']} at {s['unfinished']}" for s in figures["switches"]]
                print(f"{name} {number}: {key:>8} {figures['seconds']:7.2f} s {', '.join(switches)}", flush=True)
                if number:
                    seen[key].append(figures)
        if turns is not None:
            predictor = turns.figures()
    return Comparison(
        rounds={key: [figures["seconds"] for figures in those] for key, those in seen.items()},
        predictor=predictor,
        switches=[len(figures["switches"]) for figures in seen["adaptive"]],
        drains=[{key: those[number]["drain"] for key, those in seen.items()} for number in range(len(batches) - 1)],
    )


def compare_switch(model: Path, batches: Sequence[Batch], profile: Path) -> dict[str, object]:
    """Compare a switch from DP 2 to TP 2 in the middle of a batch with the same by a restart, and with its
    prediction."""
    switches, restarts, extra_bytes = [], [], []
    with ExitStack() as stack:
        never = {"profile": str(profile), "least_gain": 0.99, "max_response_tokens": LONGEST}  # switches when told to
        engine = start(stack, "switch", model, {"dp": 2, "adaptive_tp": never})
        naive = start(stack, "restart", model, {"dp": 2})
        for number in range(SWITCH_ROUNDS + 1):
            batch = batches[number % len(batches)]
            task = {"left": SWITCH_LEFT, "target": 2}
            switched = engine.step(**batch.task("switch", **task))
            restarted = naive.step(**batch.task("restart", **task))
            print(f"switch {number}: {switched['seconds']:.3f} s, restart {restarted['seconds']:.3f} s", flush=True)
            extra_bytes.append(switched["extra_bytes"])  # the first too: later ones reuse memory that it has freed
            if number:
                switches.append(switched)
                restarts.append(restarted["seconds"])
    median = statistics.median(figures["seconds"] for figures in switches)
    # the new shards and both caches
    full_state = (model / "model.safetensors").stat().st_size + 2 * KV_CACHE_GIB * 2**30
    return {
        "switch_vs_naive": round(median / statistics.median(restarts), 4),
        "switch_s": round(median, 4),
        "naive_s": round(statistics.median(restarts), 3),
        "switch_breakdown_s": {
            part: round(statistics.median(figures["breakdown"][part] for figures in switches), 4)
            for part in ("weights", "kv", "groups", "rest")
        },
        "switch_predicted_over_measured": round(
            statistics.median(figures["predicted_s"] / figures["seconds"] for figures in switches), 3
        ),
        "switch_unfinished": statistics.median(figures["unfinished"] for figures in switches),
        "peak_extra_memory_fraction": round(max(extra_bytes) / full_state, 4),
    }


def calibrate(path: Path) -> dict[str, float]:
    """Return the link that gives TP 2 its two costs, as far as there is one. A link adds time and never takes any."""
    steps = LatencyPredictor(TPProfile.read(path))
    sequences, context = GROUPS * GROUP_SIZE, PROMPT_TOKENS
    full = FULL_BATCH_COST * steps.step_s(1, sequences / 2, sequences / 2 * context, 2)
    full -= steps.step_s(2, sequences, sequences * context, 1)
    single = SINGLE_COST * steps.step_s(1, 1, LONGEST / 2, 1) - steps.step_s(2, 1, LONGEST / 2, 1)
    row = 4 * SMALL.hidden_size  # bytes of a token in a sum
    # full = exchanges · latency + sums · sequences · row / bandwidth, and single has one sequence
    s_per_byte = max(0.0, full - max(single, 0.0)) / (SUMS * row * (sequences - 1))
    latency = max(0.0, single - SUMS * row * s_per_byte) / EXCHANGES
    bandwidth = min(MOST_BANDWIDTH, 1 / (s_per_byte * 2**30)) if s_per_byte else MOST_BANDWIDTH
    return {"latency_us": round(latency * 1e6, 2), "bandwidth_gib_per_s": round(bandwidth, 3)}


def link_cost(path: Path) -> dict[str, float]:
    """Return the profiled costs of TP 2 over the link."""
    steps = LatencyPredictor(TPProfile.read(path))
    sequences, context = GROUPS * GROUP_SIZE, PROMPT_TOKENS
    dp2 = steps.step_s(1, sequences / 2, sequences / 2 * context, 2)
    tp2 = steps.step_s(2, sequences, sequences * context, 1)
    single = [steps.step_s(tp, 1, LONGEST / 2, 1) for tp in (1, 2)]
    return {"full_batch_over_dp2": round(tp2 / dp2, 3), "batch1_over_tp1": round(single[1] / single[0], 3)}


def foreseen(path: Path, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the best ratios that a switch at the best time could reach on this machine, if caches moved for nothing.

    All lengths are taken as known beforehand, and steps take what was profiled. They are median ratios to the better of
    DP 2 and TP 2, and to DP 2.
    """
    profile = TPProfile.read(path)
    steps = LatencyPredictor(profile)
    (cost,) = (cost for cost in profile.switches if (cost.source_tp, cost.target_tp) == (1, 2))
    slots = GROUPS * GROUP_SIZE
    vs_best, vs_dp = [], []
    for batch in batches:
        works = [(PROMPT_TOKENS, length) for length in batch.lengths]
        halves = [[w for i, w in enumerate(works) if i // GROUP_SIZE % 2 == replica] for replica in (0, 1)]
        *states, end = drain(steps, 1, halves, [], slots=slots, stops=range(1, slots))
        tp2_s = drain_s(steps, 2, [works], [], slots=slots)
        switched_s = [
            then.seconds
            + cost.reshard_s
            + cost.rest_s
            + drain_s(steps, 2, merge(then.replicas, 1, 2, tokens=itemgetter(0)).replicas, [], slots=slots)
            for then in states
        ]
        least_s = min(end.seconds, tp2_s, *switched_s)
        vs_best.append(least_s / min(end.seconds, tp2_s))
        vs_dp.append(least_s / end.seconds)
    return {"vs_best_static": round(statistics.median(vs_best), 3), "vs_dp": round(statistics.median(vs_dp), 3)}


def make_profile(model: Path, name: str, link: dict[str, float] | None) -> Path:
    """Profile two ranks."""
    keys = [f"engine.link.{key}={value}" for key, value in (link or {}).items()]
    keys += ["engine.threads_per_rank=1", f"engine.kv_cache_gib={KV_CACHE_GIB}", f"engine.dtype={DTYPE}"]
    keys += [f"max_batch_size={GROUPS * GROUP_SIZE}", f"max_length={LONGEST + PROMPT_TOKENS}"]
    return profiled(str(model), BUILD / f"{name}.json", keys)


def start(stack: ExitStack, name: str, model: Path, config: Mapping[str, Any]) -> Contestant:
    """Start a contestant that `stack` ends."""
    base = {"dtype": DTYPE, "threads_per_rank": 1, "kv_cache_gib": KV_CACHE_GIB, "max_batch_size": GROUPS * GROUP_SIZE}
    command = [sys.executable, str(HERE / "adaptive_engine.py"), str(model), json.dumps(base | dict(config))]
    contestant = Contestant(command, BUILD / f"{name}.log", ENVIRONMENT)
    stack.callback(contestant.stop)
    return contestant


def workload(count: int) -> tuple[list[Batch], str]:
    """Return batches, and the source of their lengths."""
    rng = random.Random(0)
    raw, source = response_lengths(rng, count, GROUPS)
    scale = LONGEST / max(map(max, raw))
    return [batch(rng, [scale * length for length in lengths]) for lengths in raw], source


def response_lengths(rng: random.Random, count: int, groups: int) -> tuple[list[list[float]], str]:
    """Return the lengths of `count` batches, and their source."""
    folder = Path(os.environ.get("TAILRACE_DATA", ""), WORKLOAD)
    files = sorted(folder.glob("packed_lengths_step_*.jsonl"))
    if not files:
        sigma = math.log(2711 / 465) / statistics.NormalDist().inv_cdf(0.99)
        raw = [[465 * math.exp(rng.gauss(0, sigma)) for _ in range(groups * GROUP_SIZE)] for _ in range(count)]
        return raw, "log-normal, median 465, 99th percentile 2,711 before scaling"
    raw = []
    for number in range(count):
        rows = [json.loads(line) for line in files[number % len(files)].read_text().splitlines()]
        chosen = rng.sample([row["output"] for row in rows if not row["validate"]], groups)
        raw.append([float(length) for group in chosen for length in group][: groups * GROUP_SIZE])
    return raw, "DAPO, Qwen2.5-32B (PolyTrace)"


def batch(rng: random.Random, lengths: Sequence[float]) -> Batch:
    """Return random prompts with responses of about these lengths."""
    prompts = [rng.choices(range(SMALL.vocab_size), k=PROMPT_TOKENS) for _ in range(GROUPS)]
    return Batch(prompts, [max(1, round(length)) for length in lengths])


if __name__ == "__main__":
    typer.run(main)

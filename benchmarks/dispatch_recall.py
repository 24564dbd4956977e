"""How well lengths of SmolLM2's own responses are foreseen, for prompts that were not learned from.

    python benchmarks/dispatch_recall.py [--prompts 30] [--temperature 1.0]

Twelve kinds of reasoning-gym tasks, `prompts` of each, 8 samples of up to 512 tokens each. The responses are generated
once and kept in build/bench-dispatch. Half of the prompts teach; the other half is foreseen:

    features    from the other prompts alone
    siblings    and from one sample of the prompt, for its 7 others
    history     and from 4 samples of the prompt, for its 4 others

Beside each stands its ceiling: the recall of the mean of the prompt's other samples, on the same responses.
"""

import json
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import reasoning_gym  # type: ignore[import-untyped]
import typer

from tailrace.planning.lengths.assessment import Assessment, assess
from tailrace.planning.lengths.base import Asked, Finished, LengthPredictor
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.history import History, Siblings

BUILD = Path(__file__).parents[1] / "build" / "bench-dispatch"
TASKS = (
    "basic_arithmetic",
    "base_conversion",
    "chain_sum",
    "leg_counting",
    "letter_counting",
    "number_sorting",
    "prime_factorization",
    "sentence_reordering",
    "simple_equations",
    "spell_backward",
    "syllogism",
    "word_sorting",
)
SAMPLES = 8
MOST = 512

Group = tuple[Asked, list[int]]
"""A prompt, and the tokens of its responses."""


def responses(prompts: int, temperature: float) -> list[Group]:
    """The responses to all prompts, in a random order of prompts."""
    BUILD.mkdir(parents=True, exist_ok=True)
    asked, made = BUILD / f"prompts-{prompts}.jsonl", BUILD / f"responses-{prompts}-{temperature:g}.jsonl"
    if not made.exists():
        rows = [
            {"prompt": problem["question"], "task": task}
            for task in TASKS
            for problem in reasoning_gym.create_dataset(task, size=prompts, seed=7)
        ]
        random.Random(0).shuffle(rows)
        asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part = made.with_suffix(".part")
        command = [sys.executable, "-m", "tailrace", "generate", "--prompts", str(asked), "--output", str(part)]
        command += ["--force", f"samples={SAMPLES}", f"sampling.max_new_tokens={MOST}"]
        subprocess.run([*command, f"sampling.temperature={temperature}"], check=True)
        part.rename(made)
    groups: defaultdict[int, list[dict[str, object]]] = defaultdict(list)
    for line in made.read_text().splitlines():
        row = json.loads(line)
        groups[row["index"]].append(row)
    return [_group(number, rows) for number, rows in sorted(groups.items())]


def _group(number: int, rows: Sequence[dict[str, object]]) -> Group:
    text = str(rows[0]["prompt"])
    ordered = sorted(rows, key=lambda row: int(str(row["sample"])))
    asked = Asked(prompt_id=str(number), prompt_tokens=len(text) // 4, text=text)
    return asked, [int(str(row["tokens"])) for row in ordered]


def learned(predictor: LengthPredictor, groups: Sequence[Group]) -> None:
    """Teach all of these responses."""
    predictor.learn([Finished(asked=asked, tokens=one, version=0) for asked, tokens in groups for one in tokens])


def foreseen(predictor: LengthPredictor, teaching: Sequence[Group], tested: Sequence[Group], known: int) -> Assessment:
    """How well the responses to `tested` are foreseen, but for the first `known` of each, which are learned."""
    learned(predictor, teaching)
    learned(predictor, [(asked, tokens[:known]) for asked, tokens in tested if known])
    expected = predictor.expect([asked for asked, _ in tested])
    lengths = [tokens[known:] for _, tokens in tested]
    each = [expectation for expectation, of in zip(expected, lengths, strict=True) for _ in of]
    numbers = [number for number, of in enumerate(lengths) for _ in of]
    return assess(each, [one for of in lengths for one in of], numbers)


def recalls(prompts: int, temperature: float) -> dict[str, dict[str, float | None]]:
    """Recall and ceiling of the longest 20, 10 and 5 percent, by predictor."""
    groups = responses(prompts, temperature)
    half = len(groups) // 2
    found = {}
    for name, predictor, known in (("features", Features(), 0), ("siblings", Siblings(), 1), ("history", History(), 4)):
        result = foreseen(predictor, groups[:half], groups[half:], known)
        figures = {f"{percent}": recall for percent, recall in result.recall.items()}
        figures |= {f"ceiling_{percent}": ceiling for percent, ceiling in result.ceiling.items()}
        figures |= {"tau": result.tau, "inside": result.inside}
        found[name] = {key: None if value is None else round(value, 3) for key, value in figures.items()}
    return found


def main(prompts: int = 30, temperature: float = 1.0) -> None:
    """Print the figures."""
    print(json.dumps({"recall": recalls(prompts, temperature), "temperature": temperature}))


if __name__ == "__main__":
    typer.run(main)

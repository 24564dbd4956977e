"""How well lengths of SmolLM2's own responses are foreseen, for prompts that were not learned from.

    python benchmarks/dispatch_recall.py [--parts 6] [--temperatures 1.0,0.2] [--record-lengths]

Fourteen kinds of reasoning-gym tasks, some short and some long, 24 prompts of each, 8 samples of up to 768 tokens each.
Their random order has 12 parts of 28 prompts. SmolLM2 takes minutes for a part on two cores, and the first parts give
the figures. Their numbers of tokens are in smollm2_lengths.json, which `--record-lengths` writes. Where the file lacks
them, the prompts are answered now, and the responses kept in build/bench-dispatch. Half of the prompts teach; the other
half is foreseen:

    features    from the other prompts alone, by their tasks, words and numbers
    model       from the other prompts alone, by these and the hidden states of SmolLM2
    siblings    and from one sample of the prompt, for its 7 others
    history     and from 4 samples of the prompt, for its 4 others

Beside each stands its ceiling: the recall of the mean of the prompt's other samples, on the same responses. The last
line is JSON.
"""

import itertools
import json
import math
import random
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import reasoning_gym  # type: ignore[import-untyped]
import typer
from dispatch_virtual import PromptReplay

from tailrace.config.model import ModelConfig
from tailrace.models.encoder import Encoder
from tailrace.models.resolve import resolve_model
from tailrace.planning.lengths.assessment import Assessment, assess
from tailrace.planning.lengths.base import Asked, Expectation, Finished, LengthPredictor
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.hidden_states import HiddenStates
from tailrace.planning.lengths.history import History, Siblings
from tailrace.workloads.replay import Replay, Script, Turn

BUILD = Path(__file__).parents[1] / "build" / "bench-dispatch"
LENGTHS = Path(__file__).with_name("smollm2_lengths.json")
"""The tokens of the responses to each prompt, by the prompts and the temperature."""
PROMPTS = 24
"""Prompts of each task."""
PART = 28
"""Prompts that are answered together."""
TASKS: Mapping[str, Sequence[Mapping[str, int]]] = {
    "basic_arithmetic": [{}],
    "base_conversion": [{"min_value": 10**n, "max_value": 10 ** (n + 2)} for n in (0, 3, 6)],
    "caesar_cipher": [{"min_words": n, "max_words": n} for n in (3, 10, 20)],
    "chain_sum": [{"min_terms": n, "max_terms": n} for n in (2, 5, 10)],
    "game_of_life": [{"grid_size_x": n, "grid_size_y": n} for n in (4, 7, 10)],
    "group_anagrams": [{"min_anagram_groups": n, "max_anagram_groups": n} for n in (2, 5, 10)],
    "letter_counting": [{"min_words": n, "max_words": n} for n in (5, 15)],
    "manipulate_matrix": [{"min_rows": n, "max_rows": n, "min_cols": n, "max_cols": n} for n in (2, 4, 7, 10)],
    "number_sorting": [{"min_numbers": n, "max_numbers": n} for n in (3, 8, 20, 50)],
    "rotate_matrix": [{"min_n": n, "max_n": n} for n in (2, 4, 7, 10)],
    "sentence_reordering": [{"min_words_in_sentence": n, "max_words_in_sentence": n} for n in (4, 8, 16)],
    "spell_backward": [{"min_word_len": n, "max_word_len": n} for n in (3, 6, 10)],
    "spiral_matrix": [{"min_n": n, "max_n": n} for n in (2, 4, 7, 10)],
    "word_sorting": [{"min_words": n, "max_words": n} for n in (3, 8, 20, 50)],
}
"""The tasks, and their kinds by difficulty."""
SAMPLES = 8
MOST = 768
LIMIT_S = 3600.0
"""Of one generation."""

Group = tuple[Asked, list[int]]
"""A prompt, and the tokens of its responses."""
Row = tuple[str, str]
"""A prompt, and its task."""


def responses(parts: int, temperature: float) -> list[Group]:
    """The prompts of the first parts, each with the tokens of its responses."""
    asked, known = drawn(parts), recorded()
    lengths = [
        tokens for part in asked for tokens in known.get(key_of(part, temperature)) or generated(part, temperature)
    ]
    return [
        (Asked(prompt_id=str(number), prompt_tokens=len(text) // 4, text=text, task=task), tokens)
        for number, ((text, task), tokens) in enumerate(zip(itertools.chain(*asked), lengths, strict=True))
    ]


def drawn(parts: int) -> list[list[Row]]:
    """Prompts with their tasks, in a random order: the first parts in which they are answered and recorded."""
    rows = [
        (problem["question"], task)
        for task, kinds in TASKS.items()
        for number, kind in enumerate(kinds)
        for problem in reasoning_gym.create_dataset(task, size=-(-PROMPTS // len(kinds)), seed=number, **kind)
    ]
    random.Random(0).shuffle(rows)
    return [rows[first : first + PART] for first in range(0, len(rows), PART)][:parts]


def key_of(rows: Sequence[Row], temperature: float) -> str:
    """The name of the responses: other prompts are others, and so are their responses."""
    return f"{zlib.crc32(json.dumps(rows).encode()):08x}-{temperature:g}"


def recorded() -> dict[str, list[list[int]]]:
    """The lengths that are in the file."""
    found: dict[str, list[list[int]]] = json.loads(LENGTHS.read_text()) if LENGTHS.exists() else {}
    return found


def record(parts: int, temperatures: Sequence[float]) -> None:
    """Write the lengths of the responses to the first parts, after each part, and keep the others in the file."""
    for temperature, part in itertools.product(temperatures, drawn(parts)):
        known = recorded()
        if (key := key_of(part, temperature)) not in known:
            known[key] = generated(part, temperature)
            lines = (f'  "{name}": {json.dumps(of)}' for name, of in sorted(known.items()))
            LENGTHS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def generated(rows: Sequence[Row], temperature: float) -> list[list[int]]:
    """The tokens of the responses to each prompt, which SmolLM2 makes where they are not there yet."""
    BUILD.mkdir(parents=True, exist_ok=True)
    key = key_of(rows, temperature)
    asked, made = BUILD / f"prompts-{key}.jsonl", BUILD / f"responses-{key}.jsonl"
    if not made.exists():
        asked.write_text("".join(json.dumps({"prompt": text, "task": task}) + "\n" for text, task in rows))
        part = made.with_suffix(".part")
        command = [sys.executable, "-m", "tailrace", "generate", "--prompts", str(asked), "--output", str(part)]
        command += ["--force", f"samples={SAMPLES}", f"sampling.max_new_tokens={MOST}", "engine.kv_cache_gib=4"]
        subprocess.run([*command, f"sampling.temperature={temperature}"], check=True, timeout=LIMIT_S)
        part.rename(made)
    tokens = [[0] * SAMPLES for _ in rows]
    for row in map(json.loads, made.read_bytes().splitlines()):  # of bytes: a text may have other separators of lines
        tokens[row["index"]][row["sample"]] = row["tokens"]
    return tokens


def learned(predictor: LengthPredictor, groups: Sequence[Group]) -> None:
    """Teach all of these responses."""
    predictor.prepare([asked for asked, _ in groups])
    predictor.learn([Finished(asked=asked, tokens=one, version=0) for asked, tokens in groups for one in tokens])


def expected(predictor: LengthPredictor, groups: Sequence[Group]) -> list[Expectation]:
    """What is expected of each prompt."""
    asked = [asked for asked, _ in groups]
    predictor.prepare(asked)
    return predictor.expect(asked)


def foreseen(predictor: LengthPredictor, teaching: Sequence[Group], tested: Sequence[Group], known: int) -> Assessment:
    """How well the responses to `tested` are foreseen, but for the first `known` of each, which are learned."""
    learned(predictor, teaching)
    learned(predictor, [(asked, tokens[:known]) for asked, tokens in tested if known])
    lengths = [tokens[known:] for _, tokens in tested]
    pairs = zip(expected(predictor, tested), lengths, strict=True)
    each = [expectation for expectation, of in pairs for _ in of]
    numbers = [number for number, of in enumerate(lengths) for _ in of]
    return assess(each, [one for of in lengths for one in of], numbers)


class OnceEncoder:
    """Hidden states of SmolLM2 that has read each text once: on a CPU it takes a third of a second."""

    def __init__(self) -> None:
        self._encoder = Encoder(resolve_model(ModelConfig()))
        self.size, self.identity = self._encoder.size, self._encoder.identity
        self._states: dict[str, npt.NDArray[np.float32]] = {}

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """See `Encoder`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._states]
        self._states.update(zip(new, self._encoder(new), strict=True))
        return np.stack([self._states[text] for text in texts])


_ENCODER = cache(OnceEncoder)


def reader() -> HiddenStates:
    """A predictor that reads prompts with SmolLM2, without knowledge."""
    return HiddenStates(_ENCODER())


def recalls(parts: int, temperature: float) -> dict[str, dict[str, float | None]]:
    """Recall and ceiling of the longest 20, 10 and 5 percent, by predictor."""
    groups = responses(parts, temperature)
    half = len(groups) // 2
    kinds = (
        ("features", Features(), 0),
        ("model", reader(), 0),
        ("siblings", Siblings(), 1),
        ("history", History(), 4),
    )
    found = {}
    for name, predictor, known in kinds:
        result = foreseen(predictor, groups[:half], groups[half:], known)
        figures = {f"{percent}": recall for percent, recall in result.recall.items()}
        figures |= {f"ceiling_{percent}": ceiling for percent, ceiling in result.ceiling.items()}
        figures |= {"tau": result.tau, "inside": result.inside}
        found[name] = {key: None if value is None else round(value, 3) for key, value in figures.items()}
    return found


def with_lengths(replay: Replay, parts: int, temperature: float) -> PromptReplay:
    """The prompts that did not teach, drawn again, with the lengths of a replay, and what SmolLM2 foretells of them.

    The longest response gets the longest length, the second longest the second, and so on. So a prompt tells as much of
    its responses as it does of SmolLM2's.
    """
    groups = responses(parts, temperature)
    half = len(groups) // 2
    predictor = reader()
    learned(predictor, groups[:half])
    tested = groups[half:]
    chosen = random.Random(0).choices(range(len(tested)), k=len(replay.groups))
    made = np.array([tested[place][1] for place in chosen], np.float64)
    made += np.random.default_rng(0).random(made.shape)  # equal ones in any order
    lengths = np.sort([script.tokens for group in replay.groups for script in group])
    ranks = np.argsort(np.argsort(made, axis=None)).reshape(made.shape)
    scripts = [
        [Script(prompt_tokens=old[0].prompt_tokens, turns=(Turn(generated_tokens=int(length)),)) for length in of_group]
        for old, of_group in zip(replay.groups, lengths[ranks], strict=True)
    ]
    foretold = expected(predictor, tested)
    scale = np.sort(made, axis=None)
    told = [max(1, round(float(np.interp(foretold[place].tokens, scale, lengths)))) for place in chosen]
    errors = [math.log(script.tokens / tokens) for group, tokens in zip(scripts, told, strict=True) for script in group]
    return PromptReplay(scripts, told, float(np.std(errors)))


def main(parts: int = 6, temperatures: str = "1.0,0.2", *, record_lengths: bool = False) -> None:
    """Print the figures."""
    if record_lengths:
        record(parts, [float(temperature) for temperature in temperatures.split(",")])
    found = {temperature: recalls(parts, float(temperature)) for temperature in temperatures.split(",")}
    print(json.dumps({"recall": found}))


if __name__ == "__main__":
    typer.run(main)

"""The order of a run's samples and their wording, for the terminal, the page and TensorBoard."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tailrace.errors import UserError, counted
from tailrace.registers import run_files
from tailrace.report.samples import SampleRecord, read_samples
from tailrace.report.text import number

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Controls except tab and line feed, marks that change the direction of text, and characters without width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt in one step or evaluation."""

    number: int
    set: str
    """Name of the prompt's set, in an evaluation."""
    prompt: str
    answer: str | None
    samples: Sequence[SampleRecord]
    """The samples, by reward."""

    @property
    def words(self) -> str:
        """A summary of its samples and their rewards."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        words = [visible(self.set)] if self.set else []
        words.append(counted(len(self.samples), "sample"))
        if rewards:
            mean = f"mean reward {number(statistics.fmean(rewards))}"
            spread = f" ({number(min(rewards))} to {number(max(rewards))})" if len(set(rewards)) > 1 else ""
            words.append(mean + spread)
        if failures := sum(bool(sample.failure) for sample in self.samples):
            words.append(f"{failures} not graded")
        return " · ".join(words)


def load_samples(run_dir: Path) -> list[SampleRecord]:
    """Return the samples of the run in `run_dir`.

    Raises:
        UserError: `run_dir` is not the directory of a run, has no samples, or a line of them is broken.
    """
    path = run_dir / run_files.SAMPLES
    if path.is_file():
        return read_samples(path)
    if not (run_dir / run_files.EVENTS).is_file():
        raise UserError(
            f"{run_dir} is not the directory of a run: it has no {run_files.EVENTS}; give a run's output_dir"
        )
    raise UserError(
        f"{run_dir} has no {run_files.SAMPLES}: no step has finished yet, or observe.sample_groups is 0, which keeps "
        "none"
    )


def visible(text: str) -> str:
    """Return `text` so that it can do nothing to a terminal or a page, and hides nothing.

    Controls, including the escape character, become their symbols. Marks of direction or of no width become `⟨U+202E⟩`.
    """
    return _HIDDEN.sub(lambda found: _symbol(ord(found[0])), text)


def _symbol(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def grouped(records: Iterable[SampleRecord], *, worst_first: bool = False) -> list[Group]:
    """Return the groups of one step or evaluation in the order of their prompts, each with its best samples first.

    `worst_first`: sort the groups and their samples from the lowest reward upwards; those that were not graded come
    first.
    """
    ordered = sorted(records, key=lambda record: (record.group, record.sample))
    groups = [
        _group(list(samples), worst_first=worst_first) for _, samples in groupby(ordered, key=lambda one: one.group)
    ]
    return sorted(groups, key=_mean_rank) if worst_first else groups


def _group(samples: list[SampleRecord], *, worst_first: bool) -> Group:
    first = samples[0]
    ranked = sorted(samples, key=_rank, reverse=not worst_first)
    return Group(number=first.group, set=first.set, prompt=first.prompt, answer=first.answer, samples=ranked)


def _rank(sample: SampleRecord) -> float:
    return -math.inf if sample.reward is None or sample.failure else sample.reward


def _mean_rank(group: Group) -> float:
    return statistics.fmean(map(_rank, group.samples))


def place_title(kind: str, step: int) -> str:
    """Return the title of a step or an evaluation with samples."""
    return f"step {step:,}" if kind == "training" else f"evaluation after {counted(step, 'step')}"


def reward_words(sample: SampleRecord) -> str:
    """Return the reward of a sample in words."""
    return "not graded" if sample.reward is None else f"reward {number(sample.reward)}"


def figures(sample: SampleRecord) -> list[str]:
    """Return the further figures of a sample, a few words each."""
    oldest, newest = sample.weight_versions
    words = [sample.way] if sample.way else []
    if sample.correct is not None:
        words.append("right" if sample.correct else "wrong")
    words.extend(f"{name} {number(value)}" for name, value in sample.parts.items())
    if sample.advantage is not None:
        words.append(f"advantage {sample.advantage:+.3g}" if sample.advantage else "advantage 0")
    words.append(counted(sample.tokens, "token"))
    words.append(_FINISHES.get(sample.finish_reason, sample.finish_reason))
    words.append(f"weights {oldest}" if oldest == newest else f"weights {oldest} to {newest}")
    return [visible(word) for word in words]


_FINISHES = {"stop": "stopped", "length": "cut at its limit", "abort": "aborted"}

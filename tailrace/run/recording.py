"""Makes the samples that people look at from a training step or an evaluation; see `tailrace.report.samples`."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Self, cast

import numpy as np

from tailrace.config.run import RunConfig
from tailrace.report.samples import SampleRecord, choose_groups, shown_text
from tailrace.rewards.base import CORRECT
from tailrace.run.evaluation import Answer
from tailrace.transfer.queue.base import Row

_NAME = 100
"""The most characters of a part's name."""


class SampleRecorder:
    """Makes the records of a few groups."""

    def __init__(self, *, groups: int, characters: int, seed: int) -> None:
        """`groups`: how many of each step, and prompts of each evaluated set. `characters`: about, of a text."""
        self._groups = groups
        self._limit = characters
        self._seed = seed

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Make the recorder of a run."""
        observe = config.observe
        return cls(groups=observe.sample_groups, characters=observe.sample_characters, seed=config.seed)

    def of_step(self, rows: Sequence[Row], step: int) -> list[SampleRecord]:
        """The records of training step `step`, counted from 0, which has trained on `rows`."""
        if not self._groups:
            return []
        chosen = set(choose_groups({row.group_id for row in rows}, self._groups, seed=self._seed, step=step))
        groups: dict[int, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.order):
            if row.group_id in chosen:
                groups.setdefault(row.group_id, []).append(row)
        return [self._of_row(row, step, place) for group in groups.values() for place, row in enumerate(group)]

    def of_evaluation(self, answers: Sequence[Answer], step: int) -> list[SampleRecord]:
        """The records of an evaluation after `step` steps. The prompts of a set stay the same, to compare answers."""
        if not self._groups:
            return []
        numbers: dict[str, set[int]] = {}
        for answer in answers:
            numbers.setdefault(answer.set, set()).add(answer.number)
        chosen = {
            number
            for of_set in numbers.values()
            for number in choose_groups(of_set, self._groups, seed=self._seed, step=-1)
        }
        kept = sorted(
            (one for one in answers if one.number in chosen), key=lambda one: (one.number, one.way, one.index)
        )
        return [
            self._of_answer(answer, step, place)
            for _, group in groupby(kept, key=lambda answer: answer.number)
            for place, answer in enumerate(group)
        ]

    def _of_answer(self, answer: Answer, step: int, place: int) -> SampleRecord:
        prompt, sample, grade = answer.prompt, answer.sample, answer.grade
        return SampleRecord(
            kind="evaluation",
            step=step,
            set=answer.set,
            way=answer.way,
            group=answer.number,
            sample=place,
            prompt=shown_text(prompt.text, self._limit),
            response=shown_text(answer.response, self._limit),
            answer=answer_text(prompt.answer, self._limit),
            reward=grade.reward,
            **_parts(grade.parts),
            failure=shown_text(grade.error or "", self._limit),
            prompt_tokens=len(prompt.prompt_ids),
            tokens=len(sample.response_ids),
            finish_reason=sample.finish_reason.value,
            weight_versions=(int(sample.weight_versions.min()), int(sample.weight_versions.max())),
        )

    def _of_row(self, row: Row, step: int, place: int) -> SampleRecord:
        cells = cast("dict[str, Any]", row.cells)
        versions = cells["weight_versions"]
        return SampleRecord(
            kind="training",
            step=step + 1,
            group=row.group_id,
            sample=place,
            prompt=shown_text(cells["prompt"], self._limit),
            response=shown_text(cells["response"], self._limit),
            answer=answer_text(cells["answer"], self._limit),
            reward=known(cells["reward"]),
            **_parts(cells["reward_parts"]),
            failure=shown_text(cells["reward_error"], self._limit),
            advantage=float(np.mean(cells["advantages"], dtype=np.float64)),
            prompt_tokens=len(cells["prompt_ids"]),
            tokens=len(cells["response_ids"]),
            finish_reason=cells["finish_reason"],
            weight_versions=(int(versions.min()), int(versions.max())),
        )


def _parts(parts: Mapping[str, float]) -> dict[str, Any]:
    """Separate the verdict whether the response is right from the other figures of its grader."""
    others = {shown_text(name, _NAME): value for name, value in parts.items() if name != CORRECT}
    return {"parts": others, "correct": bool(parts[CORRECT]) if CORRECT in parts else None}


def answer_text(answer: Any, limit: int) -> str | None:
    """An answer as people see it: JSON where it is no text."""
    if answer is None:
        return None
    return shown_text(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False), limit)


def known(reward: float) -> float | None:
    """The reward, or None where it is NaN because its grading failed."""
    return None if math.isnan(reward) else reward

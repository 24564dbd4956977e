"""From the rows of a training step to the samples that people look at, see `tailrace.samples`."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tailrace.config.run import RunConfig
from tailrace.rewards.base import CORRECT
from tailrace.samples import SampleRecord, choose_groups, shown_text
from tailrace.transfer.queue.base import Row

_NAME = 100
"""Characters of the name of a part."""


class SampleRecorder:
    """Makes the records of a few groups; all of them cost less than one forward pass of one."""

    def __init__(self, config: RunConfig) -> None:
        self._groups = config.observe.sample_groups
        self._limit = config.observe.sample_characters
        self._seed = config.seed

    def of_step(self, rows: Sequence[Row], step: int) -> list[SampleRecord]:
        """Of a training step, counted from 0, that has trained on `rows`."""
        if not self._groups:
            return []
        chosen = set(choose_groups({row.group_id for row in rows}, self._groups, seed=self._seed, step=step))
        groups: dict[int, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.order):
            if row.group_id in chosen:
                groups.setdefault(row.group_id, []).append(row)
        return [self._of_row(row, step, place) for group in groups.values() for place, row in enumerate(group)]

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
    """Whether the response is right apart from the other figures of its grader."""
    others = {shown_text(name, _NAME): value for name, value in parts.items() if name != CORRECT}
    return {"parts": others, "correct": bool(parts[CORRECT]) if CORRECT in parts else None}


def answer_text(answer: Any, limit: int) -> str | None:
    """An answer for people: as JSON where it is no text."""
    if answer is None:
        return None
    return shown_text(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False), limit)


def known(reward: float) -> float | None:
    """None for the NaN of a grading that failed."""
    return None if math.isnan(reward) else reward

"""Decoupled clip and dynamic sampling policy optimization: DAPO, Yu et al. 2025.

GRPO's advantages, without a reference, with four changes:

- clip-higher: the ratio's bound above is larger than the one below (section 3.1), `clip_low` and `clip_high`;
- dynamic sampling: a group whose graded rewards are all equal is thrown away, and another prompt takes its place in the
  step (section 3.2). It is generated while everything else goes on;
- the mean over tokens (section 3.3), `loss_agg_mode`;
- over-long responses lose reward softly (section 3.4, equation 13), or take no part in the loss.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.table import TRAINED_ON, Cells, Compute, Remake, TableTask, actor
from tailrace.config.algorithm import DapoConfig
from tailrace.types import FinishReason

KEPT = "kept"
"""The column with 1 on the tokens of responses that take part in the loss, with `overlong.filter`."""


class Dapo(Grpo):
    """See the module."""

    def __init__(self, config: DapoConfig) -> None:
        """`config`: the recipe's, with a rollout correction and the longest response chosen."""
        super().__init__(config)
        self._own = config

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        """The table: that of `PolicyGradient`; with a filter the actor reads what is kept."""
        *before, last = super().tasks
        if not self._own.overlong.filter:
            return (*before, last)
        further = [column for column in last.reads if column not in TRAINED_ON]
        return (*before, actor(self.loss, *further, KEPT))

    def advantage_task(self) -> TableTask:
        """The task that computes advantages, and has groups without signal remade."""
        task, sampling = super().advantage_task(), self._own.dynamic_sampling
        work = Compute(
            self.advantages, remake=None if sampling is None else Remake(has_no_signal, sampling.max_attempts)
        )
        if not self._own.overlong.filter:
            return replace(task, work=work)
        reads = (*task.reads, "finish_reason")
        return replace(task, work=work, reads=reads, writes=(*task.writes, KEPT))

    def advantages(self, rows: Sequence[Cells]) -> list[Cells]:
        """The advantage of each row of a group, on every token, and with a filter whether it is kept."""
        punished = [{**row, "reward": float(row["reward"]) - self.penalty(len(row["response_mask"]))} for row in rows]
        found = super().advantages(punished)
        if not self._own.overlong.filter:
            return found
        kept = [float(row["finish_reason"] != FinishReason.LENGTH) for row in rows]
        return [
            {**cells, KEPT: np.full(len(cells["advantages"]), keep, np.float32)}
            for cells, keep in zip(found, kept, strict=True)
        ]

    def penalty(self, tokens: int) -> float:
        """What a response of so many tokens loses of its reward (equation 13)."""
        overlong, longest = self._own.overlong, self._own.max_response_tokens
        if not overlong.penalty_tokens or longest is None:
            return 0.0
        beyond = tokens - (longest - overlong.penalty_tokens)
        return overlong.penalty_factor * min(1.0, max(0.0, beyond / overlong.penalty_tokens))

    def loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of the tokens that are kept."""
        if KEPT in inputs.columns_N:
            inputs = replace(inputs, mask_N=inputs.mask_N * (inputs.columns_N[KEPT] > 0))
        return super().loss(inputs)


def has_no_signal(rows: Sequence[Cells]) -> bool:
    """Whether the rewards of a group are all equal. A group with fewer than two graded samples is another matter."""
    graded = [reward for row in rows if not np.isnan(reward := float(row["reward"]))]
    return len(graded) > 1 and len(set(graded)) == 1
